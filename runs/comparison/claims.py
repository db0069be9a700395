"""The ledger of the paper's claims: what would support each, what was measured, and the verdict.

    python -m runs.comparison.claims                     writes runs/comparison/CLAIMS.md
    python -m runs.comparison.claims --check             exits with 1 if the page does not say what code and results say
    python -m runs.comparison.claims --only core-gains   decides one claim again and prints it

claims.json has the claims; the functions that decide them are in runs/comparison/evidence. No verdict is typed.
"""

import importlib
import json
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runs import pages
from runs.comparison.evidence import VERDICTS, Finding
from runs.table import Table
from trainkit_gka.cli import UserError, run
from trainkit_gka.progress import console

FOLDER = Path(__file__).parent
PAGE = "CLAIMS.md"
ALL: dict[str, Any] = json.loads((FOLDER / "claims.json").read_text())
GROUPS: list[dict[str, Any]] = ALL["groups"]
ARITHMETIC: list[dict[str, str]] = ALL["arithmetic"]
CLAIMS: dict[str, dict[str, str]] = {claim["name"]: claim for group in GROUPS for claim in group["claims"]}
WIDTH = 120
INTRODUCTION = """\
Written by `python -m runs.comparison.claims` from [claims.json](claims.json), the paper's printed figures, the cost
models and the files in [runs/results](../results). Words between quotation marks are the paper's; " ... " stands for
what is left out. Code decides every verdict (`evidence/`); `--only NAME` decides one again, `--check` fails if this
page is out of date.

- **holds here**: measured or computed with this code, at the scale that is named; no more than that.
- **not seen here**: a measurement at a scale that is named does not show it, which does not refute the paper's.
- **does not hold**: exact computation, a measurement of the very thing, or the paper's own figures say otherwise.
- **follows from arithmetic**: the printed figures or exact counts imply it. It says nothing about who measured them.
- **untested**: nothing here decides it. The command would.

No model of the paper's size has been trained here. One GPU has timed the operator, and no whole model; lines that use
it say so. ± is one standard error."""


@dataclass
class ClaimsConfig:
    """Write the ledger of the paper's claims from code and result files."""

    check: bool = False
    """Write nothing; exit with 1 if the page is out of date."""
    only: list[str] = field(default_factory=list)
    """Names of claims to decide again and print; empty = write the page."""


def decide(claim: dict[str, str]) -> Finding:
    """The finding of a claim's function. Raises UserError for a damaged line of a result file that it reads."""
    module, function = claim["check"].split(".")
    return getattr(importlib.import_module(f"runs.comparison.evidence.{module}"), function)()


def words(claim: dict[str, str]) -> str:
    """The paper's words, or what one of its tables prints."""
    return f'"{claim["quote"]}"' if "quote" in claim else claim["figures"]


def item(text: str) -> str:
    """A list item that is wrapped to the pages' width; a number and its percent sign stay together."""
    joined = text.replace(" %", "\0%")
    wrapped = textwrap.wrap(joined, WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(wrapped).replace("\0", " ")


def entry(claim: dict[str, str], finding: Finding) -> str:
    """One claim of the page."""
    quote = textwrap.fill(f"{claim['place']}: {words(claim)}", WIDTH, break_on_hyphens=False)
    parts = [f"### {claim['name']}", "", quote, ""]
    parts.append(item(f"**{finding.verdict}** ({finding.scale}). {finding.measured}"))
    parts.append(item(f"What would support it: {claim['support']}"))
    parts.append(f"- Again: `{claim['command']}`")
    return "\n".join(parts)


def verdicts(findings: dict[str, Finding]) -> str:
    """How many claims have which verdict."""
    counts = Counter(finding.verdict for finding in findings.values())
    return f"{len(findings)} claims: {', '.join(f'{counts[verdict]} {verdict}' for verdict in VERDICTS)}."


def summary(findings: dict[str, Finding]) -> str:
    """How many claims have which verdict, and a line for each claim."""
    rows = [
        [f"[{name}](#{name})", CLAIMS[name]["place"], finding.verdict, finding.scale]
        for name, finding in findings.items()
    ]
    table = Table.of(["claim", "place", "verdict", "at which scale"], rows, words=4)
    return f"{verdicts(findings)}\n\n{table.markdown()}"


def arithmetic() -> Table:
    """What the paper's own printed figures decide, or exact counts at its sizes."""
    rows = []
    for claim in ARITHMETIC:
        finding = decide(claim)
        rows.append([claim["name"], claim["place"], words(claim), finding.verdict, finding.measured])
    return Table.of(["", "place", "the paper", "verdict", "its own figures, or exact counts"], rows, words=5)


def page(findings: dict[str, Finding]) -> str:
    """The whole page."""
    parts = ["# The paper's claims", INTRODUCTION, summary(findings)]
    for group in GROUPS:
        parts.append(f"## {group['title']}")
        parts += [entry(claim, findings[claim["name"]]) for claim in group["claims"]]
    parts += ["## The arithmetic of the printed tables", arithmetic().markdown()]
    return "\n\n".join(parts) + "\n"


def main(config: ClaimsConfig) -> None:
    for name in config.only:
        if name not in CLAIMS:
            raise UserError(f"--only: {name} is not a claim; they are {', '.join(CLAIMS)}")
        console.print(entry(CLAIMS[name], decide(CLAIMS[name])) + "\n", highlight=False, markup=False)
    if config.only:
        return
    findings = {name: decide(claim) for name, claim in CLAIMS.items()}
    print(verdicts(findings))
    pages.update({f"runs/comparison/{PAGE}": page(findings)}, "python -m runs.comparison.claims", config.check)


if __name__ == "__main__":
    run(main, ClaimsConfig)
