"""Learning from a teacher: the losses are the formulas, the teacher sees images as it was trained."""

import numpy as np
import pytest
import torch

import tiny
from deit_gka import train as training
from deit_gka.recipe import Recipe
from deit_gka.training.config import TrainConfig
from deit_gka.training.distillation import Objective, Teacher, load_teacher
from tiny import one_line_error
from vision_runs import accuracy, digit_flags, newest, train_digits

DIGITS = [str(digit) for digit in range(10)]
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def log_softmax(values):
    return values - np.log(np.exp(values).sum(axis=1, keepdims=True))


def test_losses_are_the_papers():
    """DeiT's equations 2 and 3 in numpy, float64; soft distillation is a mean over images and classes, as upstream
    has it. DeiT III's binary cross entropy counts every class with a target.
    """
    rng = np.random.default_rng(0)
    label, distilled, answers = rng.normal(size=(3, 6, 5)) * 2
    targets = rng.dirichlet(np.ones(5), size=6) * (rng.random((6, 5)) < 0.7)
    images, tensors = torch.zeros(6, 3, 4, 4), [torch.tensor(values) for values in (label, distilled, targets)]
    teacher = Teacher(torch.nn.Module(), IMAGENET, IMAGENET)
    teacher.model.forward = lambda images: torch.tensor(answers)
    cross_entropy = -(targets * log_softmax(label)).sum(axis=1).mean()
    for alpha, tau in ((0.5, 1.0), (0.2, 3.0), (1.0, 2.0)):
        p, q = log_softmax(answers / tau), log_softmax(distilled / tau)
        expected = {
            "hard": -log_softmax(distilled)[np.arange(6), answers.argmax(axis=1)].mean(),
            "soft": tau**2 * (np.exp(p) * (p - q)).mean(),
        }
        for kind, value in expected.items():
            recipe = Recipe(distillation_type=kind, distillation_alpha=alpha, distillation_tau=tau)
            loss = Objective(recipe, teacher)(images, (tensors[0], tensors[1]), tensors[2])
            assert float(loss) == pytest.approx((1 - alpha) * cross_entropy + alpha * value, rel=1e-6)
    assert float(Objective(Recipe())(images, tensors[0], tensors[2])) == pytest.approx(cross_entropy, rel=1e-9)
    probability = 1 / (1 + np.exp(-label))
    binary = -np.where(targets > 0, np.log(probability), np.log(1 - probability)).mean()
    loss = Objective(Recipe(bce_loss=True, smoothing=0.0))(images, tensors[0], tensors[2])
    assert float(loss) == pytest.approx(binary, rel=1e-9)


def test_teacher_normalises_and_is_never_trained():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten()).double()
    raw, colours = torch.rand(2, 3, 8, 8).double(), ((0.5, 0.5, 0.5), (0.25, 0.5, 1.0))
    expected = model.eval()((raw - 0.5) / torch.tensor(colours[1]).view(3, 1, 1)).detach()
    for student in (IMAGENET, ((0.1, 0.2, 0.3), (0.5, 1.0, 0.2))):
        teacher = Teacher(model, colours, student, (8, 8)).double().train()
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in student)
        answers = teacher((raw - mean) / std)
        torch.testing.assert_close(answers, expected, rtol=1e-6, atol=1e-6)  # mean and deviation are float32
    assert not answers.requires_grad and not model.training
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert teacher(torch.rand(2, 3, 32, 32).double()).shape == answers.shape


def test_learning_from_the_teacher_alone(digits, tmp_path):
    """alpha 1: only the teacher's choices and only the distillation head; the class head stays as it began."""
    teacher = ["--distillation-type", "hard", "--teacher-model", digits / "run", "--distillation-alpha", 1]
    common = ["--model", "deit_tiny_gka_distilled_patch16_224", "--lr", 0.2, "--epochs", 3, "--weight-decay", 0]
    train_digits(tmp_path, *common, *teacher)
    assert accuracy(tmp_path) > 30
    weights = newest(tmp_path)
    assert not weights["head.bias"].any() and weights["head_dist.bias"].abs().max() > 1e-3
    teacher = load_teacher(Recipe(teacher_model=str(digits / "run")), DIGITS)
    assert torch.equal(teacher.model.state_dict()["pos_embed"], newest(digits, "ema")["pos_embed"])
    assert teacher.size == (32, 32)


def test_mistakes_with_teachers_are_one_line(digits, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for settings, classes in (({}, DIGITS), (dict(teacher_model=str(digits / "run")), ["a", "b", "c"])):
        with one_line_error("--teacher-model"):
            load_teacher(Recipe(**settings), classes)
    argv = digit_flags(tmp_path, "--epochs", 1, "--distillation-type", "soft")
    assert "--distillation-type" in tiny.refused(training.main, TrainConfig, *argv)
