"""The training recipe: every hyperparameter of the paper's vision experiments, one frozen dataclass, the paper's value as the default.

"paper" below is section 4.1 of the paper; "DeiT" is a value the paper leaves open, taken from the DeiT recipe it follows.
"""

from dataclasses import dataclass
from typing import Literal

from gka.runtime.cli import UserError


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters, the paper's by default. Names and meanings are DeiT's."""

    # Duration and batch
    epochs: int = 300
    """passes over the training set (paper: 300)"""
    batch_size: int = 1792
    """images per update over all processes, accumulated where they do not fit (paper: 7 x 256)"""
    group_size: int = 256
    """images that share one Mixup/CutMix draw (paper: 256 per GPU); counts only while batch_size is a multiple of it"""

    # Optimiser: AdamW; biases, norms, positions, CLS token and log sigma are not decayed (paper)
    lr: float = 1e-3
    """learning rate per 1024 images of batch: 1.75e-3 at 1792 (paper: 1e-3)"""
    weight_decay: float = 0.05
    """AdamW's, decoupled (paper: 0.05)"""
    opt_betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's averaging of gradient and square (paper: 0.9, 0.999)"""
    clip_grad: float = 1.0
    """largest norm of the gradient; 0 = no limit (paper: 1.0)"""

    # Schedule, stepped every update
    warmup_epochs: float = 5
    """linear warm-up (paper: 5)"""
    warmup_lr: float = 1e-6
    """where it starts (DeiT: 1e-6)"""
    min_lr: float = 1e-6
    """end of the cosine (paper: 1e-6; DeiT 1e-5)"""

    # Augmentation
    input_size: int = 224
    """pixels a side (paper: 224)"""
    scale: tuple[float, float] = (0.08, 1.0)
    """area of the random resized crop (paper: 0.08, 1)"""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """its aspect ratio (DeiT: 3/4, 4/3)"""
    hflip: float = 0.5
    """probability of a horizontal flip (paper: flip; DeiT 0.5)"""
    aa: str = "rand-m9-mstd0.5-inc1"
    """RandAugment, n=2 (timm's default), m=9; empty = none (paper: n=2, m=9; DeiT: mstd 0.5, increasing)"""
    reprob: float = 0.25
    """probability of random erasing, with noise (paper: 0.25; DeiT: pixel mode)"""
    repeated_aug: int = 3
    """augmented copies of an image in an epoch's draw; an epoch then sees a third of the images (paper: 3)"""
    mixup: float = 0.8
    """Mixup alpha; 0 = off (paper: 0.8)"""
    cutmix: float = 1.0
    """CutMix alpha; 0 = off (paper: 1.0)"""
    smoothing: float = 0.1
    """label smoothing (paper: 0.1)"""

    # Model
    drop_path: float = -1.0
    """stochastic depth of the last block; -1 = by size, 0 for models that are not DeiT or ViT (paper: 0.1 for Ti and S, 0.2 for B)"""

    # Weights that are reported
    model_ema_decay: float = 0.99996
    """per update (paper: 0.99996, and EMA top-1; its DeiT figures are those DeiT published, without EMA); 0 = no average"""
    model_ema_warmup: bool = True
    """a plain running mean until 1/(1-decay) updates; the same after 300 epochs, and without it short runs report their random start"""

    # Evaluation and arithmetic
    crop_pct: float = 0.875
    """evaluation resizes to input_size/crop_pct, bicubic, and crops the centre (DeiT: 256 -> 224)"""
    amp: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """autocast type; auto = bfloat16 on CUDA, float32 on CPU (paper: BF16)"""
    seed: int = 0
    """of weights, order and augmentation (DeiT: 0)"""

    def check(self) -> None:
        """Raises UserError for values that make no sense."""
        for name in ("epochs", "repeated_aug", "input_size"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("batch_size", "group_size"):
            value = getattr(self, name)
            self._require(name, value >= 2 and value % 2 == 0, "even and at least 2: images are mixed in pairs")
        for name in ("weight_decay", "clip_grad", "warmup_epochs", "mixup", "cutmix", "seed"):
            self._require(name, getattr(self, name) >= 0, "0 or more")
        for name in ("lr", "warmup_lr", "min_lr"):
            self._require(name, getattr(self, name) > 0, "positive")
        for name in ("hflip", "reprob"):
            self._require(name, 0 <= getattr(self, name) <= 1, "between 0 and 1")
        for name in ("smoothing", "model_ema_decay"):
            self._require(name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        self._require("warmup_epochs", self.warmup_epochs <= self.epochs, f"at most --epochs {self.epochs}")
        self._require("opt_betas", all(0 <= beta < 1 for beta in self.opt_betas), "two values in [0, 1)")
        self._require("crop_pct", 0 < self.crop_pct <= 1, "above 0 and at most 1")
        self._require("drop_path", self.drop_path == -1 or 0 <= self.drop_path < 1, "at least 0 and below 1, or -1 for the paper's")
        self._require("scale", 0 < self.scale[0] <= self.scale[1] <= 1, "two rising values in (0, 1]")
        self._require("ratio", 0 < self.ratio[0] <= self.ratio[1], "two rising positive values")

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise UserError(f"--{name.replace('_', '-')} must be {rule}; got {getattr(self, name)}")

    @property
    def scaled_lr(self) -> float:
        """The peak learning rate for this batch."""
        return self.lr * self.batch_size / 1024

    def drop_path_of(self, model_name: str) -> float:
        """Stochastic depth rate for a model name."""
        if self.drop_path >= 0:
            return self.drop_path
        if not model_name.startswith(("deit", "vit")):
            return 0.0
        return 0.2 if "_base_" in model_name else 0.1
