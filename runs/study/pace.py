"""How long a cell takes: its FLOPs over the FLOP/s that finished cells of about its depth reached."""

import statistics
from collections import defaultdict
from collections.abc import Iterable

from runs.study.cells import EVAL_TOKENS, EVALUATE_ALONG_FROM, Cell
from runs.study.data import Text

GUESSED_FLOPS = 8e10  # FLOP/s of one thread, before anything is measured
START_SECONDS = 8.0  # of a process, most of it for importing PyTorch


class Pace:
    """The FLOP/s of training, median over the finished cells (`rows`) of a depth and dtype."""

    def __init__(self, text: Text, rows: Iterable[dict]):
        self.text, measured = text, defaultdict(list)
        for row in rows:
            if speed := row["metrics"]["tokens_per_second"]:  # else too few steps to time
                flops = speed * row["metrics"]["flops_per_token"]
                measured[row["cell"]["depth"], row["cell"]["dtype"]].append(flops)
        self.measured = {place: statistics.median(speeds) for place, speeds in measured.items()}

    def flops_per_second(self, cell: Cell) -> float:
        """As measured at this dtype and the nearest depth, or a guess if nothing is."""
        depths = [depth for depth, dtype in self.measured if dtype == cell.dtype]
        if not depths:
            return GUESSED_FLOPS
        return self.measured[min(depths, key=lambda depth: abs(depth - cell.depth)), cell.dtype]

    def seconds(self, cell: Cell) -> float:
        """Of the whole cell: start, training, and evaluations, which cost a third of training on as many tokens."""
        flops = cell.flops(self.text.sequence_len, self.text.vocab_size)
        evaluations = 5 if cell.tokens >= EVALUATE_ALONG_FROM else 2
        evaluated = evaluations * 2 * EVAL_TOKENS / 3
        return START_SECONDS + flops * (1 + evaluated / cell.tokens) / self.flops_per_second(cell)
