"""What this project knows of the paper's cells: exact counts, and finished runs of the very configuration.

A run counts only if every setting is the recipe's and its counts are those of the paper's model and data; the demo's
small models never do. Looked for in the run folders and results.jsonl of BASE and in runs/results.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deit_gka.model.accounting import ModelCost, vit_cost
from deit_gka.model.registry import SIZES, model_name
from deit_gka.training.config import TrainConfig as VisionTraining
from nanochat_gka.accounting import AccountingConfig, account
from nanochat_gka.core_metric.report import Score, score_of
from nanochat_gka.train import TrainConfig as LanguageTraining
from runs.bench import results as bench_results
from runs.bench.results import Comparison
from runs.frames import RESULTS
from runs.paper import gpt_d20_gka, gpt_d20_softmax, published
from runs.paper.deit import PAPER_NAMES, SIZE_NAMES
from runs.table import Table
from trainkit_gka.loop import finish_record
from trainkit_gka.progress import LOG, read_events
from trainkit_gka.results import is_processor, read_results

KIND_OF = {label: kind for kind, label in PAPER_NAMES.items()}
ROLES_OF = {"softmax": ["baseline"], "gka": ["ours", "unfused"]}  # in the benchmark of table 4
DEPTH = 20
GPUS = 7  # of the paper's training in table 4
RECIPES = {"nanochat_base": gpt_d20_softmax.RECIPE, "GKA": gpt_d20_gka.RECIPE}  # rows of the language tables
IMAGENET_TRAINING, IMAGENET_VALIDATION = 1_281_167, 50_000  # images of ImageNet-1k
PIXELS = 224
FREE = {"seed", "amp", "max_seq_len"}  # settings that may differ (the length shows in the FLOPs)


@dataclass(frozen=True)
class FinishedRun:
    """A run that trained to its end. steps: None where the record does not say."""

    name: str
    config: dict[str, Any]
    metrics: dict[str, Any]
    steps: int | None = None
    warm_start: bool = False
    processes: int = 1


def finished_runs(base: Path, results: Path = RESULTS) -> list[FinishedRun]:
    """The finished runs of BASE/runs, BASE/results.jsonl and the result files, oldest sources last."""
    runs = []
    for folder in sorted(path for path in (base / "runs").glob("*") if path.is_dir()):
        starts, finish = read_events(folder / LOG, "start", "config"), finish_record(folder, ("parameters",))
        if starts and finish:
            begun = starts[-1]
            warm, processes = bool(begun.get("initial_weights")), begun.get("world_size", 1)
            runs.append(FinishedRun(folder.name, begun["config"], finish, finish["step"], warm, processes))
    for path in (base / "results.jsonl", *sorted(results.glob("*.jsonl"))):
        for line in read_results(path, "parameters"):
            if line.get("kind") in ("train_deit", "pretrain"):
                name, config, warm = line["config"].get("model_tag", ""), line["config"], "--initial-weights"
                warm_start, processes = warm in line.get("command", ""), line.get("processes", 1)
                runs.append(FinishedRun(name, config, line["metrics"], None, warm_start, processes))
    return runs


@dataclass(frozen=True)
class Sources:
    """Where ours come from."""

    base: Path = Path("out")
    results: Path = RESULTS

    def runs(self) -> list[FinishedRun]:
        return finished_runs(self.base, self.results)

    def other_runs(self, metric: str) -> list[FinishedRun]:
        """The runs of BASE alone with this metric that fill no cell of the paper's, each name once."""
        runs = [run for run in finished_runs(self.base, self.base / "nothing") if run.metrics.get(metric) is not None]
        papers = [vision_run(label, runs) for label in published.VISION] + [language_run(row, runs) for row in RECIPES]
        return list({run.name: run for run in reversed(runs) if run not in papers}.values())[::-1]

    def remark(self, table: Table) -> Table:
        """The table with a remark if rows of other runs are in it."""
        others = {run.name for metric in ("top1", "flops_per_token") for run in self.other_runs(metric)}
        if any(others & set(row[:2]) for row in table.rows):
            table.notes.append("Runs with other settings are named; the paper has no figures for them.")
        return table


def has_settings(run: FinishedRun, identity: dict[str, Any], younger: dict[str, Any]) -> bool:
    """Whether every setting of `identity` that is not free is the run's. younger: values of flags that it had not."""
    settings = {**younger, **run.config}
    return all(key in settings and settings[key] == value for key, value in identity.items() if key not in FREE)


def timm_name(label: str) -> str:
    """timm's name of a row of the vision tables, such as GKA-Ti."""
    paper_name, size = label.split("-")
    return model_name(SIZE_NAMES[size.lower()], KIND_OF[paper_name])


def cost(label: str) -> ModelCost:
    """Parameters and FLOPs of a row of the vision tables."""
    paper_name, size = label.split("-")
    shape = SIZES[SIZE_NAMES[size.lower()]]
    return vit_cost(KIND_OF[paper_name], shape["embed_dim"], shape["depth"], shape["num_heads"])


def vision_run(label: str, runs: list[FinishedRun]) -> FinishedRun | None:
    """The first run of a row of the vision tables: its model and recipe, 300 epochs, ImageNet-1k, from scratch."""
    config = VisionTraining(model=timm_name(label), data="ImageNet-1k")
    identity, parameters = config.identity(), cost(label).parameters
    for run in runs:
        metrics = run.metrics
        judged = metrics.get("images", 0) + metrics.get("broken", 0)
        counts = metrics["parameters"] == parameters and judged == IMAGENET_VALIDATION and "ema_top1" in metrics
        if run.steps is not None:  # whose training images can be counted too
            drawn = run.steps * config.batch_size / config.epochs
            counts = counts and abs(drawn - IMAGENET_TRAINING) < config.batch_size
        if has_settings(run, identity, config.defaults()) and counts and not run.warm_start:
            return run
    return None


def total_rate(label: str, per_gpu: int, runs: list[FinishedRun]) -> float | None:
    """Images per second of a training of a row of the runtime table over the paper's number of GPUs."""
    wanted = {"model": timm_name(label), "batch_size": per_gpu * GPUS, "input_size": PIXELS, "model_kwargs": []}
    for run in runs:
        on_gpus = run.processes == GPUS and run.metrics.get("memory_mib", 0) > 0
        if has_settings(run, wanted, {}) and on_gpus and run.metrics["parameters"] == cost(label).parameters:
            return run.metrics.get("images_per_second")
    return None


@functools.cache
def language_counts(model: str) -> dict[str, Any]:
    """Size and compute of a row of the language tables, from the cost model."""
    return account(AccountingConfig(depth=DEPTH, **_recipe(model)))


def _recipe(model: str) -> dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in RECIPES[model].items()}


def language_run(model: str, runs: list[FinishedRun]) -> FinishedRun | None:
    """The first run of a row of the language tables: depth 20, its attention, its token ratio, nanochat's settings."""
    config, counts = LanguageTraining(depth=DEPTH, **_recipe(model)), language_counts(model)
    for run in runs:
        keys = ("parameters", "flops_per_token", "train_tokens")
        if has_settings(run, config.identity(), config.defaults()) and all(
            run.metrics.get(key) == counts[key] for key in keys
        ):
            return run
    return None


def core_scores(run: FinishedRun | None, steps: int | None, base: Path, results: Path = RESULTS) -> dict[str, Score]:
    """Task -> the score of a run after so many steps, of the most examples it was asked."""
    scores: dict[str, Score] = {}
    if run is None:
        return scores
    for folder in (results / "core", base / "core"):
        for path in sorted(folder.glob("*.jsonl")):
            for line in read_results(path, "accuracy", "baseline", "examples"):
                config = line["config"]
                if (config.get("model"), config.get("step")) == (run.name, steps):
                    score = score_of(config["task"], line["metrics"])
                    if score.label not in scores or score.examples >= scores[score.label].examples:
                        scores[score.label] = score
    return scores


@dataclass(frozen=True)
class Runtime:
    """The benchmark of whole vision models on one GPU."""

    hardware: str
    compared: dict[tuple[str, str], Comparison]

    def line(self, label: str, batch: int, phase: str, role: str) -> dict[str, Any] | None:
        """The metrics of a row of the runtime table (`role`: one of ROLES_OF its kind); None if it was not timed."""
        size = label.split("-")[1]
        comparison = self.compared.get((f"deit-{size.lower()}-b{batch}", phase))
        fastest = comparison.fastest(role) if comparison else None
        return fastest["metrics"] if fastest else None

    def best_inference(self, label: str, role: str) -> tuple[int, dict[str, Any]] | None:
        """The batch of 32 to 512 with the most images per second, and its metrics."""
        timed = [(batch, self.line(label, batch, "inference", role)) for batch in (32, 64, 128, 256, 512)]
        return max(
            ((batch, line) for batch, line in timed if line),
            key=lambda pair: pair[1]["items_per_second"],
            default=None,
        )


def runtime(results: Path = RESULTS) -> Runtime | None:
    """The benchmark on a GPU, the paper's RTX 5090 before others; a processor's does not count."""
    names = [path.stem.removeprefix("bench_deit_") for path in results.glob("bench_deit_*.jsonl")]
    gpus = sorted((name for name in names if not is_processor(name)), key=lambda name: ("5090" not in name, name))
    for hardware in gpus:
        if compared := bench_results.load(results, "deit", hardware):
            return Runtime(next(iter(compared.values())).lines[0]["hardware"], compared)
    return None
