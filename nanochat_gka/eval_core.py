"""Score a trained model on DCLM's CORE: 22 tasks of world knowledge, reasoning, reading and language.

    python -m nanochat_gka.eval_core --run out/runs/d20-gka
    python -m nanochat_gka.eval_core --run out/runs/d20-gka --tasks paper --max-per-task 500
    python -m nanochat_gka.eval_core --hf-path openai-community/gpt2
    python -m trainkit_gka.torchrun --standalone --nproc-per-node 7 -m -- nanochat_gka.eval_core --run out/runs/d20-gka

A task's score is on disk as soon as the task is finished: the same command continues with the next one, and a command
for some of the tasks keeps the scores of the others.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from nanochat_gka.core_metric.bundle import Task, read_tasks
from nanochat_gka.core_metric.fetch import BundleFlags
from nanochat_gka.core_metric.huggingface import load_hugging_face
from nanochat_gka.core_metric.report import Score, aggregate, score_of, show
from nanochat_gka.core_metric.scoring import BATCH_TOKENS, TaskScorer
from nanochat_gka.model.checkpoints import load
from trainkit_gka.cli import Bounds, CountOrAll, UserError, run
from trainkit_gka.distributed import Runtime, running
from trainkit_gka.files import check_writable
from trainkit_gka.progress import console, progress_bar
from trainkit_gka.results import append_result, read_results

HUGGING_FACE_SHARE = 4  # of BATCH_TOKENS: their models compute the logits of all tokens


@dataclass(frozen=True)
class CoreConfig(BundleFlags):
    """Score a trained model on CORE and print the table beside published figures.

    Writes OUT/<model>_step<step>.jsonl (OUT/<model>.jsonl for --hf-path), a line for every task and for the mean.
    """

    run: Path = Path("out/runs/d20-gka")
    """Run folder, one checkpoint folder in it, or an exported model."""
    step: int = -1
    """Checkpoint to take; -1 = the newest."""
    hf_path: str = ""
    """In place of --run: folder, or name on the hub, of any causal language model of Hugging Face's transformers; it is
    scored with its own tokenizer."""
    tasks: list[str] = field(default_factory=lambda: ["all"])
    """Labels, or the sets: all (of the bundle), core (the 22 of CORE), paper (the six that the paper compares)."""
    max_per_task: CountOrAll = -1
    """Examples of each task; -1 = all. It also changes which examples serve as shots, as in nanochat."""
    out: Path = Path("out/core")
    """Folder for results."""
    batch_tokens: Annotated[int, Bounds(0)] = 0
    """Tokens of all prompts of a forward pass; 0 = 65536 on CUDA, 4096 on a CPU. It changes the speed alone."""
    device_type: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to compute on; auto takes CUDA if there is one."""


@dataclass(frozen=True)
class ScoreFile:
    """The JSON-lines file of a model's scores. config: the weights, and the limits that tasks are asked with."""

    path: Path
    config: dict[str, Any]
    runtime: Runtime

    def scores(self, tasks: list[Task]) -> dict[str, Score]:
        """By label, the scores of these very questions. A task whose data or baseline are missing is left out."""
        lines = read_results(self.path, "accuracy", "examples")
        scores = {}
        for task in tasks:
            with suppress(UserError):
                config = self.config | task.identity()
                for line in lines:
                    if line["config"] == config and task.baseline is not None:
                        scores[task.label] = score_of(task.label, line["metrics"] | {"baseline": task.baseline})
        return scores

    def add(self, kind: str, task: dict[str, Any], metrics: dict[str, Any]) -> None:
        """Append a line, unless the same is there."""
        config, lines = self.config | task, read_results(self.path)
        if self.runtime.is_main and (config, metrics) not in [(line["config"], line["metrics"]) for line in lines]:
            append_result(self.path, kind, config, metrics, self.runtime.device, self.runtime.world_size)


def evaluate(config: CoreConfig, runtime: Runtime) -> list[str]:
    """Score every task that can be scored, and show the table. Returns what was wrong with the other tasks."""
    run, hf_path, device = config.run, config.hf_path, runtime.device
    loaded = runtime.agree(lambda: load_hugging_face(hf_path, device) if hf_path else load(run, config.step, device))
    bundle = config.open_on_all(config.out, runtime)
    tasks = runtime.agree(lambda: read_tasks(bundle, config.tasks))
    max_seq_len = loaded.model.rotary.length  # ours: 10 times the training length, as in nanochat
    model = {"model": loaded.name, "step": loaded.step, "weights": loaded.sha256}
    limits = {"max_per_task": config.max_per_task, "max_seq_len": max_seq_len}
    label = loaded.name if loaded.step is None else f"{loaded.name}_step{loaded.step:06d}"
    file = ScoreFile(config.out / f"{label}.jsonl", model | limits, runtime)
    runtime.agree(lambda: check_writable(file.path))
    batch_tokens = config.batch_tokens or BATCH_TOKENS[device.type] // (HUGGING_FACE_SHARE if hf_path else 1)
    scorer = TaskScorer(loaded.model, loaded.tokenizer, runtime, max_seq_len, batch_tokens)
    known, problems = file.scores(tasks), []
    runtime.print(f"{label}: {len(tasks)} tasks of {bundle}")
    for number, task in enumerate(tasks, start=1):
        place = f"[{number}/{len(tasks)}] {task.label}"
        try:
            if task.label not in known:
                with progress_bar() as bar:
                    metrics = scorer.measure(task, task.examples(config.max_per_task), bar)
                file.add("core", task.identity(), metrics)
                known[task.label] = score_of(task.label, metrics)
        except UserError as error:
            problems.append(str(error))
            runtime.print(f"{place}: cannot be scored")
            continue
        score = known[task.label]
        size = f"{task.shots} shots, {score.examples:,} examples"
        runtime.print(f"{place}: accuracy {score.accuracy:.4f}, centred {score.centered:.4f} ({size})")
    scores = [known[task.label] for task in tasks if task.label in known]
    if scores and runtime.is_main:
        show(scores, label)
        name, value, error = aggregate(scores)
        mean = {"name": name, "centered": value, "standard_error": error}
        file.add("core_mean", {"tasks": [score.label for score in scores]}, mean)
        console.print(f"{name}: {value:.4f}    {file.path}", highlight=False, markup=False)
    return problems


def main(config: CoreConfig) -> None:
    if config.hf_path and config.step != -1:
        raise UserError("--step is for a run of ours; a model of --hf-path has no steps")
    if not config.tasks:
        raise UserError("--tasks needs at least one label or set")
    with running(config.device_type) as runtime:
        if problems := evaluate(config, runtime):
            raise UserError("; ".join(problems))


if __name__ == "__main__":
    run(main, CoreConfig)
