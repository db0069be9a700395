"""The sections of the report in their order, each made of what the other files collect and draw."""

from collections.abc import Sequence
from pathlib import Path

from runs.comparison.tables import BUILDERS, Sources
from runs.report import attention, curves, headlines, language, ledger, page, provenance
from runs.report.blocks import Fold, Picture, Section
from runs.report.live import LiveView, image_view
from runs.report.trained import TrainedRun, find_runs
from runs.tables.speed import models, operator
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
    _say("attention pictures and the live views")
    (seen, no_vision), (read, no_language) = attention.subjects(runs, images), language.subjects(runs, text)
    missing = " ".join(filter(None, [no_vision, no_language])) if runs else RANDOM
    image = image_view([subject for subject in seen if subject.about == seen[0].about])
    views = [*filter(None, [image]), *language.views(read)]
    drawn, verdicts = [*attention.pictures(seen), *language.pictures(read)], ledger.ledger()
    heads = language.heads_read(read) or drawn[:1]
    _say("benchmarks, tables and claims")
    sections = [summary(runs, verdicts, heads), live(views, missing), training(runs), looks(drawn, missing), speed()]
    sections += [paper(base), claims(verdicts), what_ran(runs)]
    names = ", ".join(run.name for run in runs) or "no run"
    about = f"Of {names}; written at commit {git_commit()}."
    return page.render(sections, about, f"Made by: {command_line()}")


def _say(what: str) -> None:
    console.print(f"report: {what}", highlight=False)


def summary(runs: list[TrainedRun], verdicts: ledger.Ledger, heads: list[Picture]) -> Section:
    """What was run, the verdicts, and two pictures: speed over machines, what heads read."""
    content = {"runs": [curves.reached(run) for run in runs], "counts": verdicts.counts}
    pictures = [*headlines.speed(), *heads]
    missing = "" if runs else NOT_TRAINED
    return Section("summary", "In short", "", missing, "summary.html", content, pictures=pictures, short="Summary")


def what_ran(runs: list[TrainedRun]) -> Section:
    """Where the numbers come from, and the commands, as they were typed."""
    tables = [provenance.run_facts(runs)] if runs else []
    folds = [Fold(table.title, [table]) for table in (*tables, provenance.file_facts())]
    introduction = (
        "Hardware, versions, commits and commands are those that the result files name; nothing was typed here."
    )
    return Section(
        "ran",
        "Where it comes from",
        introduction,
        template="commands.html",
        content=provenance.commands(runs),
        folds=folds,
        short="Provenance",
    )


def looks(drawn: list[Picture], missing: str) -> Section:
    """The first picture, and the others folded."""
    introduction = (
        "The paper's figures of the vision models, then of the language models. Every W was computed again and gives "
        "its model's own output."
    )
    folds = [Fold(picture.title, pictures=[picture]) for picture in drawn[1:]]
    about = dict(missing=missing, pictures=drawn[:1], folds=folds, short="Attention")
    return Section("attention", "Attention pictures", introduction, **about)


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
    """The tables of the operator and of whole models, folded; the chart of the main cases is in the summary."""
    tables = {"Operator": operator(), "Models": models()}
    folds = [Fold(f"{name}, {table.title.rstrip(':')}", [table]) for name, own in tables.items() for table in own]
    missing = "" if folds else 'No benchmark was run; "make bench" runs them.'
    introduction = (
        "The chart of the summary has the main cases of all machines; here they are by machine. Both sides of a "
        "comparison took turns in one process."
    )
    return Section("speed", "Speed", introduction, missing, folds=folds)


def paper(base: Path) -> Section:
    """The paper's tables, as `make tables` writes them."""
    tables = [builder(Sources(base)) for builder in BUILDERS.values()]
    introduction = "The paper's figures are in italics; ours are exact counts, and runs of the very configuration."
    folds = [Fold(table.title, [table]) for table in tables]
    return Section("paper", "The paper's tables beside ours", introduction, folds=folds, short="Tables")


def claims(verdicts: ledger.Ledger) -> Section:
    introduction = (
        "What the paper claims, held against what was measured or computed here. Code decides every verdict, and each "
        "names its scale; open a claim to see what decided it."
    )
    about = dict(template="claims.html", content=verdicts, short="Claims")
    return Section("claims", "The paper's claims", introduction, **about)
