"""The flags of `train`: one field each, nanochat's names and defaults where it has them."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from gka.runtime.cli import UserError
from gka.runtime.training import RunConfig
from nanochat_gka.config import BEFORE_ROTATED, GKA_VALUES, ModelFlags, has_gka
from nanochat_gka.optim import OptimConfig


@dataclass
class TrainConfig(OptimConfig, ModelFlags, RunConfig):
    """Pretrain a GPT with softmax, VLT or Gaussian kernel attention. The same command continues a run that was stopped."""

    OPERATIONAL: ClassVar = {"data", "out", "device_type", "device_batch_size", "compile", "eval_every", "eval_tokens", "sample_every", "save_every", "keep",
                             "log_every", "wandb", "results", "verify_data", "stop_after", "model_tag"}  # fmt: skip

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

    max_seq_len: int = -1
    """context length T; -1 = the data's"""

    # Horizon: the first of these that is set decides
    num_iterations: int = -1
    """number of steps"""
    target_flops: float = -1.0
    """total training FLOPs"""
    target_param_data_ratio: float = 10.5
    """training tokens per scaling parameter (matrices and head)"""

    # Optimisation
    device_batch_size: int = 32
    """rows per process and micro-step; lower it if memory runs out"""
    total_batch_size: int = -1
    """tokens per step over all processes; -1 = automatic"""
    warmup_ratio: float = 0.0
    """part of the steps spent warming up"""
    warmdown_ratio: float = 0.5
    """part of the steps spent warming down"""
    final_lr_frac: float = 0.0
    """learning rate at the end, as a fraction"""
    seed: int = 42
    """of the weights and the order of the rows"""

    # Reports
    eval_every: int = 250
    """steps between evaluations; -1 = at the end only"""
    eval_tokens: int = 20_971_520
    """tokens of each split to evaluate on"""
    sample_every: int = 2000
    """steps between samples of text; -1 = never"""
    save_every: int = 250
    """steps between checkpoints; -1 = at the end only"""
    keep: int = 2
    """checkpoints to keep"""
    log_every: int = 10
    """steps between printed lines"""
    stop_after: int = -1
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

    def check(self) -> None:
        super().check()
        self.require_positive("device_batch_size", "keep", "log_every", "eval_tokens")
        self.require_positive("eval_every", "sample_every", "save_every", "stop_after", "num_iterations", or_off=True)
        for flag in ("target_flops", "target_param_data_ratio"):
            if getattr(self, flag) != -1 and not 0 < getattr(self, flag) < math.inf:
                raise UserError(f"--{flag.replace('_', '-')} must be positive, or -1 for off, got {getattr(self, flag)}")
        for flag in ("embedding_lr", "unembedding_lr", "matrix_lr", "scalar_lr", "sigma_lr"):
            if not 0 <= getattr(self, flag) < math.inf:
                raise UserError(f"--{flag.replace('_', '-')} must be finite and not negative, got {getattr(self, flag)}")
        if self.seed < 0:
            raise UserError(f"--seed must not be negative, got {self.seed}")
        if not (0 <= self.warmup_ratio <= 1 and 0 <= self.warmdown_ratio <= 1):
            raise UserError(f"--warmup-ratio and --warmdown-ratio must be between 0 and 1, got {self.warmup_ratio} and {self.warmdown_ratio}")
