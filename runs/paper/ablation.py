"""The paper's ablation of projection matrices beside finished runs of ours: table 5, size Ti, 300 epochs on ImageNet.

    make ablate-projections DATA=/imagenet NGPU=7       trains the models one after another, then prints the table
    python -m runs.paper.ablation --runs out/runs       the table of finished runs

The last row is ours: GKA in three layers of four and softmax in the fourth, which the paper leaves to later work.
"""

from dataclasses import dataclass
from pathlib import Path

from deit_gka.model.registry import model_name
from gka.kinds import KINDS
from runs.paper import published
from runs.table import Table
from trainkit_gka.cli import UserError, run
from trainkit_gka.loop import finish_record

MODELS = {kind: model_name("tiny", kind) for kind in KINDS}  # folders of the runs


@dataclass
class AblationConfig:
    """Print one vision model of every kind and a hybrid side by side, from their finished runs, beside the paper's
    figures."""

    runs: Path = Path("out/runs")
    """Folder that holds the runs, named after their models."""
    hybrid: str = "GGGA"
    """The hybrid's kinds by layer; empty = none. Its row is left out while its run is not finished."""


def table(runs: Path, hybrid: str = "") -> Table:
    """The kinds side by side; in brackets the paper's figures. Raises UserError if a kind's run is missing."""
    rows = []
    for kind, model in MODELS.items():
        record = finish_record(runs / model, ("parameters", "flops", "top1"))
        if record is None:
            raise UserError(f"{runs / model} holds no finished run; make ablate-projections DATA=... trains them all")
        printed = published.rows("ablation").get(f"{published.PAPER_NAMES[kind]}-Ti", {})
        rows.append([KINDS[kind].label, " ".join(f"{KINDS[kind].input_projections}O"), *cells(record, printed)])
    if hybrid and (record := finish_record(runs / f"{MODELS['gka']}-{hybrid}", ("parameters", "flops", "top1"))):
        rows.append([f"{hybrid} (ours)", "by layer", *cells(record, {})])
    title = "Ablation of projections at size Ti; in brackets the paper, on ImageNet after 300 epochs"
    headings = ["", "matrices", "params (M)", "GFLOPs", "top-1", "EMA top-1"]
    return Table.of(headings, rows, title=title, notes=published.notes("ablation"), words=2)


def cells(record: dict, printed: dict[str, str]) -> list[str]:
    """Parameters, FLOPs and accuracies of a run, in brackets the paper's."""

    def cell(value: float | None, key: str) -> str:
        text = "-" if value is None else f"{value:.2f}"
        return f"{text} ({printed[key]})" if key in printed else text

    flops, top1 = record["flops"], f"{record['top1']:.2f}"
    gflops = cell(None if flops is None else flops / 1e9, "gflops")
    return [cell(record["parameters"] / 1e6, "params"), gflops, top1, cell(record.get("ema_top1"), "top1")]


def main(config: AblationConfig) -> None:
    table(config.runs, config.hybrid).show()


if __name__ == "__main__":
    run(main, AblationConfig)
