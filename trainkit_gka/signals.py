"""What ends a command from outside: SIGTERM, a closed terminal (SIGHUP), and output that nobody can read any more.

A command ends at once with `Stopped`. A training loop and a command that has started others set handlers of their own,
to save first or to pass the signal on.
"""

import contextlib
import errno
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)
GRACE = 5.0  # seconds that a command has to end by itself
UNHEARD = {errno.EIO}  # errors of output that go unnoticed; EIO: the terminal is gone


class Stopped(SystemExit):
    """A signal asks this process to end; `number` says which. Its exit code is a shell's, 128 + number."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.number = number

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.number).name}"


def ending() -> list[signal.Signals]:
    """The signals that end a command: SIGTERM, and SIGHUP unless it is ignored, as it is under nohup."""
    return [signal.SIGTERM, *([signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else [])]


@contextlib.contextmanager
def handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Within the block `handler` gets the signals that end a command. Other threads than the main one get none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in ending()}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextlib.contextmanager
def passed_on(processes: Callable[[], Iterable]) -> Iterator[None]:
    """Within the block the first signal goes on to `processes()`, of subprocess.Popen, and then raises Stopped.

    Whoever started them waits for them then: they may save first.
    """
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            for process in processes():
                process.send_signal(number)
            raise Stopped(number)

    with handled(pass_on):
        yield


class _Watch:
    """The handler of `at_once`: the first signal raises Stopped; the process ends if that does not end it in time."""

    def __init__(self) -> None:
        self.heard: int | None = None
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.heard is None:
            self.heard = number
            raise Stopped(number)

    def run(self) -> None:
        while received := os.read(self.reader, 1):  # at the signal itself, before Python runs its handler
            if signal.getsignal(received[0]) is self:
                time.sleep(GRACE)
                if signal.getsignal(received[0]) is self:
                    say(Stopped(received[0]))
                    os._exit(128 + received[0])
        os.close(self.reader)


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Within the block a signal that ends a command raises Stopped in the main thread.

    Where that is in a library's call that takes long, or waits for another process, the process ends after GRACE
    seconds; what a library makes an error of its own of is Stopped again. Handlers that are set inside take the place
    of this.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    watch = _Watch()
    wakeup = signal.set_wakeup_fd(watch.writer, warn_on_full_buffer=False)
    threading.Thread(target=watch.run, daemon=True).start()
    try:
        with handled(watch):
            yield
    except Exception as error:
        if watch.heard is None:
            raise
        raise Stopped(watch.heard) from error
    finally:
        signal.set_wakeup_fd(wakeup)
        os.close(watch.writer)


def say(stopped: Stopped) -> None:
    """Print the line of a stopped command, once for all of its processes."""
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError):
            print(stopped, file=sys.stderr, flush=True)


class _Output(io.FileIO):
    """Standard output or error, which becomes nothing when it cannot be heard."""

    def write(self, data) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in UNHEARD:
                raise
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.fileno())
            os.close(nothing)
            return len(data)


def keep_output() -> None:
    """Have printing go on when the terminal is gone. Streams that are not this process's own stay as they are."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue
        stream.flush()
        raw = _Output(stream.fileno(), "w", closefd=False)
        kept = {key: getattr(stream, key) for key in ("encoding", "errors", "line_buffering", "write_through")}
        # Python itself has no buffer where output is to be unbuffered.
        setattr(sys, name, io.TextIOWrapper(raw if stream.write_through else io.BufferedWriter(raw), **kept))


def outlive_readers() -> None:
    """Have printing go on, too, when whoever read a pipe has left: work that takes hours does not end with `tee`."""
    UNHEARD.add(errno.EPIPE)
