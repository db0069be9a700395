"""Time the CORE scorer against the naive one, and check that they answer alike.

    python -m runs.bench.core --runs out/demo/runs/d4-{softmax,gka-paper,gka-offsets}-400 --bundle out/core/eval_bundle

Naive is one prompt at a time, or, nanochat's way, one example at a time with its prompts in one batch; logits of every
position. Ours is timed with what the prompts have in common computed once, and without. Reading, prompts and tokens are
inside all times. Appends to RESULTS/bench_core_<hardware>.jsonl.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nanochat_gka.core_metric.bundle import Task, read_tasks
from nanochat_gka.core_metric.questions import question, shuffled
from nanochat_gka.core_metric.scoring import answer, batches, judge
from nanochat_gka.model.checkpoints import Loaded, load
from runs.bench.core_naive import naive_task
from runs.bench.results import result_file
from runs.frames import RESULTS
from trainkit_gka.cli import Count, CountOrAll, UserError, run
from trainkit_gka.distributed import setup
from trainkit_gka.progress import console, progress_bar
from trainkit_gka.results import append_result, describe_hardware


@dataclass
class CoreBenchConfig:
    """Measure the examples per second of the CORE scorer and of the naive one, on the paper's six tasks."""

    runs: list[Path] = field(
        default_factory=lambda: [Path(f"out/demo/runs/d4-{name}-400") for name in ("softmax", "gka-paper")]
    )
    """Run folders or exported models."""
    bundle: Path = Path("out/core/eval_bundle")
    """Folder of the bundle."""
    tasks: list[str] = field(default_factory=lambda: ["paper"])
    """Labels or sets of tasks, as for eval_core."""
    max_per_task: CountOrAll = -1
    """Examples of each task; -1 = all."""
    rounds: Count = 3
    """Turns of the scorers; the median counts."""
    batch_tokens: int = 0
    """Tokens of a batch, as for eval_core; 0 = the device's own number."""
    device_type: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to run; auto takes CUDA if there is a GPU."""
    results: Path = RESULTS
    """Folder of the JSON lines."""


def score(loaded: Loaded, task: Task, config: CoreBenchConfig, prefix_reuse: bool) -> list[int]:
    """Our answers, in the order of the examples."""
    model, examples = loaded.model, shuffled(task.examples(), config.max_per_task)
    asked = [question(task, examples, index, loaded.tokenizer, model.rotary.length) for index in range(len(examples))]
    answers = [0] * len(asked)
    for batch in batches(asked, config.batch_tokens or (65536 if model.device.type == "cuda" else 4096)):
        for place, verdicts in zip(batch, judge(model, [asked[i] for i in batch], prefix_reuse)):
            answers[place] = answer(asked[place], verdicts)
    return answers


def compare(loaded: Loaded, task: Task, config: CoreBenchConfig, synchronize: Callable[[], None]) -> dict:
    """Seconds of every scorer, median over the rounds. Raises UserError if they do not answer alike."""

    def naive(together: bool) -> list[int]:
        return naive_task(
            loaded.model, loaded.tokenizer, config.bundle, task.label, config.max_per_task, together=together
        ).predictions

    scorers = {
        "by prompt": lambda: naive(together=False),
        "by example": lambda: naive(together=True),
        "batched": lambda: score(loaded, task, config, prefix_reuse=False),
        "batched, beginnings shared": lambda: score(loaded, task, config, prefix_reuse=True),
    }
    answers, seconds = {}, {name: [] for name in scorers}
    for _ in range(config.rounds):
        for name, scorer in scorers.items():
            synchronize()
            started = time.perf_counter()
            answers[name] = scorer()
            synchronize()
            seconds[name].append(time.perf_counter() - started)
    expected = answers["by example"]
    for name, given in answers.items():
        if given != expected:
            differ = [place for place, (ours, naives) in enumerate(zip(given, expected)) if ours != naives]
            counted = f"{len(differ)} examples otherwise than by example, the first is {differ[0]}"
            raise UserError(f"{loaded.name}, {task.label}: {name} answers {counted}")
    return {
        "examples": len(expected),
        "seconds": {name: sorted(times)[len(times) // 2] for name, times in seconds.items()},
    }


def main(config: CoreBenchConfig) -> None:
    runtime = setup(config.device_type)
    path = result_file(config.results, "core", describe_hardware(runtime.device))
    tasks = read_tasks(config.bundle, config.tasks)
    models = [load(folder, device=runtime.device) for folder in config.runs]
    for loaded in models:
        shape, totals = loaded.model.config, {}
        settings = {"model": loaded.name, "attention": shape.attention, "depth": shape.n_layer, "width": shape.n_embd}
        settings["vocab_size"] = shape.vocab_size
        with progress_bar() as bar:
            shown = bar.add_task(loaded.name, total=len(tasks), status="")
            for task in tasks:
                bar.update(shown, status=task.label)
                metrics = compare(loaded, task, config, runtime.synchronize)
                asked = {**settings, "task": task.label, "max_per_task": config.max_per_task}
                append_result(path, "bench_core", asked, metrics, runtime.device)
                for name, value in metrics["seconds"].items():
                    totals[name] = totals.get(name, 0.0) + value
                rates = {name: metrics["examples"] / value for name, value in metrics["seconds"].items()}
                speeds = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
                console.print(f"{loaded.name} {task.label}: examples/s: {speeds}", highlight=False)
                bar.advance(shown)
        ratios = ", ".join(f"{name} {value:.1f} s" for name, value in totals.items())
        console.print(f"{loaded.name}, all {len(tasks)} tasks: {ratios}", highlight=False)


if __name__ == "__main__":
    run(main, CoreBenchConfig)
