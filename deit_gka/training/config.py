"""The flags of `train`: the recipe, and where and how to run it."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from deit_gka.data.sources import FORMS, DataParts
from deit_gka.data.workers import WorkerCount
from deit_gka.model.checkpoints import check_attention, check_name, parse_kwargs
from deit_gka.recipe import Recipe
from trainkit_gka.cli import Bounds, Count, CountOrOff, Group, MayChange, UserError
from trainkit_gka.run_config import RunConfig


@dataclass(frozen=True)
class TrainConfig(Recipe, DataParts, RunConfig):
    """Train a vision transformer with softmax, VLT or Gaussian kernel attention.

    The same command continues a run that was stopped.
    """

    # What and where
    model: Annotated[str, Group.MODEL] = "deit_tiny_gka_patch16_224"
    """Any timm name: deit_{tiny,small,base}_{gka,vlt}_patch16_224, deit_tiny_patch16_224 (softmax), ..."""
    model_kwargs: Annotated[tuple[str, ...], Group.MODEL] = ()
    """Arguments for timm, e.g. sigma_squared=1.0 depth=4."""
    patch_size: Annotated[int, Bounds(0, 8192, other=(-1, "an eighth")), Group.MODEL] = 0
    """Pixels a side of a patch; 0 = the model's own; -1 = 4, 8 or 16, whichever is nearest to input_size/8."""
    attention: Annotated[str, Group.MODEL] = ""
    """A (softmax), G (gka) and V (vlt) by layer, tiled, such as GGGA, or one kind's name; empty takes the model's."""
    initial_weights: MayChange[Annotated[str, Group.MODEL]] = ""
    """Start from what fits of a file (.safetensors, or .pth as DeiT's), a run or exported folder, or a timm name."""
    data: MayChange[Annotated[str, Group.DATA]] = ""
    """A folder with train/ and val/ (class folders or tars) or of parquet, hf:NAME, hf-stream:NAME, wds:FOLDER, digits,
    cifar10."""
    model_tag: MayChange[str] = ""
    """Name of the run; empty takes the model's."""

    # Speed: an update trains on the same images whatever these are (stochastic depth draws by process and micro-batch)
    device_batch_size: MayChange[Annotated[int, Bounds(2)]] = 256
    """Images per process at once; lower it if memory runs out."""
    num_workers: MayChange[WorkerCount] = -1
    """Processes that load images, for each training process; -1 takes its share of the cores."""
    compile: MayChange[Literal["auto", "off", "blocks", "default", "max-autotune"]] = "auto"
    """How torch.compile is used: blocks one by one, in seconds, or the whole model, default or max-autotune (paper).
    auto: blocks on CUDA (max-autotune for models without blocks), off on a CPU or without a compiler."""
    grad_checkpointing: MayChange[bool] = False
    """Recompute activations in backward: less memory, slower."""

    # Reports
    eval_every: MayChange[Annotated[CountOrOff, Group.LOGGING]] = 1
    """Epochs between evaluations; -1 evaluates at the end only."""
    save_every: MayChange[CountOrOff] = 500
    """Updates between checkpoints, beside those after every epoch; -1 saves those only."""
    log_every: MayChange[Annotated[Count, Group.LOGGING]] = 50
    """Updates between printed lines."""

    @property
    def tag(self) -> str:
        return self.model_tag or "-".join(filter(None, (self.model, self.attention)))

    def timm_arguments(self) -> dict[str, Any]:
        """Arguments for timm from --model-kwargs and --attention."""
        return {**parse_kwargs(self.model_kwargs), **({"attention": self.attention} if self.attention else {})}

    def identity(self) -> dict[str, Any]:
        teacher = ("teacher_model", "teacher_path", "distillation_alpha", "distillation_tau")  # may change nothing
        left_out = teacher if self.distillation_type == "none" else ()
        return {name: value for name, value in super().identity().items() if name not in left_out}

    def record(self) -> dict[str, Any]:
        return {**super().record(), "data": self.data, **self.given_parts()}

    def check(self) -> None:
        if not self.data:
            raise UserError(f"--data is missing; it is {FORMS}")
        Recipe.check(self)
        check_name(self.model)
        fixed = {"num_classes": "the data's", "img_size": "--input-size", "in_chans": "3, as the images"}
        arguments = parse_kwargs(self.model_kwargs)
        for key in fixed.keys() & arguments.keys():
            raise UserError(f"--model-kwargs cannot set {key} in training: it is {fixed[key]}")
        if self.patch_size and "patch_size" in arguments:
            raise UserError("--patch-size and --model-kwargs both set the size of a patch; give one of them")
        if self.attention:
            if arguments.keys() & {"attention", "attn_layer"}:
                raise UserError("--attention and --model-kwargs both choose the attention; give one of them")
            check_attention(self.attention)
        RunConfig.check(self)
