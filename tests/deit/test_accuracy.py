"""Evaluation counts every image once, on any number of processes."""

import math

import pytest
import torch
from torch import nn

from deit_gka.data.images import Batch
from deit_gka.training.engine import evaluate
from tiny_images import CPU, runtime
from trainkit_gka.distributed import Runtime


class Table(nn.Module):
    """Image i, a constant of i, has row i of a table of logits."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.tensor(logits)

    def forward(self, images):
        return self.logits[images[:, 0, 0, 0].long()]


class Everyone(Runtime):
    """Ranks one after another; the last has the sum."""

    total: torch.Tensor | None = None

    def sum(self, tensor):
        Everyone.total = tensor if self.rank == 0 else Everyone.total + tensor
        return Everyone.total


def constants(labels, numbers):
    images = torch.tensor(numbers, dtype=torch.float32)[:, None, None, None].expand(-1, 3, 2, 2)
    return Batch(images, torch.tensor([labels[number] for number in numbers], dtype=torch.long), [], 0.0)


def test_accuracy_is_right():
    logits = [
        [9.0, 5, 4, 3, 2, 1, 0],
        [0.0, 1, 2, 3, 4, 5, 6],
        [6.0, 5, 4, 3, 2, 1, 0],
        [0.0, 0, 0, 0, 0, 0, 50],
        [6.0, 5, 4, 3, 2, 1, 0],
    ]
    labels = [0, 2, 5, 6, 4]  # right at once; fifth; sixth; right at once; fifth
    loss = sum(math.log(sum(math.exp(value) for value in row)) - row[label] for row, label in zip(logits, labels)) / 5
    expected = {"top1": 40.0, "top5": 80.0, "loss": pytest.approx(loss, rel=1e-6), "images": 5, "broken": 0}
    models, advanced = {"": Table(logits).train(), "turned": Table([row[::-1] for row in logits])}, []
    for split in ([[0, 1, 2, 3, 4]], [[0], [1, 2], [3, 4]], [[4, 3, 2], [1, 0]]):
        found = evaluate(models, [constants(labels, numbers) for numbers in split], runtime(), advance=advanced.append)
        assert found[""] == expected and found["turned"]["top1"] == 0.0 and found["turned"]["images"] == 5
    assert not models[""].training and sum(len(batch.labels) for batch in advanced) == 15
    for rank, numbers in enumerate([[0, 3], [1, 4], [2], []]):
        values = evaluate(models, [constants(labels, numbers)] if numbers else [], Everyone(rank, 4, CPU))
    assert values[""] == expected


def test_top5_of_three_classes_is_100():
    values = evaluate({"": Table([[0.0, 1.0, 2.0]] * 3)}, [constants([0, 1, 2], [0, 1, 2])], runtime())[""]
    assert values["top1"] == pytest.approx(100 / 3) and values["top5"] == 100.0
