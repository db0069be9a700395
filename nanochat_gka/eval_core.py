"""Score a trained model on DCLM's CORE: 22 tasks of world knowledge, reasoning, reading and language.

    python -m nanochat_gka.eval_core --run out/runs/d20-gka
    python -m nanochat_gka.eval_core --run out/runs/d20-gka --tasks paper --max-per-task 500
    python -m nanochat_gka.eval_core --hf-path openai-community/gpt2
    torchrun --standalone --nproc-per-node 7 -m -- nanochat_gka.eval_core --run out/runs/d20-gka

A finished task is on disk at once; the same command continues with the next one, and a command for some tasks forgets no other.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from nanochat_gka.core_metric.bundle import Task, read_tasks
from nanochat_gka.core_metric.fetch import BundleFlags
from nanochat_gka.core_metric.huggingface import load_hugging_face
from nanochat_gka.core_metric.questions import shuffled
from nanochat_gka.core_metric.report import Score, aggregate, error_of_mean, show, write_csv
from nanochat_gka.core_metric.task_scorer import BATCH_TOKENS, EvaluatedModel, TaskScorer, check_enough, identity
from nanochat_gka.model.checkpoints import load
from trainkit.cli import Bounds, CountOrAll, UserError, run
from trainkit.distributed import Runtime, running
from trainkit.progress import console, progress_bar
from trainkit.results import append_result, check_appendable, read_results


@dataclass(frozen=True)
class CoreConfig(BundleFlags):
    """Score a trained model on CORE; writes OUT/<model>_step<step>.csv and .jsonl (OUT/<model>.* for --hf-path) and prints the table beside published figures.

    The CSV has every task scored so far; with --max-per-task or --max-seq-len it is one of its own, with _max<n> or _len<n> in its name.
    """

    run: Path = Path("out/runs/d20-gka")
    """run folder, one checkpoint folder in it, or an exported model"""
    step: int = -1
    """checkpoint to take; -1 = the newest"""
    hf_path: str = ""
    """in place of --run: folder, or name on the hub, of any causal language model of Hugging Face's transformers, with its own tokenizer"""
    tasks: list[str] = field(default_factory=lambda: ["all"])
    """labels, or the sets: all (of the bundle), core (the 22 of CORE), paper (the six that the paper compares)"""
    max_per_task: CountOrAll = -1
    """examples of each task; -1 = all. It also changes which examples serve as shots, as in nanochat"""
    out: Path = Path("out/core")
    """folder for results"""
    max_seq_len: Annotated[int, Bounds(2, other=(-1, "no limit"))] = -1
    """keep the last so many tokens of longer prompts; -1 = all that the model's positions allow (ours: 10 x its context), as in nanochat"""
    batch_tokens: Annotated[int, Bounds(0)] = 0
    """tokens of all prompts of a forward pass; 0 = 65536 on CUDA, 4096 on a CPU. It changes the speed, not the result"""
    prefix_reuse: bool = True
    """compute what the choices of a question have in common once"""
    device_type: Literal["auto", "cuda", "cpu"] = "auto"
    """auto takes CUDA if there is one"""

    def check(self) -> None:
        """Raises UserError for values that make no sense."""
        if self.hf_path and self.step != -1:
            raise UserError("--step is of a run of ours; --hf-path has no steps")
        if not self.tasks:
            raise UserError("--tasks needs at least one label or set")


class Evaluation:
    """One model on the tasks of one bundle. `file` has a line for every task that was scored, and what it was scored on."""

    def __init__(self, config: CoreConfig, runtime: Runtime, subject: EvaluatedModel):
        self.config, self.runtime, self.subject, limit = config, runtime, subject, subject.limit
        self.max_seq_len = min(limit, config.max_seq_len) if config.max_seq_len > 0 else limit
        batch_tokens = config.batch_tokens or BATCH_TOKENS[runtime.device.type] // (
            4 if config.hf_path else 1
        )  # logits of all tokens
        self.examinee = TaskScorer(
            subject.model, subject.tokenizer, runtime, self.max_seq_len, batch_tokens, config.prefix_reuse
        )
        limits = {"max": config.max_per_task, "len": self.max_seq_len if self.max_seq_len < limit else -1}
        self.file = config.out / f"{label(subject)}.jsonl"
        self.csv = self.file.with_name(
            self.file.stem + "".join(f"_{name}{value}" for name, value in limits.items() if value > 0) + ".csv"
        )

    def identity(self, task: Task) -> dict[str, Any]:
        """What decides a score: the weights, the data, how it is asked. A line of the file that agrees need not be made again."""
        return {**self.model(), **identity(task), **self.limits()}

    def model(self) -> dict[str, Any]:
        return {"model": self.subject.name, "step": self.subject.step, "weights": self.subject.sha256}

    def limits(self) -> dict[str, int]:
        return {"max_per_task": self.config.max_per_task, "max_seq_len": self.max_seq_len}

    def score(self, task: Task) -> Score:
        """The task's score, from the file if it is there. Raises UserError naming file and line for data that cannot be used."""
        examples = task.examples()
        if (known := self.known(task)) is not None:
            return known
        with progress_bar() as bar:
            metrics = self.examinee.measure(task, shuffled(examples, self.config.max_per_task), bar)
        if self.runtime.is_main:
            append_result(self.file, "core", self.identity(task), metrics, self.runtime.device, self.runtime.world_size)
        return _score(task, metrics)

    def known(self, task: Task) -> Score | None:
        """The task's score if the file has it. Raises OSError if the task's data cannot be read."""
        identity = self.identity(task)
        found = [line for line in read_results(self.file, "accuracy", "examples") if line["config"] == identity]
        return _score(task, found[-1]["metrics"]) if found else None

    def all_known(self, tasks: list[Task]) -> list[Score]:
        """The scores of those tasks that the file has; one whose data or baseline are gone is not among them."""
        scores = []
        for task in tasks:
            with suppress(OSError):
                scores.append(self.known(task))
        return [score for score in scores if score is not None and score.baseline is not None]

    def record_mean(self, scores: list[Score]) -> tuple[str, float]:
        """Name and value of the mean, which also go to the file, once."""
        name, value = aggregate(scores)
        config = {**self.model(), **self.limits(), "tasks": [score.label for score in scores]}
        metrics = {
            "name": name,
            "centered": value,
            "standard_error": error_of_mean([score.standard_error for score in scores]),
        }
        if not any((line["config"], line["metrics"]) == (config, metrics) for line in read_results(self.file)):
            append_result(self.file, "core_mean", config, metrics, self.runtime.device, self.runtime.world_size)
        return name, value


def label(subject: EvaluatedModel) -> str:
    """What its files begin with."""
    return subject.name if subject.step is None else f"{subject.name}_step{subject.step:06d}"


def open_subject(config: CoreConfig, device: torch.device) -> EvaluatedModel:
    """The model to ask: of a run of ours, or Hugging Face's. Raises UserError if there is none."""
    if config.hf_path:
        return load_hugging_face(config.hf_path, device)
    loaded = load(config.run, config.step, device)
    shape = loaded.model.config
    about = f"{loaded.name}: {shape.attention}, depth {shape.n_layer}, step {loaded.step}"
    return EvaluatedModel(
        loaded.model, loaded.tokenizer, loaded.name, loaded.step, loaded.sha256, loaded.model.rotary.length, about
    )


def _score(task: Task, metrics: dict[str, Any]) -> Score:
    return Score(task.label, metrics["accuracy"], task.baseline, task.shots, metrics["examples"])


def evaluate(config: CoreConfig, runtime: Runtime) -> tuple[list[Score], list[str]]:
    """Score every task that can be; returns the scores and what was wrong with the others. Raises UserError if nothing can be scored."""
    subject = runtime.agree(lambda: open_subject(config, runtime.device))
    bundle = config.open_on_all(config.out, runtime)
    tasks = runtime.agree(lambda: read_tasks(bundle, config.tasks))
    check_enough(tasks, config.max_per_task, "--max-per-task")
    evaluation, scores, problems = Evaluation(config, runtime, subject), [], []
    runtime.agree(lambda: check_appendable(evaluation.file))
    runtime.print(f"{subject.about}; {len(tasks)} tasks of {bundle}")
    for number, task in enumerate(tasks, start=1):
        place = f"[{number}/{len(tasks)}] {task.label}"
        try:
            score = evaluation.score(task)
        except UserError as error:
            problems.append(str(error))
            runtime.print(f"{place}: cannot be scored")
            continue
        scores.append(score)
        runtime.print(
            f"{place}: accuracy {score.accuracy:.4f}, centred {score.centered:.4f} ({score.shots} shots, {score.examples:,} examples)"
        )
    if scores and runtime.is_main:
        write_csv(evaluation.csv, evaluation.all_known(read_tasks(bundle)))
        show(scores, label(subject))
        name, value = evaluation.record_mean(scores)
        console.print(f"{name}: {value:.4f}    {evaluation.csv}, {evaluation.file}", highlight=False, markup=False)
    return scores, problems


def main(config: CoreConfig) -> None:
    config.check()
    with running(config.device_type) as runtime:
        _, problems = evaluate(config, runtime)
        if problems:
            raise UserError("; ".join(problems))


if __name__ == "__main__":
    run(main, CoreConfig)
