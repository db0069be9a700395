"""Tables of Markdown pages that programs write: a table stands between `<!-- table:NAME -->` and `<!-- /table -->`.

Each program writes the tables whose names it has, and leaves the others alone. The study's blocks begin with `study:`.
"""

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from runs.table import NOT_RUN, Table
from trainkit_gka.cli import UserError

ROOT = Path(__file__).resolve().parents[1]
Builders = dict[str, Callable[[], list[Table]]]


def block(mark: str = "table") -> re.Pattern[str]:
    """A block of a page; its group is the name."""
    return re.compile(rf"<!-- {mark}:(\S+) -->\n.*?<!-- /{mark} -->", re.DOTALL)


def render(text: str, tables: Builders, mark: str = "table") -> str:
    """The page's text with the tables of these names in their blocks."""

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        if name not in tables:
            return match[0]
        content = "\n\n".join(table.markdown() for table in tables[name]()) or NOT_RUN
        return f"<!-- {mark}:{name} -->\n{content}\n<!-- /{mark} -->"

    return block(mark).sub(fill, text)


def write(tables: Builders, pages: Iterable[str], command: str, check: bool, mark: str = "table") -> None:
    """Bring the tables of the pages, given by their paths in the repository, up to date.

    check: write nothing, and exit with 1 if a page is out of date. command: brings the pages up to date. Raises
    UserError if no page has a block for one of the tables.
    """
    texts = {page: (ROOT / page).read_text(encoding="utf-8") for page in pages}
    blocks = {name for text in texts.values() for name in block(mark).findall(text)}
    if missing := tables.keys() - blocks:
        raise UserError(f"no page has a block for the table {', '.join(sorted(missing))}")
    stale = {page: new for page, text in texts.items() if (new := render(text, tables, mark)) != text}
    for page, text in stale.items():
        if check:
            print(f"{page} is out of date: run {command}", file=sys.stderr)
        else:
            (ROOT / page).write_text(text, encoding="utf-8")
            print(f"{page}: written")
    if check and stale:
        sys.exit(1)
