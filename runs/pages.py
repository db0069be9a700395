"""Tables of Markdown pages that programs write: a table stands between `<!-- table:NAME -->` and `<!-- /table -->`.

Each program writes the tables whose names it has, and leaves the others alone.
"""

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from runs.table import NOT_RUN, Table
from trainkit_gka.cli import UserError

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"<!-- table:(\S+) -->\n.*?<!-- /table -->", re.DOTALL)
Builders = dict[str, Callable[[], list[Table]]]


def render(text: str, tables: Builders) -> str:
    """The page's text with the tables of these names in their blocks."""

    def fill(block: re.Match[str]) -> str:
        name = block[1]
        if name not in tables:
            return block[0]
        content = "\n\n".join(table.markdown() for table in tables[name]()) or NOT_RUN
        return f"<!-- table:{name} -->\n{content}\n<!-- /table -->"

    return BLOCK.sub(fill, text)


def write(tables: Builders, pages: Iterable[str], command: str, check: bool) -> None:
    """Bring the tables of the pages, given by their paths in the repository, up to date.

    check: write nothing, and exit with 1 if a page is out of date. command: brings the pages up to date. Raises
    UserError if no page has a block for one of the tables.
    """
    texts = {page: (ROOT / page).read_text() for page in pages}
    blocks = {name for text in texts.values() for name in BLOCK.findall(text)}
    if missing := tables.keys() - blocks:
        raise UserError(f"no page has a block for the table {', '.join(sorted(missing))}")
    update({page: render(text, tables) for page, text in texts.items()}, command, check)


def update(pages: dict[str, str], command: str, check: bool) -> None:
    """Write the pages (path in the repository -> text) that differ; with `check` name them and exit with 1."""
    stale = [page for page, text in pages.items() if (ROOT / page).read_text() != text]
    for page in stale:
        if check:
            print(f"{page} is out of date: run {command}", file=sys.stderr)
        else:
            (ROOT / page).write_text(pages[page])
            print(f"{page}: written")
    if check and stale:
        sys.exit(1)
