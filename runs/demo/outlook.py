"""How far a long command is and how long it still needs: a live display on a terminal, a line now and then in a log."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from trainkit_gka.progress import console

LINE_EVERY = 15.0  # seconds between lines where there is no terminal
TRUST = 20.0  # seconds of work after which the measured pace counts as much as the expected one


class Outlook:
    """Stages with the seconds each is expected to take on a 2-core machine; the pace so far corrects what is left."""

    def __init__(self, expected: dict[str, float]):
        self.expected, self.finished = dict(expected), dict.fromkeys(expected, 0.0)
        self.stage, self.started, self.said = "", time.monotonic(), -LINE_EVERY

    @contextmanager
    def during(self, stage: str) -> Iterator[None]:
        """Announce a stage, and count it as done at its end."""
        self.stage = stage
        number = list(self.expected).index(stage) + 1
        line = f"\n[{number}/{len(self.expected)}] {stage}; {self.sentence()}"
        console.print(line, style="bold", highlight=False, markup=False)
        self.said = time.monotonic()
        yield
        self.finished[stage] = 1.0

    def advance(self, fraction: float) -> None:
        """Say that `fraction` (0 to 1) of the present stage is done."""
        self.finished[self.stage] = min(1.0, fraction)

    def left(self) -> float:
        """Seconds until the last stage ends, at the pace so far."""
        done = sum(seconds * self.finished[stage] for stage, seconds in self.expected.items())
        pace = (time.monotonic() - self.started + TRUST) / (done + TRUST)
        return pace * (sum(self.expected.values()) - done)

    def sentence(self) -> str:
        """How much is left, in words."""
        minutes, seconds = divmod(round(self.left()), 60)
        return f"about {f'{minutes} min ' if minutes else ''}{seconds:02d} s left in all"

    def say(self, details: str) -> None:
        """Where there is no terminal, print what is going on if the last such line is some time ago."""
        if console.is_terminal or time.monotonic() - self.said < LINE_EVERY:
            return
        self.said = time.monotonic()
        console.print(f"  {details}; {self.sentence()}", highlight=False, markup=False)
