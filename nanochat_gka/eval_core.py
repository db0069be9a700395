"""Score a trained model on DCLM's CORE: 22 tasks of world knowledge, reasoning, reading and language.

    python -m nanochat_gka.eval_core --run out/runs/d20-gka
    python -m nanochat_gka.eval_core --run out/runs/d20-gka --tasks paper --max-per-task 500
    python -m nanochat_gka.eval_core --hf-path openai-community/gpt2
    python -m trainkit_gka.torchrun --standalone --nproc-per-node 7 -m -- nanochat_gka.eval_core --run out/runs/d20-gka

A task's score is on disk as soon as the task is finished: the same command continues with the next one, and a command
for some of the tasks keeps the scores of the others.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import torch

from nanochat_gka.core_metric.bundle import Task, read_tasks
from nanochat_gka.core_metric.fetch import BundleFlags
from nanochat_gka.core_metric.huggingface import load_hugging_face
from nanochat_gka.core_metric.questions import shuffled
from nanochat_gka.core_metric.report import Score, show, write_csv
from nanochat_gka.core_metric.score_file import EvaluatedModel, ScoreFile
from nanochat_gka.core_metric.task_scorer import BATCH_TOKENS, TaskScorer, check_enough
from nanochat_gka.model.checkpoints import load
from trainkit_gka.cli import Bounds, CountOrAll, UserError, run
from trainkit_gka.distributed import Runtime, running
from trainkit_gka.progress import console, progress_bar
from trainkit_gka.results import check_appendable

HUGGING_FACE_SHARE = 4  # of BATCH_TOKENS: their models compute the logits of all tokens


@dataclass(frozen=True)
class CoreConfig(BundleFlags):
    """Score a trained model on CORE and print the table beside published figures.

    Writes OUT/<model>_step<step>.csv and .jsonl (OUT/<model>.* for --hf-path). The CSV has every task scored so far;
    with --max-per-task or --max-seq-len it is one of its own, with _max<n> or _len<n> in its name.
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
    max_seq_len: Annotated[int, Bounds(2, other=(-1, "no limit"))] = -1
    """Keep the last so many tokens of longer prompts; -1 = all that the model's positions allow (ours: 10 x its
    context), as in nanochat."""
    batch_tokens: Annotated[int, Bounds(0)] = 0
    """Tokens of all prompts of a forward pass; 0 = 65536 on CUDA, 4096 on a CPU. It changes the speed alone."""
    prefix_reuse: bool = True
    """Compute once what the choices of a question have in common."""
    device_type: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to compute on; auto takes CUDA if there is one."""

    def check(self) -> None:
        """Raises UserError for values that make no sense together."""
        if self.hf_path and self.step != -1:
            raise UserError("--step is for a run of ours; a model of --hf-path has no steps")
        if not self.tasks:
            raise UserError("--tasks needs at least one label or set")


def open_model(config: CoreConfig, device: torch.device) -> EvaluatedModel:
    """The model to score: of a run of ours, or Hugging Face's. Raises UserError if there is none."""
    if config.hf_path:
        return load_hugging_face(config.hf_path, device)
    loaded = load(config.run, config.step, device)
    model, shape = loaded.model, loaded.model.config
    about = f"{loaded.name}: {shape.attention}, depth {shape.n_layer}, step {loaded.step}"
    return EvaluatedModel(model, loaded.tokenizer, loaded.name, loaded.step, loaded.sha256, model.rotary.length, about)


def open_file(config: CoreConfig, runtime: Runtime, evaluated: EvaluatedModel) -> ScoreFile:
    """The file of the model's scores, for tasks that are asked as `config` says."""
    limit = evaluated.limit
    max_seq_len = min(limit, config.max_seq_len) if config.max_seq_len > 0 else limit
    return ScoreFile(config.out, evaluated, runtime, config.max_per_task, max_seq_len)


def make_scorer(config: CoreConfig, runtime: Runtime, evaluated: EvaluatedModel, max_seq_len: int) -> TaskScorer:
    """The model, ready to be asked."""
    default = BATCH_TOKENS[runtime.device.type] // (HUGGING_FACE_SHARE if config.hf_path else 1)
    batch_tokens, model, tokenizer = config.batch_tokens or default, evaluated.model, evaluated.tokenizer
    return TaskScorer(model, tokenizer, runtime, max_seq_len, batch_tokens, config.prefix_reuse)


def score(task: Task, scorer: TaskScorer, file: ScoreFile) -> Score:
    """The task's score, from the file if it is there. Raises UserError for data that cannot be used."""
    examples = task.examples()
    if (known := file.score(task)) is not None:
        return known
    with progress_bar() as bar:
        return file.add(task, scorer.measure(task, shuffled(examples, file.max_per_task), bar))


def evaluate(config: CoreConfig, runtime: Runtime) -> list[str]:
    """Score every task that can be scored, and show the table. Returns what was wrong with the other tasks."""
    evaluated = runtime.agree(lambda: open_model(config, runtime.device))
    bundle = config.open_on_all(config.out, runtime)
    tasks = runtime.agree(lambda: read_tasks(bundle, config.tasks))
    check_enough(tasks, config.max_per_task, "--max-per-task")
    file = open_file(config, runtime, evaluated)
    runtime.agree(lambda: check_appendable(file.path))
    scorer = make_scorer(config, runtime, evaluated, file.max_seq_len)
    scores, problems = [], []
    runtime.print(f"{evaluated.about}; {len(tasks)} tasks of {bundle}")
    for number, task in enumerate(tasks, start=1):
        place = f"[{number}/{len(tasks)}] {task.label}"
        try:
            result = score(task, scorer, file)
        except UserError as error:
            problems.append(str(error))
            runtime.print(f"{place}: cannot be scored")
            continue
        scores.append(result)
        size = f"{result.shots} shots, {result.examples:,} examples"
        runtime.print(f"{place}: accuracy {result.accuracy:.4f}, centred {result.centered:.4f} ({size})")
    if scores and runtime.is_main:
        write_csv(file.csv, file.scores(read_tasks(bundle)))
        show(scores, evaluated.label)
        name, value = file.add_mean(scores)
        console.print(f"{name}: {value:.4f}    {file.csv}, {file.path}", highlight=False, markup=False)
    return problems


def main(config: CoreConfig) -> None:
    config.check()
    with running(config.device_type) as runtime:
        if problems := evaluate(config, runtime):
            raise UserError("; ".join(problems))


if __name__ == "__main__":
    run(main, CoreConfig)
