"""The training recipe: every hyperparameter of the paper's vision experiments, with the paper's value as the default.

"paper" below is section 4.1 of the paper; "DeiT" is a value the paper leaves open, taken from the DeiT recipe it
follows.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from trainkit_gka.cli import Bounds, Group, Probability, Seed, Share, UserError, check_bounds, flag_of

Even = Annotated[int, Bounds(2)]  # images are mixed in pairs
Rate = Annotated[float, Bounds(0, 1e30, open_least=True)]
Strength = Annotated[float, Bounds(0, 1000)]
Colour = tuple[float, float, float]  # red, green, blue


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters, the paper's by default. Names and meanings are DeiT's."""

    # Duration and batch
    epochs: Annotated[int, Bounds(1, 10**6), Group.SCHEDULE] = 300
    """Passes over the training set (paper: 300)."""
    batch_size: Annotated[Even, Group.SCHEDULE] = 1792
    """Images per update over all processes, accumulated where they do not fit (paper: 7 x 256)."""
    group_size: Annotated[Even, Group.SCHEDULE] = 256
    """Images that share one Mixup/CutMix draw (paper: 256 per GPU), where batch_size is a multiple of it."""

    # Optimiser: AdamW; biases, norms, positions, CLS token and log sigma are not decayed (paper)
    lr: Annotated[Rate, Group.SCHEDULE] = 1e-3
    """Learning rate per 1024 images of batch: 1.75e-3 at 1792 (paper: 1e-3)."""
    weight_decay: Annotated[Share, Group.OPTIMISER] = 0.05
    """Weight decay of AdamW, decoupled (paper: 0.05)."""
    opt_betas: Annotated[tuple[float, float], Bounds(0, 1, open_most=True), Group.OPTIMISER] = (0.9, 0.999)
    """How AdamW averages gradients and their squares (paper: 0.9, 0.999)."""
    clip_grad: Annotated[float, Bounds(0), Group.OPTIMISER] = 1.0
    """Largest norm of the gradient; 0 = no limit (paper: 1.0)."""

    # Schedule, stepped every update
    warmup_epochs: Annotated[float, Bounds(0), Group.SCHEDULE] = 5
    """Epochs of linear warm-up (paper: 5)."""
    warmup_lr: Annotated[Rate, Group.SCHEDULE] = 1e-6
    """Learning rate at the start of the warm-up (DeiT: 1e-6)."""
    min_lr: Annotated[Rate, Group.SCHEDULE] = 1e-6
    """Learning rate at the end of the cosine (paper: 1e-6; DeiT 1e-5)."""

    # Augmentation
    input_size: Annotated[int, Bounds(1, 8192, other=(-1, "the images'")), Group.AUGMENTATION] = 224
    """Pixels a side (paper: 224); -1 = about the smaller side of the images, between 32 and 224."""
    mean: Annotated[Colour, Bounds(0, 1), Group.AUGMENTATION] = IMAGENET_DEFAULT_MEAN
    """Mean of red, green and blue, which is taken from every pixel (DeiT: ImageNet's)."""
    std: Annotated[Colour, Bounds(0, 1, open_least=True), Group.AUGMENTATION] = IMAGENET_DEFAULT_STD
    """Standard deviation of red, green and blue, by which it is divided then (DeiT: ImageNet's)."""
    scale: Annotated[tuple[float, float], Bounds(0, 1, open_least=True), Group.AUGMENTATION] = (0.08, 1.0)
    """Area of the random resized crop (paper: 0.08, 1)."""
    ratio: Annotated[tuple[float, float], Bounds(0, open_least=True), Group.AUGMENTATION] = (3 / 4, 4 / 3)
    """Aspect ratio of the crop (DeiT: 3/4, 4/3)."""
    hflip: Annotated[Probability, Group.AUGMENTATION] = 0.5
    """Probability of a horizontal flip (paper: flip; DeiT 0.5)."""
    aa: Annotated[str, Group.AUGMENTATION] = "rand-m9-mstd0.5-inc1"
    """RandAugment, n=2 (timm's default), m=9; empty = none (paper: n=2, m=9; DeiT: mstd 0.5, increasing)."""
    reprob: Annotated[Probability, Group.AUGMENTATION] = 0.25
    """Probability of random erasing, with noise (paper: 0.25; DeiT: pixel mode)."""
    repeated_aug: Annotated[int, Bounds(1, 100), Group.AUGMENTATION] = 3
    """Augmented copies of an image in an epoch's draw; an epoch then sees a third of the images (paper: 3)."""
    mixup: Annotated[Strength, Group.AUGMENTATION] = 0.8
    """Mixup alpha; 0 = off (paper: 0.8)."""
    cutmix: Annotated[Strength, Group.AUGMENTATION] = 1.0
    """CutMix alpha; 0 = off (paper: 1.0)."""
    smoothing: Annotated[Share, Group.AUGMENTATION] = 0.1
    """Label smoothing (paper: 0.1)."""

    # DeiT III's augmentation and loss, off in the paper
    three_augment: Annotated[bool, Group.AUGMENTATION] = False
    """Make every image grey, solarised or blurred, in place of --aa and --reprob (paper: no; DeiT III: yes)."""
    src: Annotated[bool, Group.AUGMENTATION] = False
    """With --three-augment: a simple random crop, not a resized one (paper: no; DeiT III: for ImageNet-21k)."""
    color_jitter: Annotated[float, Bounds(0), Group.AUGMENTATION] = 0.3
    """With --three-augment: brightness, contrast and saturation change by up to this; 0 = none (DeiT: 0.3)."""
    bce_loss: Annotated[bool, Group.OPTIMISER] = False
    """Binary cross entropy, a 1 for every class of a mixed image; needs --smoothing 0 (paper: no; DeiT III: yes)."""

    # Distillation, none in the paper
    distillation_type: Annotated[Literal["none", "soft", "hard"], Group.MODEL] = "none"
    """What the distillation token learns of a teacher: its choice (hard, DeiT's best) or probabilities (soft)."""
    teacher_model: Annotated[str, Group.MODEL] = "regnety_160.deit_in1k"
    """Any timm name, or the folder of a run or export (DeiT: this RegNetY). It sees images normalised as its own were,
    and resized if it takes one size only."""
    teacher_path: Annotated[str, Group.MODEL] = ""
    """File with the teacher's weights; empty = timm's for the name (DeiT: needed)."""
    distillation_alpha: Annotated[Probability, Group.MODEL] = 0.5
    """Share of the teacher's loss (DeiT: 0.5)."""
    distillation_tau: Annotated[float, Bounds(0, open_least=True), Group.MODEL] = 1.0
    """Temperature of soft distillation (DeiT: 1.0)."""

    # Model
    drop_path: Annotated[float, Bounds(0, 1, open_most=True, other=(-1, "the paper's")), Group.MODEL] = -1.0
    """Stochastic depth of the last block; -1 = by size: 0.1 for Ti and S, 0.2 for B (paper), 0 if not DeiT or ViT."""

    # Weights that are reported
    model_ema_decay: Annotated[Share, Group.OPTIMISER] = 0.99996
    """Decay of the weight average per update; 0 = no average (paper: 0.99996; its DeiT figures have none)."""
    model_ema_warmup: Annotated[bool, Group.OPTIMISER] = True
    """Average plainly until 1/(1-decay) updates; without it short runs report their random start."""

    # Evaluation and arithmetic
    crop_pct: Annotated[float, Bounds(0, 1, open_least=True), Group.LOGGING] = 0.875
    """Evaluation resizes to input_size/crop_pct, bicubic, and crops the centre (DeiT: 256 -> 224)."""
    amp: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Autocast type; auto = bfloat16 on CUDA, float32 on CPU (paper: BF16)."""
    seed: Seed = 0
    """Seed of weights, order and augmentation (DeiT: 0)."""

    def check(self) -> None:
        """Raises UserError for values that make no sense."""
        check_bounds(self)
        even, peak = "even: images are mixed in pairs", "the peak learning rate, --lr x --batch-size / 1024"
        below_peak = f"at most {peak} = {self.scaled_lr:.3g}"
        for name, wrong, rule in (
            ("batch_size", self.batch_size % 2, even),
            ("group_size", self.group_size % 2, even),
            ("scale", self.scale[0] > self.scale[1], "two rising values"),
            ("ratio", self.ratio[0] > self.ratio[1], "two rising values"),
            ("smoothing", self.bce_loss and self.smoothing, "0 with --bce-loss: it gives every class a target"),
            ("three_augment", self.src and not self.three_augment, "on with --src, which is its crop"),
            ("warmup_epochs", self.warmup_epochs > self.epochs, f"at most --epochs {self.epochs}"),
            ("min_lr", self.min_lr > self.scaled_lr, below_peak),
            ("warmup_lr", self.warmup_lr > self.scaled_lr, below_peak),
        ):
            if wrong:
                raise UserError(f"{flag_of(name)} must be {rule}; got {getattr(self, name)}")

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
