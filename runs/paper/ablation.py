"""The paper's ablation of projection matrices beside the runs of `make ablate-projections`.

python -m runs.paper.ablation --runs out/runs
"""

import json
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from trainkit.cli import UserError, run
from trainkit.progress import console, read_events

_PRINTED = json.loads((Path(__file__).parent / "published.json").read_text())
PAPER, DEIT_NOTE = _PRINTED["ablation"], _PRINTED["vision_notes"][-1]
MODELS = {
    "softmax": ("Q K V O", "deit_tiny_patch16_224"),
    "VLT": ("Q K O", "deit_tiny_vlt_patch16_224"),
    "GKA": ("O", "deit_tiny_gka_patch16_224"),
}


@dataclass
class AblationConfig:
    """Print softmax, VLT and GKA side by side, from their finished runs, beside the paper's figures."""

    runs: Path = Path("out/runs")
    """folder that holds the three runs, named after their models"""


def finished(folder: Path) -> dict:
    """The numbers of a finished run. Raises UserError if there are none."""
    records = read_events(folder / "log.jsonl", "finish", "parameters", "flops", "top1")
    if not records:
        raise UserError(f"{folder} holds no finished run; make ablate-projections DATA=... trains the three")
    return records[-1]


def main(config: AblationConfig) -> None:
    rows = {label: finished(config.runs / model) for label, (_, model) in MODELS.items()}
    title = "\nAblation of projections at size Ti; in brackets the paper, on ImageNet after 300 epochs"
    table = Table(title=title, caption=DEIT_NOTE)
    for heading in ("", "projections", "params (M)", "GFLOPs", "top-1", "EMA top-1"):
        table.add_column(heading, justify="left" if heading in ("", "projections") else "right", no_wrap=True)
    for label, row in rows.items():
        ema, paper = f"{row['ema_top1']:.2f}" if "ema_top1" in row else "-", PAPER[label]
        gflops = "-" if row["flops"] is None else f"{row['flops'] / 1e9:.2f}"
        table.add_row(label, MODELS[label][0], f"{row['parameters'] / 1e6:.2f} ({paper['params']})", f"{gflops} ({paper['gflops']})",
                      f"{row['top1']:.2f}", f"{ema} ({paper['top1']})")  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    run(main, AblationConfig)
