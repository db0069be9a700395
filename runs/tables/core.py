"""The table of CORE's six tasks of the paper: the demo's models beside published figures."""

from nanochat_gka.core_metric.bundle import CORE_SIZES, PAPER_TASKS
from nanochat_gka.core_metric.published import GPT2_ACCURACY, PAPER_EXAMPLES
from nanochat_gka.core_metric.report import Score, aggregate, error_of_mean, paper_score, score_of
from runs import frames
from runs.demo.language import STEPS, VARIANTS, run_tag
from runs.table import Table, measured

PUBLISHED = ("GPT-2 124M", "paper: base", f"paper: GKA, n = {PAPER_EXAMPLES[1]}")


def core() -> list[Table]:
    """Centred scores with their standard errors; what others published is in italics."""
    records = {}
    for name, variant in VARIANTS.items():
        path = frames.RESULTS / "core" / f"{run_tag(name)}_step{STEPS:06d}.jsonl"
        if lines := frames.records(path, "accuracy", "baseline", "examples", kind="core"):
            records[variant.label] = {line["config"]["task"]: line for line in lines}
    columns: list[list[Score]] = [[] for _ in (*records, *PUBLISHED)]
    rows = []
    for task in PAPER_TASKS:
        ours = [score_of(task, lines[task]["metrics"]) for lines in records.values()]
        baseline = ours[0].baseline
        gpt2 = Score(task, GPT2_ACCURACY[task][0], baseline, 0, CORE_SIZES[task])
        scores = [*ours, gpt2, *(paper_score(task, model, baseline) for model in range(2))]
        for column, score in zip(columns, scores):
            column.append(score)
        cells = [f"{score.centered:.4f} ± {score.standard_error:.3f}" for score in scores]
        rows.append([task, str(ours[0].examples), *cells[: len(ours)], *map("*{}*".format, cells[len(ours) :])])
    means = [f"{aggregate(column)[1]:.4f} ± {mean_error(column):.3f}" for column in columns]
    marks = ["**{}**"] * len(records) + ["*{}*"] * len(PUBLISHED)
    rows.append(["**mean**", "", *(mark.format(mean) for mark, mean in zip(marks, means))])
    headings = ["centred, ± standard error", "examples", *records, *map("*{}*".format, PUBLISHED)]
    sources = [measured([line for lines in records.values() for line in lines.values()], "core/*.jsonl")]
    return [Table.of(headings, rows, sources=sources)]


def mean_error(scores: list[Score]) -> float:
    """The standard error of the scores' mean."""
    return error_of_mean([score.standard_error for score in scores])
