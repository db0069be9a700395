"""The index of runs/log: a row for each dated finding, newest first, with the first sentence of its verdict."""

import re
from pathlib import Path

from runs.table import Row, Table
from trainkit_gka.cli import UserError

FOLDER = Path(__file__).resolve().parents[1] / "log"
NAME = re.compile(r"(?P<date>\d{4}-\d{2}-\d{2})-[a-z0-9-]+\.md")
PARTS = ("Question", "Prediction", "Outcome", "Verdict")
HEAD = rf"^\*\*({'|'.join(PARTS)})\.\*\*"
SENTENCE = re.compile(r".+?[.?!](?=\s|$)")


def findings(folder: Path = FOLDER) -> list[Table]:
    """Raises UserError for a file that is not a finding."""
    paths = sorted((path for path in folder.glob("*.md") if path.name != "README.md"), reverse=True)
    return [Table.of(["date", "finding", "verdict"], [row(path) for path in paths], words=3)]


def row(path: Path) -> Row:
    """Date, linked title and verdict in one sentence."""
    named, text = NAME.fullmatch(path.name), path.read_text()
    title, parts = re.match(r"# (.+)\n", text), re.split(HEAD, text, flags=re.MULTILINE)[1:]
    verdict = SENTENCE.match(" ".join(parts[-1].split())) if parts else None
    written = parts[::2]
    if not (named and title and verdict and written in ([*PARTS], [name for name in PARTS if name != "Prediction"])):
        raise UserError(
            f"{path} is not a finding: name it YYYY-MM-DD-short-title.md, and write a title and paragraphs that open "
            "with **Question.**, **Prediction.** (if one was made), **Outcome.** and **Verdict.**"
        )
    return [named["date"], f"[{title[1]}]({path.name})", verdict[0]]
