"""The index of runs/log, newest first: a row for each dated entry of a kind, with the first sentence of its verdict."""

import re
from pathlib import Path

from runs.table import Row, Table
from trainkit_gka.cli import UserError

FOLDER = Path(__file__).resolve().parents[1] / "log"
NAME = re.compile(r"(?P<date>\d{4}-\d{2}-\d{2})-[a-z0-9-]+\.md")
PARTS = ("Question", "Prediction", "Outcome", "Verdict")
HEAD = rf"^\*\*({'|'.join(PARTS)})\.\*\*"
TITLE = re.compile(r"# (?P<title>.+)\n\n\*(?P<kind>Research finding|Engineering note)\.\*\n")
SENTENCE = re.compile(r".+?[.?!](?=\s|$)")


def research(folder: Path = FOLDER) -> list[Table]:
    """What was learned about models and methods. Raises UserError for a file that is no entry of either kind."""
    return entries("Research finding", folder)


def engineering(folder: Path = FOLDER) -> list[Table]:
    """What was learned about the code. Raises UserError for a file that is no entry of either kind."""
    return entries("Engineering note", folder)


def entries(kind: str, folder: Path) -> list[Table]:
    paths = sorted((path for path in folder.glob("*.md") if path.name != "README.md"), reverse=True)
    rows = [row for own, row in map(entry, paths) if own == kind]
    return [Table.of(["date", kind.lower(), "verdict"], rows, words=3)]


def entry(path: Path) -> tuple[str, Row]:
    """Its kind; date, linked title and verdict in one sentence."""
    named, text = NAME.fullmatch(path.name), path.read_text()
    head, parts = TITLE.match(text), re.split(HEAD, text, flags=re.MULTILINE)[1:]
    verdict = SENTENCE.match(" ".join(parts[-1].split())) if parts else None
    written = parts[::2]
    if not (named and head and verdict and written in ([*PARTS], [name for name in PARTS if name != "Prediction"])):
        raise UserError(
            f"{path} is not an entry of the log: name it YYYY-MM-DD-short-title.md, and write a title, a line "
            "*Research finding.* or *Engineering note.*, and paragraphs that open with **Question.**, **Prediction.** "
            "(if one was made), **Outcome.** and **Verdict.**"
        )
    return head["kind"], [named["date"], f"[{head['title']}]({path.name})", verdict[0]]
