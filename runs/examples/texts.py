"""Texts with labels: the docstrings of Python's own library by package, or a file with the columns text and label.

A fifth is held out, by the checksum of the text, so that every seed and every kind of attention reads the same.
"""

import hashlib
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pyarrow as pa

from nanochat_gka.data.builtin import MIN_PARAGRAPH, docstrings, library_files
from trainkit_gka.cli import UserError, reason_of

PACKAGES = 12  # of the library, those with the most docstrings
HELD_OUT = 5  # one text in so many
READERS = {".parquet": pd.read_parquet, ".csv": pd.read_csv}


@dataclass(frozen=True)
class Split:
    """Texts and the number of each one's label."""

    texts: list[str]
    labels: list[int]

    def share(self) -> float:
        """Of the most frequent label: the accuracy of a guess that never looks."""
        return max(Counter(self.labels).values()) / len(self.labels)


@dataclass(frozen=True)
class LabelledTexts:
    """names: of the labels."""

    names: list[str]
    train: Split
    test: Split

    @classmethod
    def of(cls, pairs: list[tuple[str, str]], source: str) -> "LabelledTexts":
        """From texts and their labels. A text counts once; one that has several labels is left out.

        Raises UserError if there are fewer than two labels, or if one has no text on either side.
        """
        labels_of: dict[str, set[str]] = {}
        for text, label in pairs:
            labels_of.setdefault(text.strip(), set()).add(label)
        label_of_text = {text: labels.pop() for text, labels in labels_of.items() if text and len(labels) == 1}
        names = sorted(set(label_of_text.values()))
        sides: tuple[list[str], list[str]] = ([], [])
        for text in label_of_text:
            digest = hashlib.sha256(text.encode(errors="replace")).digest()
            sides[int.from_bytes(digest[:4], "big") % HELD_OUT == 0].append(text)
        train, test = (Split(texts, [names.index(label_of_text[text]) for text in texts]) for texts in sides)
        if len(names) < 2 or set(train.labels) != set(range(len(names))) or not test.texts:
            raise UserError(f"{source}: at least two labels are needed, with several different texts each")
        return cls(names, train, test)


def builtin() -> LabelledTexts:
    """Docstrings of Python's library; the label is the package or module that one is from.

    The packages are those with the most docstrings whose names are public. A docstring stays as it is, with its white
    space and the names of packages that it mentions.
    """
    root, pairs = Path(sysconfig.get_paths()["stdlib"]), []
    for path in library_files():
        package = path.relative_to(root).parts[0].removesuffix(".py")
        if not package.startswith("_"):
            pairs += [(text, package) for text in docstrings(path) if len(text) >= MIN_PARAGRAPH]
    counts = Counter(package for _, package in dict.fromkeys(pairs))
    chosen = {package for package, _ in counts.most_common(PACKAGES)}
    return LabelledTexts.of([(text, package) for text, package in pairs if package in chosen], "Python's library")


def read(path: Path) -> LabelledTexts:
    """A file's texts. Raises UserError, in one line, for a file that has no columns text and label."""
    if path.suffix not in READERS:
        raise UserError(f"--data takes a file of {' or '.join(READERS)}, got {path}")
    try:
        frame = READERS[path.suffix](path)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{path} cannot be read ({reason_of(error)})") from None
    if missing := {"text", "label"} - set(frame.columns):
        has = ", ".join(map(str, frame.columns))
        raise UserError(f"{path} needs columns text and label, it has no {', '.join(sorted(missing))} but {has}")
    frame = frame[["text", "label"]].dropna()
    return LabelledTexts.of(list(zip(frame.text.astype(str), frame.label.astype(str))), str(path))
