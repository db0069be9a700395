"""The text classifier of runs/examples: it learns, padding changes nothing, a row is not measured again, mistakes."""

import platform
import random

import pandas as pd

import tiny
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


def test_a_text_with_two_labels_is_left_out():
    pairs = [(f"text {number}", str(number % 3)) for number in range(60)] + [("text 0", "1"), ("text 1", "1")]
    _, train, test = split(pairs)
    labels = dict(zip(train[0] + test[0], train[1] + test[1]))
    assert labels == {f"text {number}": number % 3 for number in range(1, 60)}


def test_rows_of_another_python_and_a_file_without_labels_are_one_line(tmp_path, monkeypatch):
    results, data = tmp_path / "rows.jsonl", tmp_path / "a.csv"
    results.write_text((frames.RESULTS / text_classifier.FILE).read_text())
    data.write_text("text,stars\nfine,5\n")
    monkeypatch.setattr(platform, "python_version", lambda: "3.99.0")
    flags = ["--results", results, "--seeds", 9]
    assert "Python 3.11.7, this is 3.99.0" in tiny.refused(text_classifier.main, TextClassifierConfig, *flags)
    refused = tiny.refused(text_classifier.main, TextClassifierConfig, *flags, "--data", data)
    assert "columns text and label" in refused
