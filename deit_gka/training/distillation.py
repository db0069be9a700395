"""The loss of a run: cross entropy or DeiT III's binary cross entropy, plus a teacher's part (DeiT's token).

With a teacher the loss is (1 - alpha) x that of the class token's head + alpha x that of the distillation token's head,
which is judged by the teacher's answers to the same augmented and mixed images (Touvron et al. 2021, arXiv 2012.12877,
equations 2 and 3).
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from timm.data import resolve_input_data_config
from timm.loss import SoftTargetCrossEntropy
from torch import nn

from deit_gka.data.sources.classes import numbers_by_name
from deit_gka.model.checkpoints import SavedModel, build, find_model, load_file
from deit_gka.recipe import Colour, Recipe
from trainkit_gka.cli import UserError

Outputs = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Colours = tuple[Colour, Colour]  # mean and deviation


class Teacher(nn.Module):
    """A model that answers in evaluation mode, without gradients, whatever mode it is put in.

    colours, student: mean and deviation by which the teacher's and the student's images are normalised. Mixed or not,
    images are brought to the teacher's by an affine map of every channel, and resized to its `size`, if it has one.
    numbers: the teacher's number for each of the student's classes; None if the same.
    """

    def __init__(self, model: nn.Module, colours: Colours, student: Colours, size=None, numbers=None):
        super().__init__()
        self.register_buffer("numbers", None if numbers is None else torch.tensor(numbers))
        self.model, self.size = model.eval().requires_grad_(False), size
        values = (torch.tensor(value).view(1, 3, 1, 1) for value in (*colours, *student))
        mean, std, student_mean, student_std = values
        self.register_buffer("scale", student_std / std)
        self.register_buffer("shift", (student_mean - mean) / std)

    def train(self, mode: bool = True) -> "Teacher":
        return super().train(False)

    @torch.no_grad()
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = images * self.scale + self.shift
        if self.size is not None and images.shape[-2:] != self.size:
            images = F.interpolate(images, self.size, mode="bicubic", antialias=True)
        answers = self.model(images)
        return answers if self.numbers is None else answers[:, self.numbers]


def load_teacher(recipe: Recipe, classes: list[str]) -> Teacher:
    """The recipe's teacher: a run or exported folder of ours, or a timm model, with timm's weights or those of a file.

    Classes that it knows by the same names keep their names, whatever its numbers. Raises UserError if the weights
    cannot be had, or if the teacher has another number of classes or knows only some of their names.
    """
    name, path = recipe.teacher_model, recipe.teacher_path
    saved = SavedModel("--teacher-path", name) if path else find_model(name, "--teacher-model")
    model = load_file(Path(path), build(name, len(classes))) if path else saved.model()
    numbers = numbers_by_name(classes, saved.classes)
    if model.num_classes != len(classes) or (numbers is None and set(saved.classes) & set(classes)):
        differ = f"--teacher-model {name} knows {model.num_classes} classes, which are not the data's {len(classes)}"
        raise UserError(f"{differ}; give a teacher of the same classes")
    about, size = resolve_input_data_config(model), None
    if not getattr(model, "dynamic_img_size", False):  # a convolutional network takes any size, and says so nowhere
        fixed = about["input_size"][-2:] if model.pretrained_cfg.get("fixed_input_size") else None
        size = getattr(getattr(model, "patch_embed", None), "img_size", None) or fixed
    colours = about["mean"], about["std"]
    return Teacher(model, colours, (recipe.mean, recipe.std), tuple(size) if size else None, numbers)


@dataclass
class Objective:
    """The recipe's loss of a batch, a mean over its images."""

    recipe: Recipe
    teacher: Teacher | None = None

    def __call__(self, images: torch.Tensor, outputs: Outputs, targets: torch.Tensor) -> torch.Tensor:
        """images (n, 3, S, S) as the model saw them; targets (n, classes).

        outputs: logits (n, classes); with a teacher those of both heads.
        """
        if self.teacher is None:
            return self.base(outputs, targets)
        by_label, by_teacher = outputs
        alpha = self.recipe.distillation_alpha
        return (1 - alpha) * self.base(by_label, targets) + alpha * self.distillation(by_teacher, self.teacher(images))

    def base(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.recipe.bce_loss:  # every class that is in a mixed image counts fully (DeiT III)
            return F.binary_cross_entropy_with_logits(logits, targets.gt(0).to(logits.dtype))
        return SoftTargetCrossEntropy()(logits, targets)

    def distillation(self, logits: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        """hard: cross entropy with the teacher's choice. soft: tau^2 KL(teacher || student) at temperature tau, a mean
        over images and classes, as upstream's.
        """
        if self.recipe.distillation_type == "hard":
            return F.cross_entropy(logits, answers.argmax(dim=1))
        tau = self.recipe.distillation_tau
        student, teacher = (F.log_softmax(values.float() / tau, dim=1) for values in (logits, answers))
        return tau**2 * F.kl_div(student, teacher, reduction="sum", log_target=True) / logits.numel()
