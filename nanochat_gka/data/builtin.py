"""The built-in corpus: CPython's own documentation, which needs no network."""

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from nanochat_gka.data.corpora import split_by_checksum, write_documents
from trainkit_gka.files import atomic

VAL_FRACTION = 16  # one text in 16 is held out
MIN_PARAGRAPH = 40  # characters
DOCUMENT_CHARS = 400  # keeps cropping near a tenth at T = 256
STATEMENTS_IN = ("body", "handlers", "orelse", "finalbody", "cases")  # fields of statements, in their order
EXCLUDED = {"test", "tests", "idlelib", "site-packages", "lib2to3", "__pycache__", "pydoc_data"}


def write(folder: Path) -> None:
    """Write two parquet files, training and validation. Whole texts are dealt by hash, so that no text is in both."""
    documents = ((split_by_checksum(text, VAL_FRACTION), document) for text in read_texts() for document in _cut(text))
    with atomic(folder / "shard_00000.parquet") as train, atomic(folder / "shard_00001.parquet") as val:
        for split, counts in write_documents(documents, {"train": train, "val": val}).items():
            print(f"{split}: {counts['documents']:,} documents, {counts['chars']:,} characters")


def read_texts() -> list[str]:
    """The language reference (pydoc_data.topics, a text per topic), then the library's docstrings (a text per module).

    The order is fixed. A paragraph appears once: the reference repeats whole sections under several topics.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    texts = [_new_paragraphs(topics[name], seen) for name in sorted(topics)]
    texts += (_new_paragraphs("\n\n".join(docstrings(path)), seen) for path in library_files())
    return [text for text in texts if text]


def library_files() -> Iterator[Path]:
    """The modules of Python's own library, in the order of their paths, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if EXCLUDED.isdisjoint(path.relative_to(root).parts):
            yield path


def _new_paragraphs(text: str, seen: set[str]) -> str:
    paragraphs = []
    for paragraph in text.split("\n\n"):
        key = " ".join(paragraph.split())
        if len(key) >= MIN_PARAGRAPH and key not in seen:
            seen.add(key)
            paragraphs.append(paragraph.rstrip())
    return "\n\n".join(paragraphs)


def docstrings(path: Path) -> Iterator[str]:
    """Of the module, its classes and functions, "" for those without; none of a file that is not Python of today."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return
    nodes: list[ast.AST] = [tree]
    for node in nodes:  # in the order of ast.walk, without the expressions, which are most nodes
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""
        for field in STATEMENTS_IN:
            nodes += getattr(node, field, ())


def _cut(text: str) -> Iterator[str]:
    """`text` cut at paragraphs into documents of about DOCUMENT_CHARS: short rows would crop most of a long one."""
    document = ""
    for paragraph in text.split("\n\n"):
        if document and len(document) + len(paragraph) > DOCUMENT_CHARS:
            yield document
            document = ""
        document += ("\n\n" if document else "") + paragraph
    yield document
