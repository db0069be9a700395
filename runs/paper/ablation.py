"""The paper's ablation of projection matrices: table 5, section 4.4; size Ti on ImageNet, 300 epochs for every model.

Command:   make ablate-projections DATA=/imagenet NGPU=7 (trains the models one after another, then prints the table)
           python -m runs.paper.ablation --runs out/runs (the table of finished runs)
           With HYBRIDS=GGGA, or --hybrids GGGA, a model with softmax in every fourth layer is trained and shown too.
Hardware:  7 RTX 5090 of 32 GB, bfloat16, 256 images each
Hours:     about 17 on those 7, an estimate: 4.6 for softmax and as much for VLT, 7.8 for GKA (runs/paper/deit.py)
Expected:  top-1 72.2 softmax (Q K V O), 73.5 VLT (Q K O), 71.54 GKA (O); not run here yet
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from deit_gka.model.registry import model_name
from gka.kinds import KINDS
from runs import launch
from runs.paper import common, deit, published
from trainkit.cli import UserError
from trainkit.progress import console, read_events

SIZE = "ti"
HYBRID = model_name(deit.SIZE_NAMES[SIZE], "gka")  # the model that --hybrids give other layers


@dataclass
class AblationConfig(common.Training):
    """Print one vision model of every kind side by side, from their finished runs, beside the paper's figures. With
    --data, train them first; the trainer's own flags follow `--`."""

    runs: Path = Path("out/runs")
    """Folder that holds the runs, named after their models."""
    data: str = ""
    """Images to train on first; empty = print the table alone."""
    hybrids: tuple[str, ...] = ()
    """Patterns by layer that are trained and shown beside the paper's kinds, such as GGGA."""


def models() -> dict[str, str]:
    """The name of every kind -> the timm model of the ablation."""
    return {name: model_name(deit.SIZE_NAMES[SIZE], name) for name in KINDS}


def training(config: AblationConfig, extra: list[Any]) -> list[list[str]]:
    """The commands that train the models."""
    vision = deit.VisionConfig(base=config.base, ngpu=config.ngpu, wandb=config.wandb, data=config.data)
    kinds = [deit.words(vision, model, extra) for model in models().values()]
    hybrids = [deit.words(vision, HYBRID, ["--attention", pattern, *extra]) for pattern in config.hybrids]
    return kinds + hybrids


def finished(folder: Path) -> dict:
    """The numbers of a finished run. Raises UserError if there are none."""
    records = read_events(folder / "log.jsonl", "finish", "parameters", "flops", "top1")
    if not records:
        raise UserError(f"{folder} holds no finished run; make ablate-projections DATA=... trains them all")
    return records[-1]


def table(runs: Path, hybrids: Sequence[str] = ()) -> Table:
    """The kinds of attention side by side; in brackets the paper's figures. Raises UserError if a run is missing.

    hybrids: patterns by layer, which the paper does not have.
    """
    records = {name: finished(runs / model) for name, model in models().items()}
    records |= {pattern: finished(runs / f"{HYBRID}-{pattern}") for pattern in hybrids}
    title = "\nAblation of projections at size Ti; in brackets the paper, on ImageNet after 300 epochs"
    shown = Table(title=title, caption=" ".join(published.notes("ablation")))
    for heading in ("", "projections", "params (M)", "GFLOPs", "top-1", "EMA top-1"):
        shown.add_column(heading, justify="left" if heading in ("", "projections") else "right", no_wrap=True)
    for name, record in records.items():
        kind = KINDS.get(name)
        printed = published.rows("ablation").get(f"{deit.PAPER_NAMES[name]}-Ti", {}) if kind else {}
        flops, ema = record["flops"], record.get("ema_top1")
        shown.add_row(
            kind.label if kind else name,
            " ".join(f"{kind.input_projections}O") if kind else "by layer",
            with_paper(f"{record['parameters'] / 1e6:.2f}", printed.get("params")),
            with_paper("-" if flops is None else f"{flops / 1e9:.2f}", printed.get("gflops")),
            f"{record['top1']:.2f}",
            with_paper("-" if ema is None else f"{ema:.2f}", printed.get("top1")),
        )
    return shown


def with_paper(measured: str, printed: str | None) -> str:
    return f"{measured} ({printed})" if printed else measured


def main(config: AblationConfig, extra: list[str]) -> None:
    if config.data:
        for words in training(config, extra):
            launch.run(words)
    console.print(table(config.runs, config.hybrids))


if __name__ == "__main__":
    common.run(main, AblationConfig)
