"""Write the measured tables of the READMEs from the result files, so that no number is typed by hand.

python -m runs.tables            rewrite the pages
python -m runs.tables --check    exit with 1 if a page is not what the result files say
"""

import argparse
import re
import sys
from pathlib import Path

from gka.runtime.progress import read_lines
from runs import operator_error
from runs.demo_report import COLUMNS, PAPER

ROOT = Path(__file__).resolve().parents[1]
DEMO_RESULTS = ROOT / "runs" / "results" / "demo.jsonl"


def demo_table() -> str:
    """The last demo's three models, measured; then the paper's two, as printed."""
    records = {record["label"]: record for record in read_lines(DEMO_RESULTS)}
    lines = [f"| | {' | '.join(heading for heading, _ in COLUMNS.values())} |", "|---|" + "---:|" * len(COLUMNS)]
    for label, record in records.items():
        lines.append(f"| **{label}** | {' | '.join(form.format(record['metrics'][key]) for key, (_, form) in COLUMNS.items())} |")
    for label, row in PAPER.items():
        lines.append(f"| *paper, depth 20: {label}* | {' | '.join(f'*{row[key]}*' if key in row else '' for key in COLUMNS)} |")
    last = next(reversed(records.values()))
    lines.append(
        f"\nMeasured {last['date'][:10]} at commit {last['commit']} on {last['hardware']}, torch {last['torch']} (`runs/results/demo.jsonl`)."
    )
    return "\n".join(lines)


def errors_table() -> str:
    """Errors of every operator route."""
    return operator_error.markdown([record["metrics"] for record in read_lines(operator_error.RESULTS)])


PAGES = {"README.md": {"demo": demo_table}, "gka/README.md": {"errors": errors_table}}


def render(page: str, text: str) -> str:
    """`text` with every `<!-- table:NAME -->` ... `<!-- /table -->` block of the page filled."""
    for name, table in PAGES[page].items():
        block = f"<!-- table:{name} -->\n{table()}\n<!-- /table -->"
        text, count = re.subn(rf"<!-- table:{name} -->.*?<!-- /table -->", lambda _, block=block: block, text, flags=re.DOTALL)
        if count != 1:
            sys.exit(f"error: {page} needs one block <!-- table:{name} --> ... <!-- /table -->, it has {count}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="do not write; exit with 1 if a page is out of date")
    config = parser.parse_args()
    for page in PAGES:
        text = (ROOT / page).read_text()
        rendered = render(page, text)
        if config.check and text != rendered:
            sys.exit(f"{page} is out of date: run python -m runs.tables")
        (ROOT / page).write_text(rendered)


if __name__ == "__main__":
    main()
