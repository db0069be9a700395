"""The flags of `train`: the recipe, and where and how to run it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from deit_gka.data.sources import FORMS
from deit_gka.data.workers import WorkerCount
from deit_gka.model.checkpoints import check_name, parse_kwargs
from deit_gka.recipe import Recipe
from gka import layer_kinds
from trainkit.cli import Bounds, Count, CountOrOff, UserError
from trainkit.training import RunConfig


@dataclass(frozen=True)
class TrainConfig(Recipe, RunConfig):
    """Train a vision transformer with softmax, VLT or Gaussian kernel attention. The same command continues a run that was stopped."""

    OPERATIONAL: ClassVar = {"data", "initial_weights", "out", "model_tag", "device_type", "device_batch_size", "num_workers", "compile", "grad_checkpointing",
                             "save_every", "keep", "log_every", "eval_every", "stop_after", "wandb", "results"}  # fmt: skip

    # What and where
    model: str = "deit_tiny_gka_patch16_224"
    """any timm name: deit_{tiny,small,base}_{gka,vlt}_patch16_224, deit_tiny_patch16_224 (softmax), ..."""
    model_kwargs: tuple[str, ...] = ()
    """arguments for timm, e.g. sigma_squared=1.0 depth=4"""
    attention: str = ""
    """Attention by layer: A (softmax), G (gka), V (vlt) tiled over the layers, such as GGGA, or one kind's name. Empty =
    the model's own."""
    initial_weights: str = ""
    """start from these: a file (.safetensors, or .pth as DeiT's), a run or exported folder, or a timm name; what fits is taken, the rest is said"""
    data: str = ""
    """a folder with train/ and val/ (class folders, or webdataset tars), hf:NAME_OR_PATH, hf-stream:NAME_OR_PATH, wds:FOLDER or digits"""
    out: Path = Path("out/runs")
    """folder for runs; this one goes to OUT/TAG"""
    model_tag: str = ""
    """name of the run; empty = the model's"""
    device_type: Literal["auto", "cuda", "cpu"] = "auto"
    """auto takes CUDA if there is one"""

    # Speed; an update trains on the same images whatever these are (stochastic depth draws by process and micro-batch)
    device_batch_size: Annotated[int, Bounds(2)] = 256
    """images per process at once; lower it if memory runs out"""
    num_workers: WorkerCount = -1
    """processes that load images, for each training process; -1 = its share of the cores"""
    compile: Literal["auto", "off", "default", "max-autotune"] = "auto"
    """torch.compile; auto = max-autotune on CUDA (paper), off on CPU"""
    grad_checkpointing: bool = False
    """recompute activations in backward: less memory, slower"""

    # Reports
    eval_every: CountOrOff = 1
    """epochs between evaluations; -1 = at the end only"""
    save_every: CountOrOff = 500
    """updates between checkpoints, beside those after every epoch; -1 = those only"""
    keep: Count = 2
    """checkpoints to keep, beside the best"""
    log_every: Count = 50
    """updates between printed lines"""
    stop_after: CountOrOff = -1
    """stop, saved, after this update; the schedule stays (for trying things out)"""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases; offline needs no account (WANDB_MODE sets the Makefile's default)"""
    results: Path = Path("out/results.jsonl")
    """file to append the finished run's numbers to"""

    @property
    def tag(self) -> str:
        return self.model_tag or "-".join(filter(None, (self.model, self.attention)))

    def timm_arguments(self) -> dict[str, Any]:
        """What --model-kwargs and --attention say about the model."""
        return {**parse_kwargs(self.model_kwargs), **({"attention": self.attention} if self.attention else {})}

    def identity(self) -> dict[str, Any]:
        """Without a teacher what is said about one decides nothing."""
        settings, teachers = (
            super().identity(),
            ("teacher_model", "teacher_path", "distillation_alpha", "distillation_tau"),
        )
        return {
            key: value for key, value in settings.items() if self.distillation_type != "none" or key not in teachers
        }

    def check(self) -> None:
        if not self.data:
            raise UserError(f"--data is missing; it is {FORMS}")
        Recipe.check(self)
        check_name(self.model)
        given = {"num_classes": "the data's", "img_size": "--input-size", "in_chans": "3, as the images"}
        arguments = parse_kwargs(self.model_kwargs)
        for key in given.keys() & arguments.keys():
            raise UserError(f"--model-kwargs cannot set {key} in training: it is {given[key]}")
        if self.attention:
            if arguments.keys() & {"attention", "attn_layer"}:
                raise UserError("--attention and --model-kwargs both choose the attention; give one of them")
            try:
                layer_kinds(self.attention, num_layers=1)
            except ValueError as error:
                raise UserError(f"--{error}") from None
        RunConfig.check(self)
