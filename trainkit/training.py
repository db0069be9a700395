"""What a run of either trainer shares: which settings make it the same run, and how it starts and ends."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from trainkit.cli import UserError, check_bounds
from trainkit.distributed import Runtime, running
from trainkit.files import locked
from trainkit.progress import RunLog
from trainkit.results import check_appendable


class RunConfig:
    """Mixed into a trainer's dataclass of flags. A run lives in `out`/`tag`; continuing it takes the same settings."""

    # What may differ when a run is resumed: it changes speed, reports and where things are, not what is computed.
    OPERATIONAL: ClassVar[set[str]] = set()

    out: Path
    model_tag: str
    device_type: str
    seed: int
    wandb: str
    results: Path

    @property
    def tag(self) -> str:
        """Name of the run's folder."""
        return self.model_tag

    @property
    def folder(self) -> Path:
        return self.out / self.tag

    def identity(self) -> dict[str, Any]:
        """The settings that decide what is computed, as JSON holds them; a resumed run must agree with all of them."""
        settings = {key: value for key, value in asdict(self).items() if key not in self.OPERATIONAL}
        return json.loads(json.dumps(settings, default=str))

    def check_resumes(self, saved: dict[str, Any]) -> None:
        """Raises UserError naming the first flag that differs from the run being resumed; a flag younger than the run had its default there."""
        defaults = json.loads(json.dumps({field.name: field.default for field in fields(self)}, default=str))
        for key, value in self.identity().items():
            had = saved.get(key, defaults[key])
            if had != value:
                flag = "--" + key.replace("_", "-")
                tag = "" if replace(self, **{key: had}).tag == self.tag else f" with --model-tag {self.tag}"
                differs = f"{flag} is {value} but the run in {self.folder} has {had}"
                raise UserError(f"{differs}; use its value{tag}, or another --model-tag")

    def check(self) -> None:
        """Raises UserError for values that make no sense. A trainer's own checks call this first."""
        check_bounds(self)
        if not self.tag or "/" in self.tag or self.tag.startswith("."):
            raise UserError(f"--model-tag must be a plain folder name, got {self.tag!r}")


class Trainer(Protocol):
    """What `launch` needs of a trainer. `state["step"]` counts the updates done; `model` holds the weights all processes must share."""

    state: dict[str, Any]
    model: torch.nn.Module

    def resume(self) -> None: ...


def launch(
    config: RunConfig, make_trainer: Callable[[Any, Runtime], Trainer], train: Callable[[Any, RunLog], None]
) -> None:
    """Join the processes, take the run's folder, build and resume the trainer, open its log, and `train(trainer, log)`.

    Raises UserError, on every process, for anything the user can mend.
    """
    config.check()
    with running(config.device_type, config.seed) as runtime, contextlib.ExitStack() as held:

        def prepare() -> tuple[Trainer, RunLog]:
            if runtime.is_main:
                held.enter_context(locked(config.folder, "training in"))
                check_appendable(config.results)
            trainer = make_trainer(config, runtime)
            trainer.resume()
            log = RunLog(config.folder / "log.jsonl", resume_step=trainer.state["step"], wandb_mode=config.wandb, name=config.tag,
                         config=config.identity(), enabled=runtime.is_main)  # fmt: skip
            held.callback(log.close)
            return trainer, log

        trainer, log = runtime.agree(prepare)
        runtime.broadcast(trainer.model.parameters())
        train(trainer, log)
