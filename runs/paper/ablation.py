"""The paper's ablation of projection matrices: table 5, section 4.4; size Ti on ImageNet, 300 epochs for every model.

Command:   make ablate-projections DATA=/imagenet NGPU=7 (trains the models one after another, then prints the table)
           python -m runs.paper.ablation --runs out/runs (the table of finished runs)
Hardware:  7 RTX 5090 of 32 GB, bfloat16, 256 images each
Hours:     about 24 on those 7, an estimate: 4.6 for softmax and as much for VLT, 7.8 for GKA, 7 for the hybrid
Expected:  top-1 72.2 softmax (Q K V O), 73.5 VLT (Q K O), 71.54 GKA (O); not run here yet

The last row is ours: GKA in three layers of four and softmax in the fourth, which the paper leaves to later work.
"""

from dataclasses import dataclass
from pathlib import Path

from gka.kinds import KINDS
from runs import commands
from runs.paper import deit, published
from runs.table import Table
from trainkit_gka.cli import UserError, run
from trainkit_gka.loop import finish_record


@dataclass
class AblationConfig:
    """Print one vision model of every kind and a hybrid side by side, from their finished runs, beside the paper's
    figures."""

    runs: Path = Path("out/runs")
    """Folder that holds the runs, named after their models."""
    hybrid: str = commands.HYBRID
    """The hybrid's kinds by layer; empty = none. Its row is left out while its run is not finished."""


def models() -> dict[str, str]:
    """The name of every kind -> the timm model of the ablation."""
    return {name: commands.vision_model(f"ti-{deit.SOFTMAX_TARGET if name == 'softmax' else name}") for name in KINDS}


def hybrid_run(pattern: str) -> str:
    """The folder of the hybrid's run, as the trainer names it."""
    return f"{models()[deit.DEFAULT_KIND]}-{pattern}"


def finished(folder: Path) -> dict | None:
    """The numbers of a finished run."""
    return finish_record(folder, ("parameters", "flops", "top1"))


def table(runs: Path, hybrid: str = "") -> Table:
    """The kinds side by side; in brackets the paper's figures. Raises UserError if a kind's run is missing."""
    records = {name: finished(runs / model) for name, model in models().items()}
    for name, record in records.items():
        if record is None:
            missing = runs / models()[name]
            raise UserError(f"{missing} holds no finished run; make ablate-projections DATA=... trains them all")
    rows = []
    for name, record in records.items():
        printed = published.rows("ablation").get(f"{deit.PAPER_NAMES[name]}-Ti", {})
        rows.append([KINDS[name].label, " ".join(f"{KINDS[name].input_projections}O"), *cells(record, printed)])
    ours = finished(runs / hybrid_run(hybrid)) if hybrid else None
    if ours:
        rows.append([f"{hybrid} (ours)", "by layer", *cells(ours, {})])
    title = "Ablation of projections at size Ti; in brackets the paper, on ImageNet after 300 epochs"
    headings = ["", "matrices", "params (M)", "GFLOPs", "top-1", "EMA top-1"]
    return Table.of(headings, rows, title=title, notes=published.notes("ablation"), words=2)


def cells(record: dict, printed: dict[str, str]) -> list[str]:
    """Parameters, FLOPs and accuracies of a run, in brackets the paper's."""
    flops, ema = record["flops"], record.get("ema_top1")
    return [
        with_paper(f"{record['parameters'] / 1e6:.2f}", printed.get("params")),
        with_paper("-" if flops is None else f"{flops / 1e9:.2f}", printed.get("gflops")),
        f"{record['top1']:.2f}",
        with_paper("-" if ema is None else f"{ema:.2f}", printed.get("top1")),
    ]


def with_paper(measured: str, printed: str | None) -> str:
    return f"{measured} ({printed})" if printed else measured


def main(config: AblationConfig) -> None:
    table(config.runs, config.hybrid).show()


if __name__ == "__main__":
    run(main, AblationConfig)
