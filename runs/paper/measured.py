"""What this project knows of the paper's cells: exact counts, and finished runs of exactly the paper's configuration.

A run counts if its settings are the recipe's and its counts are those of the paper's model and data; the demo's small
models never do. A run is a line of BASE/results.jsonl or of a file in runs/results.
"""

import functools
from pathlib import Path
from typing import Any

import pandas as pd

from deit_gka.accounting import ModelCost, deit_cost
from deit_gka.model.registry import model_name
from deit_gka.training.config import TrainConfig as VisionTraining
from nanochat_gka.accounting import AccountingConfig, account
from nanochat_gka.core_metric.report import Score, score_of
from nanochat_gka.train import TrainConfig as LanguageTraining
from runs import frames
from runs.frames import RESULTS
from runs.paper.published import PAPER_NAMES, SIZE_NAMES
from trainkit_gka.results import is_processor, read_results

DEPTH = 20
GPUS = 7  # of the paper's training in table 4
RECIPES = {  # rows of the language tables: flags of their trainings
    "nanochat_base": {"attention": "softmax", "target_param_data_ratio": 10.5},
    "GKA": {"attention": "gka", "target_param_data_ratio": 8.25},
}
KIND_OF = {label: kind for kind, label in PAPER_NAMES.items()}
IMAGENET_VALIDATION = 50_000  # images of ImageNet-1k
FREE = {"seed", "amp", "max_seq_len"}  # settings that may differ (the length shows in the FLOPs)


Run = dict[str, Any]  # a trainer's line of a result file


def finished_runs(base: Path, results: Path = RESULTS) -> list[Run]:
    """The finished runs of BASE/results.jsonl and of the result files, in this order."""
    paths = (base / "results.jsonl", *sorted(results.glob("*.jsonl")))
    lines = [line for path in paths for line in read_results(path, "parameters")]
    return [line for line in lines if line.get("kind") in ("train_deit", "pretrain")]


def has_settings(run: Run, identity: dict[str, Any], defaults: dict[str, Any]) -> bool:
    """Whether the run has every setting of `identity` that is not free. defaults: of flags younger than the run."""
    settings = {**defaults, **run["config"]}
    return all(key in settings and settings[key] == value for key, value in identity.items() if key not in FREE)


def timm_name(label: str) -> str:
    """timm's name of a row of the vision tables, such as GKA-Ti."""
    paper_name, size = label.split("-")
    return model_name(SIZE_NAMES[size.lower()], KIND_OF[paper_name])


def cost(label: str) -> ModelCost:
    """Parameters and FLOPs of a row of the vision tables."""
    paper_name, size = label.split("-")
    return deit_cost(SIZE_NAMES[size.lower()], KIND_OF[paper_name])


def vision_run(label: str, runs: list[Run]) -> Run | None:
    """The first run of a row of the vision tables: its model and recipe, 300 epochs, ImageNet-1k, from scratch."""
    config = VisionTraining(model=timm_name(label), data="ImageNet-1k")
    identity, parameters = config.identity(), cost(label).parameters
    for run in runs:
        metrics = run["metrics"]
        judged = metrics.get("images", 0) + metrics.get("broken", 0)
        counts = metrics["parameters"] == parameters and judged == IMAGENET_VALIDATION and "ema_top1" in metrics
        warm_start = "--initial-weights" in run.get("command", "")
        if has_settings(run, identity, config.defaults()) and counts and not warm_start:
            return run
    return None


@functools.cache
def language_counts(model: str) -> dict[str, Any]:
    """Size and compute of a row of the language tables, from the cost model."""
    return account(AccountingConfig(depth=DEPTH, **RECIPES[model]))


def language_run(model: str, runs: list[Run]) -> Run | None:
    """The first run of a row of the language tables: depth 20, its attention, its token ratio, nanochat's settings."""
    config, counts = LanguageTraining(depth=DEPTH, **RECIPES[model]), language_counts(model)
    for run in runs:
        same = [run["metrics"].get(key) == counts[key] for key in ("parameters", "flops_per_token", "train_tokens")]
        if has_settings(run, config.identity(), config.defaults()) and all(same):
            return run
    return None


def core_scores(run: Run | None, steps: int | None, *folders: Path) -> dict[str, Score]:
    """Task -> the score of a run after so many steps, on the largest number of examples. folders: hold core/*.jsonl."""
    scores: dict[str, Score] = {}
    for path in (path for folder in folders for path in sorted((folder / "core").glob("*.jsonl"))):
        for line in read_results(path, "accuracy", "baseline", "examples"):
            config = line["config"]
            if run and (config.get("model"), config.get("step")) == (run["config"].get("model_tag"), steps):
                score = score_of(config["task"], line["metrics"])
                if score.label not in scores or score.examples >= scores[score.label].examples:
                    scores[score.label] = score
    return scores


def gpu_benchmark(results: Path = RESULTS) -> pd.DataFrame:
    """The benchmark of whole vision models on one GPU, the paper's RTX 5090 before others; empty without a GPU's."""
    lines = frames.bench("deit", results)
    lines = lines[~lines.hardware.map(is_processor).astype(bool)]
    machines = sorted(lines.machine.unique(), key=lambda name: ("5090" not in name, name))
    return lines[lines.machine == machines[0]] if machines else lines


def fastest(benchmark: pd.DataFrame, label: str, phase: str, role: str, batch: str = "") -> dict[str, Any]:
    """Batch and metrics of a model with the most images per second, at one batch or any; empty if none was right."""
    case = f"deit-{label.split('-')[1].lower()}-b"
    lines = benchmark[(benchmark.phase == phase) & (benchmark.role == role) & (benchmark.status == "ok")]
    lines = lines[lines.case == case + batch if batch else lines.case.str.startswith(case)]
    if lines.empty:
        return {}
    line = lines.loc[lines.items_per_second.idxmax()]
    return {**line.record["metrics"], "batch": int(line.case.removeprefix(case))}
