"""How the paper's tables beside ours are written: the paper's figure in italics, ours, and the difference."""

from runs.table import NOT_RUN, Row

HEADINGS = ["Measure", "Paper", "Ours", "Ours - paper"]


def italic(printed: str) -> str:
    """A figure of the paper; whole numbers with a comma, as the paper sets them."""
    return f"*{int(printed):,}*" if printed.isdigit() else f"*{printed}*" if printed else ""


def compare(printed: str | None, ours: float | None) -> Row:
    """Paper, ours, difference; relative from a thousand up."""
    if printed is None or ours is None:
        return [italic(printed or ""), NOT_RUN if ours is None else f"{ours:,.4g}", ""]
    paper = float(printed)
    if "e" in printed or abs(paper) >= 1000:
        difference = signed(100 * (ours / paper - 1), 2, " %")
    else:
        difference = signed(ours - paper, 0 if isinstance(ours, int) else decimals(printed) + 1)
    return [italic(printed), written(ours, printed), difference]


def written(value: float, printed: str) -> str:
    """Our number with one digit more than the paper's; whole numbers and thousands as they are."""
    places = decimals(printed)
    if "e" in printed:
        return f"{value:.{places + 1}e}".replace("e+", "e").replace("e0", "e")
    if isinstance(value, int) or (abs(value) >= 1000 and not places):
        return f"{value:,.0f}"
    return f"{value:,.{places + 1}f}"


def alone(value: float, printed: str) -> str:
    """Our number of a run of any size, which the paper has no figure for; `printed` is another in its column."""
    return written(value, printed) if "e" in printed else f"{value:,.5g}"


def signed(value: float, places: int, unit: str = "") -> str:
    """A difference with its sign, or 0."""
    text = f"{value:+,.{places}f}"
    return text + unit if text.strip("+-0.,") else "0"


def decimals(printed: str) -> int:
    return len(printed.partition("e")[0].partition(".")[2])


def percent(ours: float, base: float) -> float:
    return 100 * (ours / base - 1)
