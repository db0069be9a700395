"""The sections of the report in their order, each made of what the other files collect and draw."""

from collections.abc import Sequence
from pathlib import Path

from runs.comparison.tables import BUILDERS, Sources
from runs.report import attention, benchmarks, curves, language, ledger, page, provenance
from runs.report.blocks import Section
from runs.report.live import LiveView, image_view
from runs.report.trained import TrainedRun, find_runs
from trainkit_gka.cli import command_line
from trainkit_gka.progress import console
from trainkit_gka.results import git_commit

NOT_TRAINED = 'No run was found, so there is nothing of training to show. "make demo" trains small models in minutes.'
RANDOM = (
    "No run was found: this is random initialisation of a model of the paper's. "
    '"make demo" trains small ones in minutes.'
)


def render(base: Path, chosen: Sequence[Path], images: Sequence[Path], text: str) -> str:
    """The whole page. Raises UserError for a folder that is not a run, and for files that are not images."""
    runs = find_runs(tuple(chosen), base)
    sections = [what_ran(runs)]
    _say("attention pictures and the live views")
    (seen, no_vision), (read, no_language) = attention.subjects(runs, images), language.subjects(runs, text)
    missing = " ".join(filter(None, [no_vision, no_language])) if runs else RANDOM
    image = image_view([subject for subject in seen if subject.about == seen[0].about])
    views = [*filter(None, [image]), *language.views(read)]
    sections += [live(views, missing), training(runs)]
    sections.append(
        Section(
            "attention",
            "Attention pictures",
            "The paper's figures of the vision models, then of the language models. Every W was computed again and "
            "gives its model's own output.",
            missing=missing,
            pictures=[*attention.pictures(seen), *language.pictures(read)],
        )
    )
    _say("benchmarks, tables and claims")
    sections += [speed(), paper(base), claims(), commands(runs)]
    names = ", ".join(run.name for run in runs) or "no run"
    summary = f"Of {names}; written at commit {git_commit()}."
    return page.render(sections, summary, f"Made by: {command_line()}")


def _say(what: str) -> None:
    console.print(f"report: {what}", highlight=False)


def what_ran(runs: list[TrainedRun]) -> Section:
    tables = [provenance.run_facts(runs)] if runs else []
    introduction = "Hardware, versions and commits are those that the result files name; nothing here was typed."
    return Section(
        "ran",
        "What was run, and on what",
        introduction,
        missing="" if runs else NOT_TRAINED,
        tables=[*tables, provenance.file_facts()],
    )


def live(views: list[LiveView], missing: str) -> Section:
    introduction = (
        "Rows of W, computed in this page from stored features and σ: what one token gives all others. Click a patch, "
        "point at a token, or use the arrow keys; move σ to see the row that another bandwidth would give in this "
        "layer. Other layers are as they were: their features were computed with the learned σ. Features are stored in "
        "half precision."
    )
    return Section("live", "Live view", introduction, missing=missing, template="live.html", content=views)


def training(runs: list[TrainedRun]) -> Section:
    introduction = "From the runs' logs. A colour is a form of attention; its models and seeds differ in the line."
    pictures = [*curves.learning_curves(runs), *curves.bandwidth_curves(runs)]
    missing = "" if runs else NOT_TRAINED
    return Section("training", "Training", introduction, missing, tables=curves.run_tables(runs), pictures=pictures)


def speed() -> Section:
    pictures = benchmarks.pictures()
    missing = "" if pictures else 'No benchmark was run; "make bench" runs them.'
    introduction = "From runs/results. Both sides of a comparison took turns in one process."
    return Section("speed", "Speed", introduction, missing, pictures=pictures)


def paper(base: Path) -> Section:
    """The paper's tables, as `make tables` writes them."""
    tables = [builder(Sources(base)) for builder in BUILDERS.values()]
    introduction = "The paper's figures are in italics; ours are exact counts, and runs of the very configuration."
    return Section("paper", "The paper's tables beside ours", introduction, tables=tables)


def claims() -> Section:
    introduction = (
        "What the paper claims, held against what was measured or computed here. Code decides every verdict, and each "
        "names its scale; open a claim to see what decided it."
    )
    return Section("claims", "The paper's claims", introduction, template="claims.html", content=ledger.ledger())


def commands(runs: list[TrainedRun]) -> Section:
    introduction = "As they were typed, from the result files."
    content = provenance.commands(runs)
    return Section("commands", "The exact commands", introduction, template="commands.html", content=content)
