"""The flags of `train`: one field each, nanochat's names and defaults where it has them."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from gka.runtime.cli import UserError
from nanochat_gka.config import GPTConfig
from nanochat_gka.optim import OptimConfig

# What may differ when a run is resumed: it changes speed, reports and where things are, not what is computed.
OPERATIONAL = {"data", "out", "device_type", "device_batch_size", "compile", "eval_every", "eval_tokens", "sample_every", "save_every", "keep",
               "log_every", "wandb", "results", "verify_data", "stop_after"}  # fmt: skip


@dataclass
class TrainConfig:
    """Pretrain a GPT with softmax, VLT or Gaussian kernel attention. The same command continues a run that was stopped."""

    # Where
    data: Path = Path("out/packed")
    """folder of packed rows (make tokenize)"""
    out: Path = Path("out/runs")
    """folder for runs; this one goes to OUT/TAG"""
    model_tag: str = ""
    """name of the run; empty = d<depth>-<attention>"""
    device_type: Literal["auto", "cuda", "cpu"] = "auto"
    """auto takes CUDA if there is one"""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile; auto = on CUDA"""
    verify_data: bool = True
    """check the data's checksums before training"""

    # Model
    depth: int = 20
    """number of layers; everything else follows from it"""
    aspect_ratio: int = 64
    """width per layer"""
    head_dim: int = 128
    """channels per head"""
    max_seq_len: int = -1
    """context length T; -1 = the data's"""
    window_pattern: str = "SSSL"
    """L full context, S half of it, tiled over the layers; the last layer is always L"""
    attention: str = "softmax"
    """softmax, gka, vlt, or a pattern of A (softmax), G (gka), V (vlt) tiled over the layers, such as GGGA"""
    value_embeds: Literal["auto", "all", "none"] = "auto"
    """gated value embeddings: auto = nanochat's layers where attention is softmax"""
    head_offsets: str = ""
    """gka heads: letters tiled over the heads, N key j with value j, P with value j-1, S key j-1 with value j; empty = the paper's form"""
    gka_values: Literal["normalised", "rotated", "raw"] = "normalised"
    """what gka heads mix; rotated is the paper's literal reading"""
    sigma_squared: float = 0.0
    """starting sigma^2 of gka heads; 0 = head_dim, or head_dim / 4 with head offsets"""

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
    embedding_lr: float = 0.3
    """base learning rate of the embeddings (AdamW)"""
    unembedding_lr: float = 0.004
    """base learning rate of the output head (AdamW)"""
    matrix_lr: float = 0.02
    """base learning rate of the blocks' matrices (Muon)"""
    scalar_lr: float = 0.5
    """base learning rate of the residual scalars (AdamW)"""
    sigma_lr: float = 0.005
    """base learning rate of log sigma (AdamW)"""
    weight_decay: float = 0.2
    """Muon's weight decay before scaling; falls to zero over the run"""
    adam_beta1: float = 0.8
    """AdamW"""
    adam_beta2: float = 0.95
    """AdamW"""
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
        return self.model_tag or "-".join(part for part in (f"d{self.depth}", self.attention, self.head_offsets) if part)

    def shape(self, depth: int, sequence_len: int, vocab_size: int) -> GPTConfig:
        """The model's shape at `depth` with these settings. Raises UserError naming the flag."""
        try:
            return GPTConfig.from_depth(
                depth, aspect_ratio=self.aspect_ratio, head_dim=self.head_dim, sequence_len=sequence_len, vocab_size=vocab_size,
                window_pattern=self.window_pattern, attention=self.attention, value_embeds=self.value_embeds,
                head_offsets=self.head_offsets, gka_values=self.gka_values, sigma_squared=self.sigma_squared,
            )  # fmt: skip
        except ValueError as error:
            raise UserError(str(error)) from None

    def optim(self) -> OptimConfig:
        return OptimConfig(**{field.name: getattr(self, field.name) for field in fields(OptimConfig)})

    def identity(self) -> dict:
        """The settings that decide what is computed; a resumed run must agree with all of them."""
        return {
            key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items() if key not in OPERATIONAL | {"model_tag"}
        }

    def check_resumes(self, saved: dict) -> None:
        """Raises UserError naming the first flag that differs from the run being resumed."""
        for key, value in self.identity().items():
            if saved.get(key) != value:
                flag = "--" + key.replace("_", "-")
                raise UserError(f"{flag} is {value} but the run in {self.out / self.tag} has {saved.get(key)}; use its value, or another --model-tag")

    def check(self) -> None:
        """Raises UserError for values that make no sense."""
        for key in ("device_batch_size", "keep", "log_every", "eval_tokens"):
            if getattr(self, key) < 1:
                raise UserError(f"--{key.replace('_', '-')} must be at least 1, got {getattr(self, key)}")
        for key in ("eval_every", "sample_every", "save_every", "stop_after"):
            if getattr(self, key) == 0 or getattr(self, key) < -1:
                raise UserError(f"--{key.replace('_', '-')} must be positive, or -1 for off, got {getattr(self, key)}")
        if not (0 <= self.warmup_ratio <= 1 and 0 <= self.warmdown_ratio <= 1):
            raise UserError(f"--warmup-ratio and --warmdown-ratio must be between 0 and 1, got {self.warmup_ratio} and {self.warmdown_ratio}")
        if "/" in self.model_tag or self.model_tag.startswith("."):
            raise UserError(f"--model-tag must be a plain folder name, got {self.model_tag!r}")
