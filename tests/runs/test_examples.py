"""The text classifier of runs/examples: it learns, padding changes nothing, a row is not measured again, mistakes."""

import platform
import random

import pandas as pd
import pytest

from runs import frames
from runs.examples import text_classifier, texts
from runs.examples.text_classifier import KIND, TextClassifierConfig
from trainkit_gka import cli

WORDS = {"sea": "wave tide ship salt harbour gull", "wood": "oak moss fern path bark beetle"}


def write(path, count=160):
    """Texts of 1 to 12 words of their label's."""
    draw = random.Random(0)
    rows = [
        {"text": " ".join(draw.choices(words.split(), k=draw.randint(1, 12))) + f" {number}", "label": label}
        for number in range(count // 2)
        for label, words in WORDS.items()
    ]
    pd.DataFrame(rows).to_csv(path, index=False) if path.suffix == ".csv" else pd.DataFrame(rows).to_parquet(path)


def run(*flags):
    cli.run(text_classifier.main, TextClassifierConfig, [str(flag) for flag in flags])


def test_both_kinds_learn_and_padding_changes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(text_classifier, "WIDTH", 32)
    monkeypatch.setattr(text_classifier, "DEPTH", 2)
    path, results = tmp_path / "trees.parquet", tmp_path / "rows.jsonl"
    write(path)
    flags = ["--data", path, "--results", results, "--seeds", 1, "--epochs", 8, "--vocab-size", 300, "--lr", 0.003]
    run(*flags)
    rows = frames.records(results, kind=KIND)
    assert [row["config"]["case"]["attention"] for row in rows] == ["softmax", "gka"]
    for row in rows:
        metrics = row["metrics"]
        assert metrics["accuracy"] == metrics["accuracy_alone"] > 0.9 and row["config"]["guess"] < 0.7
        assert metrics["logits_apart"] < 1e-4 and metrics["seconds_per_epoch"] > 0
    capsys.readouterr()
    run(*flags)
    assert len(frames.records(results, kind=KIND)) == 2
    said = capsys.readouterr().out
    assert "texts to train on" not in said and f"{rows[1]['metrics']['parameters']:,}" in said


def test_docstrings_of_two_pythons_are_not_mixed(tmp_path, monkeypatch, capsys):
    results = tmp_path / "rows.jsonl"
    results.write_text((frames.RESULTS / text_classifier.FILE).read_text())
    monkeypatch.setattr(platform, "python_version", lambda: "3.99.0")
    monkeypatch.setattr(text_classifier.Task, "prepare", lambda config: pytest.fail("it would train"))
    with pytest.raises(SystemExit):
        run("--results", results, "--seeds", 4)
    assert "trainings on the docstrings of Python 3.11.7, this is 3.99.0; give another file" in capsys.readouterr().err


@pytest.mark.slow
def test_the_built_in_texts_are_held_out_once():
    data, again = texts.builtin(), texts.builtin()
    assert data == again and len(data.names) == texts.PACKAGES and "asyncio" in data.names
    assert not set(data.train.texts) & set(data.test.texts)
    assert 0.15 < len(data.test.texts) / len(data.train.texts) < 0.35 and data.test.share() < 0.4


def test_a_text_with_two_labels_is_left_out():
    pairs = [(f"text {number}", str(number % 3)) for number in range(60)] + [("text 0", "1"), ("text 1", "1")]
    data = texts.LabelledTexts.of(pairs, "pairs")
    kept = dict(zip(data.train.texts + data.test.texts, data.train.labels + data.test.labels))
    assert kept == {f"text {number}": number % 3 for number in range(1, 60)}


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("a.csv", "text,stars\nfine,5\n", "needs columns text and label, it has no label but text, stars"),
        ("a.parquet", "no parquet", "cannot be read"),
        ("a.csv", "", "there is no such file"),
    ],
)
def test_a_mistake_in_the_data_is_one_line(name, content, words, tmp_path, capsys):
    if content:
        (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit) as left:
        run("--data", tmp_path / name, "--results", tmp_path / "rows.jsonl")
    said = capsys.readouterr().err
    assert left.value.code == 2 and words in said and said.count("\n") == 1
