"""The text classifier of runs/examples: it learns, padding changes nothing, a row is not measured again, mistakes."""

import platform
import random

import pandas as pd
import pytest

from runs import frames
from runs.examples import text_classifier
from runs.examples.text_classifier import KIND, TextClassifierConfig, split
from trainkit_gka import cli

WORDS = {"sea": "wave tide ship salt harbour gull", "wood": "oak moss fern path bark beetle"}


def run(*flags):
    cli.run(text_classifier.main, TextClassifierConfig, [str(flag) for flag in flags])


def test_all_forms_learn_and_padding_changes_nothing(tmp_path, monkeypatch, capsys):
    """Texts of 1 to 12 words of their label's."""
    for name, value in (("WIDTH", 32), ("DEPTH", 2)):
        monkeypatch.setattr(text_classifier, name, value)
    monkeypatch.setitem(text_classifier.TRAINING, "vocab_size", 300)
    monkeypatch.setitem(text_classifier.TRAINING, "lr", 0.003)
    path, results, draw = tmp_path / "trees.parquet", tmp_path / "rows.jsonl", random.Random(0)
    texts = [
        {"text": " ".join(draw.choices(words.split(), k=draw.randint(1, 12))) + f" {number}", "label": label}
        for number in range(80)
        for label, words in WORDS.items()
    ]
    pd.DataFrame(texts).to_parquet(path)
    flags = ["--data", path, "--results", results, "--seeds", 1, "--epochs", 8]
    run(*flags)
    rows = frames.records(results, kind=KIND)
    assert [row["config"]["case"]["attention"] for row in rows] == list(text_classifier.FORMS)
    for row in rows:
        metrics = row["metrics"]
        assert metrics["accuracy"] == metrics["accuracy_alone"] > 0.9 and row["config"]["guess"] < 0.7
        assert metrics["logits_apart"] < 1e-4 and metrics["seconds_per_epoch"] > 0
    capsys.readouterr()
    run(*flags)
    assert len(frames.records(results, kind=KIND)) == len(rows)
    output = capsys.readouterr().out
    assert "texts to train on" not in output and f"{rows[1]['metrics']['parameters']:,}" in output


@pytest.mark.slow
def test_the_built_in_texts_are_held_out_once():
    names, train, test = data = split(text_classifier.labelled_texts(None))
    assert data == split(text_classifier.labelled_texts(None))
    assert len(names) == text_classifier.PACKAGES and "asyncio" in names
    assert not set(train[0]) & set(test[0]) and 0.15 < len(test[0]) / len(train[0]) < 0.35


def test_a_text_with_two_labels_is_left_out():
    pairs = [(f"text {number}", str(number % 3)) for number in range(60)] + [("text 0", "1"), ("text 1", "1")]
    _, train, test = split(pairs)
    labels = dict(zip(train[0] + test[0], train[1] + test[1]))
    assert labels == {f"text {number}": number % 3 for number in range(1, 60)}


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("a.csv", "text,stars\nfine,5\n", "columns text and label (\"['label'] not in index"),
        ("a.csv", "text,label\nfine,5\n", "at least two labels are needed"),
        ("a.parquet", "no parquet", "a.parquet cannot be read as"),
        ("a.csv", "", "there is no such file"),
        ("", "", "trainings on the docstrings of Python 3.11.7, this is 3.99.0; give another file"),
    ],
)
def test_a_mistake_in_the_data_is_one_line(name, content, words, tmp_path, monkeypatch, capsys):
    results = tmp_path / "rows.jsonl"
    results.write_text((frames.RESULTS / text_classifier.FILE).read_text())
    monkeypatch.setattr(platform, "python_version", lambda: "3.99.0")
    if content:
        (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit) as stopped:
        run("--results", results, "--seeds", 9, *(["--data", tmp_path / name] if name else []))
    output = capsys.readouterr().err
    assert stopped.value.code == 2 and words in output and output.count("\n") == 1
