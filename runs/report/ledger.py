"""The claims ledger for the page: every claim with its verdict, from runs/comparison/claims.py."""

from dataclasses import dataclass

from runs.comparison import claims
from runs.comparison.evidence import VERDICTS, Finding


@dataclass(frozen=True)
class Entry:
    """A claim and what decided it."""

    claim: dict[str, str]
    finding: Finding


@dataclass(frozen=True)
class Ledger:
    """groups: (title, entries) in the order of the paper's subjects. counts: (verdict, how many)."""

    groups: list[tuple[str, list[Entry]]]
    counts: list[tuple[str, int]]


def ledger() -> Ledger:
    """Decide every claim. Raises UserError if a result file that one reads is incomplete."""
    groups = [
        (group["title"], [Entry(claim, claims.decide(claim)) for claim in group["claims"]]) for group in claims.GROUPS
    ]
    verdicts = [entry.finding.verdict for _, entries in groups for entry in entries]
    return Ledger(groups, [(verdict, verdicts.count(verdict)) for verdict in VERDICTS])
