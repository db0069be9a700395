"""Evaluate a trained model: bits per byte on both splits, and samples of text.

python -m nanochat_gka.evaluate --run out/runs/d20-gka
python -m nanochat_gka.evaluate --run out/runs/d20-gka --eval sample --prompt "The for statement" --temperature 0.8
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from nanochat_gka.data import SPLITS
from nanochat_gka.data.loader import EvalRows, PackedData, rows_of_run
from nanochat_gka.generation.engine import Engine
from nanochat_gka.generation.sampling import SAMPLE_PROMPTS, Sampling
from nanochat_gka.model.checkpoints import Loaded, load
from nanochat_gka.training.bits_per_byte import of_both_splits, utf8_note
from nanochat_gka.training.memory import RowsAtOnce, rows_at_once
from trainkit_gka.checkpoint import run_folder
from trainkit_gka.cli import Bounds, Count, CountOrAll, UserError, run
from trainkit_gka.distributed import Runtime, running
from trainkit_gka.progress import console
from trainkit_gka.results import append_result


@dataclass
class EvaluateConfig(Sampling):
    """Measure bits per byte of a trained model, and write samples of its text."""

    run: Path = Path("out/runs/d20-gka")
    """Run folder, one checkpoint folder in it, or an exported model."""
    step: int = -1
    """Checkpoint to take; -1 = the newest."""
    eval: list[Literal["bpb", "sample"]] = field(default_factory=lambda: ["bpb", "sample"])
    """What to do: measure bits per byte, write samples."""
    data: Path | None = None
    """Packed rows, for bpb; None = those the run was trained on."""
    split_tokens: CountOrAll = 20_971_520
    """Tokens of each split; -1 = all."""
    eval_rows: EvalRows = "upstream"
    """Which rows of a split: upstream = the first that nanochat's loader would give (the paper's way), spaced = evenly
    spaced over the split, as always where packing split documents."""
    device_batch_size: RowsAtOnce = "auto"
    """Rows that a process computes at once; auto = what fits the memory."""
    prompt: list[str] = field(default_factory=lambda: list(SAMPLE_PROMPTS))
    """Texts to continue. By default nanochat's prompts, continued as nanochat does: by 16 tokens, greedily."""
    max_tokens: Count = 16
    """Length of a continuation, in tokens."""
    temperature: Annotated[float, Bounds(0)] = 0.0
    """Temperature of sampling; 0 = greedy."""
    unconditioned: Annotated[int, Bounds(0)] = 8
    """Texts of 128 tokens to write from nothing at temperature 1, as nanochat does."""
    device_type: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to compute on; auto takes CUDA if there is one."""
    results: Path = Path("out/results.jsonl")
    """File to append the numbers to."""


def measure_splits(config: EvaluateConfig, runtime: Runtime, loaded: Loaded) -> dict:
    """Bits per byte of both splits, the gap of nanochat's, and the name of their rows."""

    def open_data() -> PackedData:
        folder = config.data or rows_of_run(loaded.data, run_folder(config.run))
        return PackedData(folder, verify=runtime.is_first_here)

    data = runtime.agree(open_data)
    if data.tokenizer.sha256 != loaded.tokenizer.sha256:
        raise UserError(f"{data.folder} was packed with another tokenizer than {config.run} was trained with")
    size = config.device_batch_size
    if size == "auto":
        size = rows_at_once(loaded.model, runtime.device, training=False)
    label = data.name_rows(config.split_tokens, config.eval_rows)
    bpb = of_both_splits(loaded.model, data, config.split_tokens, config.eval_rows, runtime, size)
    for split in SPLITS:
        name = f"{split}_bpb"
        runtime.print(f"{split} bpb: {bpb[name]:.6f}{utf8_note(bpb, name)}, {label} rows")
    return {"eval_rows": label, **bpb, "gap": bpb["val_bpb"] - bpb["train_bpb"]}


def write_samples(config: EvaluateConfig, engine: Engine) -> dict:
    """Print and return continuations of the prompts, and texts written from nothing."""
    samples = dict(zip(config.prompt, engine.complete(config.prompt, config)))
    metrics: dict = {"samples": samples}
    texts = [(prompt, text) for prompt, continuations in samples.items() for text in continuations]
    if config.unconditioned:
        sampling = Sampling(config.unconditioned, max_tokens=128, temperature=1.0, top_k=0, seed=config.seed)
        [metrics["unconditioned"]] = engine.complete([""], sampling)
        texts += [("", text) for text in metrics["unconditioned"]]
    for prompt, text in texts:
        console.rule(repr(prompt), align="left")
        console.print(prompt + text, highlight=False, markup=False)
    return metrics


def main(config: EvaluateConfig) -> None:
    if not config.eval or not config.prompt:
        raise UserError("--eval and --prompt need at least one word each")
    with running(config.device_type, config.seed) as runtime:
        loaded = load(config.run, config.step, runtime.device)
        runtime.print(f"{loaded.name}: {loaded.model.config.form}, step {loaded.step}")
        metrics: dict = {"step": loaded.step}
        if "bpb" in config.eval:
            metrics |= measure_splits(config, runtime, loaded)
        if runtime.is_main:
            metrics |= write_samples(config, Engine(loaded.model, loaded.tokenizer)) if "sample" in config.eval else {}
            settings = {"run": run_folder(config.run).name, "split_tokens": config.split_tokens}
            append_result(config.results, "evaluate", settings, metrics, runtime.device, runtime.world_size)


if __name__ == "__main__":
    run(main, EvaluateConfig)
