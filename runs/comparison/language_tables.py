"""Tables 6 to 8 of the paper beside ours: bits per byte, CORE, and size and compute at depth 20."""

from nanochat_gka.core_metric.bundle import PAPER_TASKS
from nanochat_gka.core_metric.published import PAPER_MEAN
from nanochat_gka.core_metric.report import Score, aggregate, error_of_mean
from nanochat_gka.training.bits_per_byte import remarks
from runs.comparison import core_scores, measured
from runs.comparison.measured import Sources
from runs.paper import published
from runs.paper.cells import alone, compare, italic, signed
from runs.paper.deit import SOFTMAX_TARGET
from runs.paper.published import table
from runs.table import NOT_RUN, Row, Table

COMMANDS = {
    "nanochat_base": f"make pretrain-d20-base NGPU={measured.GPUS}",
    "GKA": f"make pretrain-d20 NGPU={measured.GPUS}",
}
CORPUS = "A run's record does not name its corpus: train on the paper's, FineWeb-Edu, which `make data` fetches."
Value = tuple[float, float]  # with its standard error


def bpb(sources: Sources) -> Table:
    """With the other language runs of BASE below."""
    runs, rows, commands, records = sources.runs(), [], [], {}
    columns = published.TABLES["bpb"]["columns"]
    for model, printed in published.rows("bpb").items():
        run = measured.language_run(model, runs)
        for key, heading in columns.items():
            rows.append([model, heading, *compare(printed[key], run.metrics.get(key) if run else None)])
        if run is None:
            commands.append(COMMANDS[model])
        else:
            records[model] = run.metrics
    records |= {run.name: run.metrics for run in sources.other_runs("flops_per_token")}
    return sources.remark(table("bpb", rows + other_rows(sources, "bpb"), [CORPUS, *remarks(records)], commands))


def compute(sources: Sources) -> Table:
    """Counts alone; the ratios are those in the text beside the table. With the other language runs of BASE below."""
    counts = {model: measured.language_counts(model) for model in measured.RECIPES}
    columns, rows = published.TABLES["compute"]["columns"], []
    for model, printed in published.rows("compute").items():
        numbers = {**counts[model], "parameters": counts[model]["parameters"] / 1e6}
        rows += [[model, columns[key], *compare(printed[key], float(numbers[key]))] for key in columns]
    base, gka = counts.values()
    for key, printed in published.TABLES["compute"]["ratios"].items():
        rows.append(["GKA / nanochat_base", columns[key], *compare(printed, gka[key] / base[key])])
    return sources.remark(table("compute", rows + other_rows(sources, "compute"), [], []))


def other_rows(sources: Sources, name: str) -> list[Row]:
    """The runs of BASE that are not the paper's, with the columns of a table."""
    rows, printed = [], published.rows(name)["nanochat_base"]  # how many digits
    for run in sources.other_runs("flops_per_token"):
        numbers = {**run.metrics, "parameters": run.metrics["parameters"] / 1e6}
        for key, heading in published.TABLES[name]["columns"].items():
            if numbers.get(key) is not None:
                rows.append([run.name, heading, "", alone(float(numbers[key]), printed[key]), ""])
    return rows


# CORE


def with_error(value: Value | None, sign: str = "") -> str:
    return f"{value[0]:{sign}.4f} ± {value[1]:.3f}" if value else NOT_RUN


def of_score(score: Score) -> str:
    return f"{with_error((score.centered, score.standard_error))} (n = {score.examples:,})"


def core_subset(sources: Sources) -> Table:
    """Centred scores with standard errors, each from the number of examples that its column used."""
    runs, scores, commands = sources.runs(), {}, []
    for model in measured.RECIPES:
        run, steps = measured.language_run(model, runs), measured.language_counts(model)["steps"]
        scores[model] = measured.core_scores(run, steps, sources.base, sources.results)
        if not scores[model].keys() >= set(PAPER_TASKS):
            suffix = "" if model == "GKA" else f"-{SOFTMAX_TARGET}"
            commands += [COMMANDS[model], f"make eval-core{suffix} NGPU={measured.GPUS}"]
    base, gka, difference = published.TABLES["core_subset"]["columns"].values()
    rows = []
    for task in PAPER_TASKS:
        paper = [core_scores.printed(task, model) for model in (core_scores.BASE, core_scores.GKA)]
        ours = [scores[model].get(task) for model in measured.RECIPES]
        for heading, printed, score in zip((base, gka), paper, ours):
            apart = with_error(core_scores.difference(printed, score), "+") if score else ""
            rows.append([task, heading, italic(of_score(printed)), of_score(score) if score else NOT_RUN, apart])
        both = core_scores.difference(*ours) if all(ours) else None
        rows.append([task, difference, *differences(core_scores.difference(*paper), both)])
    rows += _means([list(scores[model].values()) for model in measured.RECIPES])
    for run in sources.other_runs("flops_per_token"):
        other = measured.core_scores(run, run.steps, sources.base, sources.base)
        six = [other[task] for task in PAPER_TASKS if task in other]
        rows += [[score.label, run.name, "", of_score(score), ""] for score in six]
        if len(six) == len(PAPER_TASKS):
            rows.append(["mean", run.name, "", with_error((aggregate(six)[1], _error(six))), ""])
    rows.sort(key=lambda row: [*PAPER_TASKS, "mean"].index(row[0]))
    remark = "± is one standard error, from the n of each column."
    return sources.remark(table("core_subset", rows, [remark, CORPUS], commands, about="Task"))


def differences(paper: Value, ours: Value | None) -> Row:
    """The cells of GKA - base: the paper's, ours, and ours - paper's."""
    return [italic(with_error(paper, "+")), with_error(ours, "+"), signed(ours[0] - paper[0], 4) if ours else ""]


def _means(ours: list[list[Score]]) -> list[Row]:
    """The last rows: means of the six tasks and their difference."""
    papers = [[core_scores.printed(task, model) for task in PAPER_TASKS] for model in (0, 1)]
    six = [[score for task in PAPER_TASKS for score in column if score.label == task] for column in ours]
    rows, headings = [], list(published.TABLES["core_subset"]["columns"].values())
    for heading, mean, printed, column in zip(headings, PAPER_MEAN, papers, six):
        complete = len(column) == len(PAPER_TASKS)
        value = (aggregate(column)[1], _error(column)) if complete else None
        cells = [italic(with_error((mean, _error(printed)))), with_error(value)]
        rows.append(["mean", heading, *cells, signed(value[0] - mean, 4) if value else ""])
    both = core_scores.mean_difference(*six) if all(len(column) == len(PAPER_TASKS) for column in six) else None
    return [*rows, ["mean", headings[2], *differences(core_scores.mean_difference(*papers), both)]]


def _error(scores: list[Score]) -> float:
    return error_of_mean([score.standard_error for score in scores])
