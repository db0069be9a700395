"""What decides the claims of the ledger: a function for each, from the printed figures, the counts and the results."""

from dataclasses import dataclass

HOLDS, FAILS = "holds here", "does not hold"
NOT_SEEN, ARITHMETIC, UNTESTED = "not seen here", "follows from arithmetic", "untested"
VERDICTS = (HOLDS, NOT_SEEN, FAILS, ARITHMETIC, UNTESTED)

# Scales
PRINTED = "the paper's printed figures"
COUNTS = "exact counts at the paper's sizes"
DEMO_LANGUAGE = "the demo's small language models, one seed"
DEMO_VISION = "the demo's small vision models, digits, two seeds"


@dataclass(frozen=True)
class Finding:
    """A verdict, the scale it is of, and what was measured or computed."""

    verdict: str
    scale: str
    measured: str


def follows(true: bool, scale: str, measured: str) -> Finding:
    """Of a claim that arithmetic decides."""
    return Finding(ARITHMETIC if true else FAILS, scale, measured)


def holds(true: bool, scale: str, measured: str) -> Finding:
    """Of a claim that a measurement at the claim's own scale, or an exact computation, decides."""
    return Finding(HOLDS if true else FAILS, scale, measured)


def seen(true: bool, scale: str, measured: str) -> Finding:
    """Of a claim about large models that small ones may show, but cannot refute."""
    return Finding(HOLDS if true else NOT_SEEN, scale, measured)
