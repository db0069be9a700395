"""Train transformers' BERT from scratch to classify texts in padded batches: softmax attention beside forms of GKA.

    python -m runs.examples.text_classifier                        docstrings of Python's library, five seeds
    python -m runs.examples.text_classifier --data news.parquet    your texts: columns text and label, .parquet or .csv
    python -m runs.examples.text_classifier --kinds gka-text --seeds 1 --epochs 2

The only line that is not transformers' own is `use_gka(model, preset="text")`. Texts are cut into tokens by a
byte-level BPE that is trained on the training texts. A training that is in the results is not repeated.
"""

import hashlib
import platform
import statistics
import sysconfig
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pyarrow as pa
import torch
from torch.nn.utils.rnn import pad_sequence

from gka.huggingface import use_gka
from nanochat_gka.data.builtin import MIN_PARAGRAPH, docstrings, library_files
from nanochat_gka.data.corpora import checksum
from nanochat_gka.data.tokenizer import Tokenizer
from runs import frames
from runs.table import Table
from trainkit_gka import cli, extras
from trainkit_gka.cli import Count, UserError, check_bounds, reason_of
from trainkit_gka.distributed import running
from trainkit_gka.progress import console, progress_bar
from trainkit_gka.results import append_result

KIND = "example-text-classifier"
FILE = "example_text_classifier.jsonl"
Form = Literal["softmax", "gka", "gka-offsets", "gka-text"]
# What the tables call a form, and the arguments of `use_gka`.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", {}),
    "gka": ("GKA, the paper's form", {}),
    "gka-offsets": ("GKA with head offsets", dict(preset="text", channel_bandwidths=False, head_gates=False)),
    "gka-text": ("GKA, the preset for text", dict(preset="text")),
}
Case = dict[str, Any]  # what decides a training
WIDTH, DEPTH, HEADS = 128, 4, 4
# Texts of a batch, which is padded to its longest; longer texts are cut. AdamW's rate falls to 0 after a warm-up.
TRAINING = {"batch_size": 16, "max_tokens": 128, "vocab_size": 2048, "lr": 1e-3}
PACKAGES = 12  # of Python's library, those with the most docstrings
HELD_OUT = 5  # one text in so many
READERS = {".parquet": pd.read_parquet, ".csv": pd.read_csv}
POOL = 8  # batches that are drawn together and dealt by length, as by transformers' `group_by_length`
DROPOUT, WARMUP, WEIGHT_DECAY = 0.1, 0.1, 0.01  # of the hidden layers; share of the updates; AdamW's


@dataclass
class TextClassifierConfig:
    """Train a small BERT to classify texts in padded batches, with softmax attention and with forms of GKA.

    A training that is in the results is not repeated.
    """

    data: Path | None = None
    """A .parquet or .csv file with columns text and label; none takes the docstrings of Python's library by package."""
    kinds: list[Form] = field(default_factory=lambda: list(FORMS))
    """The kinds of attention: softmax, the paper's form, with head offsets, and the preset for text."""
    seeds: Count = 5
    """Trainings of each kind, which differ in initial weights and in the order of texts."""
    epochs: Count = 12
    """Times that a training reads the training texts."""
    results: Path = frames.RESULTS / FILE
    """The file of JSON lines that a training appends to."""


def labelled_texts(data: Path | None) -> list[tuple[str, str]]:
    """Texts and their labels: of a file, or the docstrings of Python's library with the package that each is from.

    The packages are those with the most docstrings whose names are public. A docstring stays as it is, with its white
    space and the names of packages that it mentions. Raises UserError for a file without columns text and label.
    """
    if data is None:
        root, pairs = Path(sysconfig.get_paths()["stdlib"]), []
        for path in library_files():
            package = path.relative_to(root).parts[0].removesuffix(".py")
            if not package.startswith("_"):
                pairs += [(text, package) for text in docstrings(path) if len(text) >= MIN_PARAGRAPH]
        counts = Counter(package for _, package in dict.fromkeys(pairs))
        chosen = {package for package, _ in counts.most_common(PACKAGES)}
        return [(text, package) for text, package in pairs if package in chosen]
    try:
        frame = READERS[data.suffix](data)[["text", "label"]].dropna()
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        needed = f"a file of {' or '.join(READERS)} with columns text and label"
        raise UserError(f"{data} cannot be read as {needed} ({reason_of(error)})") from None
    return list(zip(frame.text.astype(str), frame.label.astype(str)))


Split = tuple[list[str], list[int]]  # texts, and the number of each one's label


def split(pairs: list[tuple[str, str]]) -> tuple[list[str], Split, Split]:
    """Names of the labels, texts to train on, and a fifth that is held out by checksum, whatever the seed.

    A text counts once; one that has several labels is left out. Raises UserError if there are fewer than two labels, or
    if one has no text on either side.
    """
    labels_of: dict[str, set[str]] = {}
    for text, label in pairs:
        labels_of.setdefault(text.strip(), set()).add(label)
    label_of_text = {text: labels.pop() for text, labels in labels_of.items() if text and len(labels) == 1}
    names = sorted(set(label_of_text.values()))
    train, test = sides = ([], []), ([], [])
    for text, label in label_of_text.items():
        digest = hashlib.sha256(text.encode(errors="replace")).digest()
        texts, labels = sides[int.from_bytes(digest[:4], "big") % HELD_OUT == 0]
        texts.append(text)
        labels.append(names.index(label))
    if len(names) < 2 or set(train[1]) != set(range(len(names))) or not test[0]:
        raise UserError("--data: at least two labels are needed, with several different texts each")
    return names, train, test


@dataclass(frozen=True)
class Examples:
    """ids: int64, a tensor (T,) for each text; labels: (N,). No token has padding_id."""

    ids: list[torch.Tensor]
    labels: torch.Tensor
    padding_id: int

    def shuffled(self, size: int, generator: torch.Generator) -> list[torch.Tensor]:
        """Indices of an epoch's batches: the texts of a batch are about equally long, the batches in random order."""
        batches: list[torch.Tensor] = []
        for pool in torch.randperm(len(self.ids), generator=generator).split(POOL * size):
            by_length = pool[torch.tensor([len(self.ids[index]) for index in pool]).argsort(stable=True)]
            batches += by_length.split(size)
        return [batches[number] for number in torch.randperm(len(batches), generator=generator)]

    def batches(self, indices: Iterable[torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        """BERT's arguments: input_ids and attention_mask (B, T), 1 where there is a token; labels (B,)."""
        for batch in indices:
            ids = pad_sequence([self.ids[index] for index in batch], batch_first=True, padding_value=self.padding_id)
            yield {"input_ids": ids, "attention_mask": (ids != self.padding_id).long(), "labels": self.labels[batch]}


@dataclass(frozen=True)
class Task:
    """The data in tokens. Texts start with the tokenizer's BOS, from which BERT classifies."""

    names: list[str]
    train: Examples
    test: Examples
    settings: dict[str, Any]  # facts of a row that do not decide which training it is

    @classmethod
    def prepare(cls, config: TextClassifierConfig) -> "Task":
        names, train, test = split(labelled_texts(config.data))
        tokenizer = Tokenizer.train(train[0], TRAINING["vocab_size"])

        def encode(texts: list[str], labels: list[int]) -> Examples:
            rows = (tokenizer.encode_document(text)[: TRAINING["max_tokens"]].astype("int64") for text in texts)
            return Examples(list(map(torch.from_numpy, rows)), torch.tensor(labels), tokenizer.vocab_size)

        examples, held_out = encode(*train), encode(*test)
        settings = {"width": WIDTH, "depth": DEPTH, "heads": HEADS, "dropout": DROPOUT, "weight_decay": WEIGHT_DECAY}
        settings |= {"labels": names, "train": len(examples.ids), "test": len(held_out.ids)}
        settings["guess"] = max(Counter(test[1]).values()) / len(test[1])  # accuracy of the most frequent label
        settings["median_tokens"] = torch.tensor([len(row) for row in examples.ids]).median().item()
        return cls(names, examples, held_out, {**settings, "python": platform.python_version()})


def build(kind: Form, task: Task, max_tokens: int) -> torch.nn.Module:
    """transformers' BERT, with GKA of that form in every layer unless `kind` is softmax."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=task.test.padding_id + 1, pad_token_id=task.test.padding_id, max_position_embeddings=max_tokens,
        hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=HEADS, intermediate_size=4 * WIDTH,
        hidden_dropout_prob=DROPOUT, attention_probs_dropout_prob=0.0, num_labels=len(task.names),
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    return model if kind == "softmax" else use_gka(model, **FORMS[kind][1])


def train(case: Case, task: Task) -> dict[str, Any]:
    """Train a model from scratch. Returns its accuracy on held-out texts in padded batches and one by one, and the
    largest difference of logits between both, relative to the largest logit; seconds are of training alone.
    """
    size, epochs = case["batch_size"], case["epochs"]
    with running("cpu", case["seed"]):
        model = build(case["attention"], task, case["max_tokens"])
        optimizer = torch.optim.AdamW(model.parameters(), case["lr"], weight_decay=WEIGHT_DECAY)
        updates = epochs * len(task.train.shuffled(size, torch.Generator()))
        warmup = max(1, round(WARMUP * updates))
        rate = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda n: min((n + 1) / warmup, (updates - n) / (updates - warmup + 1))
        )
        generator, seconds = torch.Generator().manual_seed(case["seed"]), []
        with progress_bar() as bar:
            bar_task = bar.add_task(f"{case['attention']}, seed {case['seed']}", total=updates, status="")
            for _ in range(epochs):
                model.train()
                begun = time.perf_counter()
                for batch in task.train.batches(task.train.shuffled(size, generator)):
                    loss = model(**batch).loss
                    loss.backward()
                    optimizer.step()
                    rate.step()
                    optimizer.zero_grad()
                    bar.update(bar_task, advance=1, status=f"loss {loss.item():.3f}")
                seconds.append(time.perf_counter() - begun)
        padded, alone = (predict(model, task, batch) for batch in (size, 1))
        right = [(logits.argmax(-1) == task.test.labels).double().mean().item() for logits in (padded, alone)]
        return {
            "parameters": sum(p.numel() for p in model.parameters()),
            "accuracy": right[0],
            "accuracy_alone": right[1],
            "logits_apart": ((padded - alone).abs().max() / alone.abs().max()).item(),
            "seconds_per_epoch": statistics.median(seconds),
        }


@torch.no_grad()
def predict(model: torch.nn.Module, task: Task, size: int) -> torch.Tensor:
    """Logits (N, labels) of the held-out texts in batches of `size`, in their order."""
    model.eval()
    batches = task.test.batches(torch.arange(len(task.test.ids)).split(size))
    return torch.cat([model(**batch).logits for batch in batches])


def cases_of(config: TextClassifierConfig) -> list[Case]:
    """A case for every seed and kind."""
    data = f"{config.data.name} {checksum(config.data)}" if config.data else "builtin"
    same = {"epochs": config.epochs, **TRAINING, "data": data}
    return [{"attention": kind, "seed": seed, **same} for seed in range(config.seeds) for kind in config.kinds]


def table(records: list[dict[str, Any]], sources: Iterable[str] = ()) -> Table:
    """A row for each kind of attention: the mean over seeds and half the range."""
    frame = pd.DataFrame([record["config"]["case"] | record["metrics"] for record in records])
    rows = []
    for kind, runs in frame.groupby("attention", sort=False) if records else ():

        def spread(name: str, runs: pd.DataFrame = runs) -> str:
            values = 100 * runs[name]
            return f"{values.mean():.2f} ±{(values.max() - values.min()) / 2:.2f}"

        accuracies = [spread(name) for name in ("accuracy", "accuracy_alone")]
        cells = [f"{runs.parameters.iloc[0]:,}", f"{len(runs)}", *accuracies, f"{runs.logits_apart.max():.0e}"]
        rows.append([f"**{FORMS[kind][0]}**", *cells])
    headings = ["", "parameters", "seeds", "accuracy %", "one by one %", "logits apart"]
    return Table.of(headings, rows, sources=list(sources))


def records_of(path: Path, config: TextClassifierConfig) -> list[dict[str, Any]]:
    """The finished trainings that these settings ask for, in the order of the file."""
    cases = cases_of(config)
    return [row for row in frames.records(path, "accuracy", kind=KIND) if row["config"]["case"] in cases]


def main(config: TextClassifierConfig) -> None:
    check_bounds(config)
    if config.data and not config.data.is_file():
        raise UserError(f"--data {config.data}: there is no such file")
    if reason := extras.missing("hf", "transformers"):
        raise UserError(reason)
    rows = records_of(config.results, config)
    trained = [row["config"]["case"] for row in rows]
    if missing := [case for case in cases_of(config) if case not in trained]:
        others = {row["config"]["python"] for row in rows if not config.data} - {platform.python_version()}
        if others:  # whose docstrings differ
            has = f"{config.results} has trainings on the docstrings of Python {', '.join(sorted(others))}"
            raise UserError(f"{has}, this is {platform.python_version()}; give another file with --results")
        task = Task.prepare(config)
        about = f"{len(task.train.ids):,} texts to train on, {len(task.test.ids):,} held out, {len(task.names)} labels"
        console.print(
            f"{about} ({', '.join(task.names)}); always the commonest: {task.settings['guess']:.1%}", highlight=False
        )
        for case in missing:
            numbers = train(case, task)
            append_result(config.results, KIND, {**task.settings, "case": case}, numbers, torch.device("cpu"))
    table(records_of(config.results, config)).show()


if __name__ == "__main__":
    cli.run(main, TextClassifierConfig)
