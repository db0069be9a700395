"""The smallest trainer that the loop drives: its weights are a sum that depends on every step and on their order."""

import resource
import subprocess
import time
from dataclasses import dataclass

import torch

from trainkit_gka.cli import MayChange, run
from trainkit_gka.distributed import Stop
from trainkit_gka.loop import launch
from trainkit_gka.run_config import RunConfig
from trainkit_gka.trainer import Contents, Evaluation, Trainer


@dataclass(frozen=True)
class ToyConfig(RunConfig):
    """Add up `steps` numbers, times `rate`. A step, or one of the `judged` items of an evaluation, takes `seconds`.

    A checkpoint holds `ballast` more numbers. Step `slow` waits on rank 0 for a process that takes minutes, as for a
    compiler; the loop waits for it until `limit` seconds after a signal. No file may have more than `most_bytes`.
    """

    steps: int = 12
    rate: float = 1.0
    seconds: MayChange[float] = 0.0
    judged: MayChange[int] = 0
    ballast: MayChange[int] = 0
    slow: MayChange[int] = 0
    limit: MayChange[float] = Stop.LIMIT
    most_bytes: MayChange[int] = -1


class ToyTrainer(Trainer):
    KIND, STEP, LOWER, FINISH_KEYS = "toy", "round", "a lower --rate", ("total",)
    CPU = torch.device("cpu")

    def __init__(self, config, runtime, checkpoint=None):
        super().__init__(config, runtime)
        Stop.LIMIT = config.limit
        resource.setrlimit(resource.RLIMIT_FSIZE, (config.most_bytes, resource.RLIM_INFINITY))
        self.model, self.steps = torch.nn.Linear(2, 1, bias=False), config.steps
        self.evaluations = [Evaluation("eval", config.eval_every, self.evaluate, ("saved",), at_start=True)]
        if checkpoint is not None:
            self.state = checkpoint.state["progress"]
            self.model.load_state_dict(checkpoint.tensors("model"))

    def announce(self):
        return {}

    def step(self, asked_to_stop):
        time.sleep(self.config.seconds)
        if self.config.slow == self.state["step"] + 1 and self.runtime.is_main:
            subprocess.run(["sleep", "300"])
        self.state["step"] += 1
        with torch.no_grad():
            self.model.weight.mul_(1 + self.config.rate / self.state["step"]).add_(self.state["step"])
        return {"loss": self.model.weight.sum().item()}, self.runtime.any(asked_to_stop)

    def status(self, numbers):
        return ""

    def describe(self, numbers):
        return f"round {self.state['step']}", numbers

    def contents(self):
        ballast = torch.full((self.config.ballast,), self.state["step"])
        return Contents({"model": self.model.state_dict(), "ballast": {"step": ballast}})

    def evaluate(self, log, stop, bar):
        print("evaluating", flush=True)
        for _ in self.runtime.rounds(range(self.config.judged), stop):
            time.sleep(self.config.seconds)
        saved = sorted(int(path.name[5:]) for path in (self.folder / "checkpoints").glob("step_*"))
        log.log("eval", self.state["step"], saved=saved)

    def summary(self, log):
        total = self.model.weight.sum().item()
        return {"total": total}, f"total {total:.1f}"


if __name__ == "__main__":
    run(lambda config: launch(config, ToyTrainer), ToyConfig)
