"""The flags that every trainer has, and what makes a run the same run when it is continued."""

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from trainkit_gka.cli import MAY_CHANGE, Bounds, Count, CountOrOff, Group, MayChange, Seed, UserError, flag_of


@dataclass(frozen=True)
class RunConfig:
    """The base of a trainer's flags. A run lives in the folder OUT/TAG; continuing it takes the same settings.

    The type of a field that a continued run may change is `MayChange[...]`: it decides speed, reports or where files
    are, not what is computed.
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
        """The settings that decide what is computed, as JSON holds them; a continued run must have the same."""
        hints = get_type_hints(type(self), include_extras=True)
        changeable = {name for name, hint in hints.items() if MAY_CHANGE in getattr(hint, "__metadata__", ())}
        return _as_json({name: value for name, value in asdict(self).items() if name not in changeable})

    def record(self) -> dict[str, Any]:
        """The settings as a line of the results states them."""
        return {**self.identity(), "model_tag": self.tag}

    def check(self) -> None:
        """Raises UserError for values that make no sense together; `trainkit_gka.cli` has checked each one's bounds."""
        if not self.tag or "/" in self.tag or self.tag.startswith("."):
            raise UserError(f"--model-tag must be a plain folder name, got {self.tag!r}")

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Of all flags, as an identity has them: what a run had of a flag that is younger."""
        return _as_json({field.name: field.default for field in fields(cls)})

    def check_continues(self, saved: dict[str, Any]) -> None:
        """Raises UserError that names the first flag whose value differs from the run's, whose identity is `saved`.

        A flag that is younger than the run had its default there. One that only the run has is refused.
        """
        defaults = self.defaults()
        if unknown := sorted(saved.keys() - defaults.keys()):
            given = f"{flag_of(unknown[0])} {_shown(saved[unknown[0]])}"
            raise UserError(f"the run in {self.folder} has {given}, which this trainer does not know")
        for name, value in self.identity().items():
            had = saved.get(name, defaults[name])
            if had != value:
                tag = "" if replace(self, **{name: had}).tag == self.tag else f" with --model-tag {self.tag}"
                differs = f"{flag_of(name)} is {_shown(value)} but the run in {self.folder} has {_shown(had)}"
                raise UserError(f"{differs}; use its value{tag}, or another --model-tag")


def _shown(value: Any) -> Any:
    return "none" if value in ("", None) else value


def _as_json(settings: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(settings, default=str))
