"""The flags that every trainer has, and the check that a continued run has the settings of the run it continues."""

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from trainkit_gka.cli import MAY_CHANGE, Bounds, Count, CountOrOff, Group, MayChange, Seed, UserError, flag_of


@dataclass(frozen=True)
class RunConfig:
    """The base of a trainer's flags. A run is in the folder OUT/TAG; continuing it takes the same settings.

    A continued run may change fields of type `MayChange[...]`: speed, reports and paths, which do not change the
    weights.
    """

    out: MayChange[Path] = Path("out/runs")
    """Folder for runs; this one goes to OUT/TAG."""
    model_tag: MayChange[str] = ""
    """Name of the run."""
    device_type: MayChange[Literal["auto", "cuda", "cpu"]] = "auto"
    """Where to compute; auto takes CUDA if there is one."""
    seed: Seed = 42
    """Seed of the weights and of the order of the data."""
    eval_every: MayChange[Annotated[CountOrOff, Group.LOGGING]] = 250
    """Steps between evaluations; -1 evaluates at the end only."""
    save_every: MayChange[CountOrOff] = 250
    """Steps between checkpoints; -1 saves at the end only."""
    keep: MayChange[Count] = 2
    """How many checkpoints to keep, the newest ones."""
    log_every: MayChange[Annotated[Count, Group.LOGGING]] = 10
    """Steps between printed lines."""
    stop_after: MayChange[CountOrOff] = -1
    """Stop after this step and save; the length of the run stays (for trying things out)."""
    stopped_code: MayChange[Annotated[int, Bounds(0, 255)]] = 0
    """Exit code after a signal, when all is saved: not 0 for a job that then puts itself back into a queue."""
    wandb: MayChange[Annotated[Literal["disabled", "offline", "online"], Group.LOGGING]] = "disabled"
    """Weights & Biases; offline needs no account."""
    tensorboard: MayChange[Annotated[bool, Group.LOGGING]] = False
    """Write the same numbers for TensorBoard, into the run's folder (tensorboard --logdir OUT)."""
    profile: MayChange[str] = ""
    """Record these steps, such as 10-15, by torch.profiler: a trace in the run's folder. They take longer."""
    dry_run: MayChange[bool] = False
    """Train nothing and write nothing: check what can be checked, show the settings and what training would take."""
    results: MayChange[Annotated[Path, Group.LOGGING]] = Path("out/results.jsonl")
    """File to append the finished run's numbers to."""

    @property
    def tag(self) -> str:
        """Name of the run's folder."""
        return self.model_tag

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.out / self.tag

    def identity(self) -> dict[str, Any]:
        """The settings that a continued run must share, those that decide the weights, as JSON holds them."""
        hints = get_type_hints(type(self), include_extras=True)
        changeable = {name for name, hint in hints.items() if MAY_CHANGE in getattr(hint, "__metadata__", ())}
        return _as_json({name: value for name, value in asdict(self).items() if name not in changeable})

    def record(self) -> dict[str, Any]:
        """The settings for a line of the results."""
        return {**self.identity(), "model_tag": self.tag}

    def check(self) -> None:
        """Raises UserError for values that contradict each other; `trainkit_gka.cli` has checked their bounds."""
        if not self.tag or "/" in self.tag or self.tag.startswith("."):
            raise UserError(f"--model-tag must be a plain folder name, got {self.tag!r}")

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The defaults of all flags, as JSON holds them."""
        return _as_json({field.name: field.default for field in fields(cls)})

    def check_continues(self, saved: dict[str, Any]) -> None:
        """Raises UserError that names the first flag whose value differs from `saved`, the identity of the run.

        A flag added after the run began counts as its default; a saved flag that no longer exists is an error.
        """
        defaults = self.defaults()
        if unknown := sorted(saved.keys() - defaults.keys()):
            setting = f"{flag_of(unknown[0])} {_as_text(saved[unknown[0]])}"
            raise UserError(f"the run in {self.folder} has {setting}, which this trainer does not know")
        for name, value in self.identity().items():
            had = saved.get(name, defaults[name])
            if had != value:
                tag = "" if replace(self, **{name: had}).tag == self.tag else f" with --model-tag {self.tag}"
                differs = f"{flag_of(name)} is {_as_text(value)} but the run in {self.folder} has {_as_text(had)}"
                raise UserError(f"{differs}; use its value{tag}, or another --model-tag")


def _as_text(value: Any) -> Any:
    return "none" if value in ("", None) else value


def _as_json(settings: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(settings, default=str))
