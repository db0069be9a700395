"""The flags of `train`: one field each, nanochat's names and defaults where it has them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from nanochat_gka.core_metric.fetch import BundleFlags
from nanochat_gka.data.loader import EvalRows
from nanochat_gka.model.config import BEFORE_ROTATED, GKA_VALUES, ModelFlags, has_gka
from nanochat_gka.training.memory import RowsAtOnce
from nanochat_gka.training.optim import OptimConfig
from trainkit.cli import Bounds, Count, CountOrAll, CountOrAutomatic, CountOrOff, Seed
from trainkit.training import RunConfig

PositiveOrOff = Annotated[float, Bounds(0, open_least=True, other=(-1, "off"))]


@dataclass
class TrainConfig(OptimConfig, ModelFlags, BundleFlags, RunConfig):
    """Pretrain a GPT with softmax, VLT or Gaussian kernel attention. The same command continues a run that was stopped."""

    OPERATIONAL: ClassVar = {"data", "out", "device_type", "device_batch_size", "compile", "eval_every", "eval_tokens", "eval_rows", "sample_every",
                             "save_every", "keep", "log_every", "wandb", "results", "verify_data", "stop_after", "model_tag", "core_metric_every",
                             "core_metric_max_per_task", "bundle", "bundle_url"}  # fmt: skip

    # Where
    data: Path = Path("out/packed")
    """folder of packed rows (make tokenize)"""
    out: Path = Path("out/runs")
    """folder for runs; this one goes to OUT/TAG"""
    model_tag: str = ""
    """name of the run; empty = d<depth>-<attention>, and what is not the paper's of offsets and values: d20-gka-PS-raw"""
    device_type: Literal["auto", "cuda", "cpu"] = "auto"
    """auto takes CUDA if there is one"""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile; auto = on CUDA"""
    verify_data: bool = True
    """check the data's checksums before training"""

    max_seq_len: Annotated[int, Bounds(1, other=(-1, "the data's"))] = -1
    """context length T; -1 = the data's"""

    # Horizon: the first of these that is set decides
    num_iterations: CountOrOff = -1
    """number of steps"""
    target_flops: PositiveOrOff = -1.0
    """total training FLOPs"""
    target_param_data_ratio: PositiveOrOff = 10.5
    """training tokens per scaling parameter (matrices and head)"""

    # Optimisation
    device_batch_size: RowsAtOnce = "auto"
    """rows that a process computes at once; auto = what fits the memory. It changes the speed, not the result"""
    total_batch_size: CountOrAutomatic = -1
    """tokens per step over all processes; -1 = automatic"""
    warmup_ratio: Annotated[float, Bounds(0, 1)] = 0.0
    """part of the steps spent warming up"""
    warmdown_ratio: Annotated[float, Bounds(0, 1)] = 0.5
    """part of the steps spent warming down"""
    final_lr_frac: Annotated[float, Bounds(0, 1, open_most=True)] = 0.0
    """learning rate at the end, as a fraction"""
    seed: Seed = 42
    """of the weights and the order of the rows"""

    # Reports
    eval_every: CountOrOff = 250
    """steps between evaluations; -1 = at the end only"""
    eval_tokens: CountOrAll = 20_971_520
    """tokens of each split to evaluate on; -1 = all"""
    core_metric_every: CountOrOff = -1
    """steps between scores on CORE, and one at the end (2000 is nanochat's); -1 = off. The bundle is taken from --bundle or fetched beside OUT, to core/"""
    core_metric_max_per_task: CountOrAll = 500
    """examples of each of its tasks; -1 = all"""
    eval_rows: EvalRows = "upstream"
    """which of them: upstream = the first that nanochat's loader would give (the paper's way), spaced = evenly spaced over the split"""
    sample_every: CountOrOff = 2000
    """steps between samples of text, nanochat's seven prompts; -1 = never"""
    save_every: CountOrOff = 250
    """steps between checkpoints; -1 = at the end only"""
    keep: Count = 2
    """checkpoints to keep"""
    log_every: Count = 10
    """steps between printed lines"""
    stop_after: CountOrOff = -1
    """stop, saved, after this step; the horizon stays (for trying things out)"""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases; offline needs no account (WANDB_MODE sets the Makefile's default)"""
    results: Path = Path("out/results.jsonl")
    """file to append the finished run's numbers to"""

    @property
    def tag(self) -> str:
        values = "" if self.gka_values == GKA_VALUES[0] or not has_gka(self.attention, self.depth) else self.gka_values
        parts = f"d{self.depth}", self.attention, self.head_offsets, values
        return self.model_tag or "-".join(part for part in parts if part)

    def identity(self) -> dict[str, Any]:
        settings = super().identity()
        if not has_gka(self.attention, self.depth):
            del settings["gka_values"]  # means nothing there
        return settings

    def check_resumes(self, saved: dict[str, Any]) -> None:
        super().check_resumes({"gka_values": BEFORE_ROTATED, **saved})
