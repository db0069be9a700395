"""Tables 1 to 8 of the paper beside ours: as printed, as counted and measured here, and the difference.

    python -m runs.tables                                  on the terminal
    python -m runs.tables --format markdown --only 2 6     two of them for a page
    python -m runs.tables --write                          writes the tables of the repository's pages; --check checks

Our cells are exact counts or finished runs of exactly that configuration (runs/paper/measured.py).
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from gka.kinds import KINDS
from nanochat_gka.core_metric.published import CORE_SIZES, GPT2_ACCURACY, PAPER_EXAMPLES, PAPER_MEAN, PAPER_TASKS
from nanochat_gka.core_metric.report import Score, aggregate, paper_score, score_of
from nanochat_gka.training.bits_per_byte import remarks
from runs import frames, pages
from runs.demo import language
from runs.demo import vision as digits
from runs.demo.language import COLUMNS, STEPS, VARIANTS, run_tag
from runs.examples import text_classifier
from runs.paper import measured, published
from runs.paper.measured import GPUS, Run
from runs.table import NOT_RUN, Row, Table
from runs.table import measured as sources_of
from trainkit_gka.cli import run
from trainkit_gka.files import check_named

PAPER, OURS, DIFFERENCE = "Paper", "Ours", "Ours - paper"
HYBRID = "deit_tiny_gka_patch16_224-GGGA"  # the name of its run
TERMINAL = 80  # letters of a line
LANGUAGE_COMMANDS = {
    "nanochat_base": f"make pretrain-d20-base NGPU={GPUS}",
    "GKA": f"make pretrain-d20 NGPU={GPUS}",
}
CORPUS = "A run's record does not name its corpus: train on the paper's, FineWeb-Edu, which `make data` fetches."
# Accuracy of guessing in percent, as the bundle's eval_meta_data.csv has it.
GUESSING = dict(zip(PAPER_TASKS, (25.0, 50.0, 25.0, 0.0, 50.0, 50.0)))
Cell = tuple[str, str, str]  # the paper's figure in italics, ours, the difference
Value = tuple[float, float]  # with its standard error


@dataclass
class PaperTable:
    """A published table beside ours. cells: (row, column) -> cell, in the order of the rows.

    remarks: on our cells. commands: fill the cells that were not run. long: a line for every cell, as many columns do
    not fit.
    """

    name: str
    cells: dict[tuple[str, str], Cell]
    remarks: Row = field(default_factory=list)
    commands: Row = field(default_factory=list)
    about: str = "Model"
    long: bool = False

    def table(self) -> Table:
        printed = published.TABLES[self.name]
        notes = [" ".join([*printed["notes"], *self.remarks])]
        if self.commands:
            commands = ", ".join(f"`{command}`" for command in dict.fromkeys(self.commands))
            notes.append(f'Cells with "{NOT_RUN}" are filled by {commands}.')
        title = f"Table {printed['number']} of the paper, beside ours. {printed['caption']}"
        if self.long:
            rows, headings = (
                [[*names, *cell] for names, cell in self.cells.items()],
                ["Measure", PAPER, OURS, DIFFERENCE],
            )
        else:
            rows, headings = self._wide()
        return Table.of([self.about, *headings], rows, title=title, notes=notes, words=2)

    def _wide(self) -> tuple[list[Row], Row]:
        """A line for the paper, ours and the difference, and a column for each measure, as the paper has them."""
        names, columns = (list(dict.fromkeys(key[place] for key in self.cells)) for place in (0, 1))
        rows = []
        for name, (place, source) in itertools.product(names, enumerate((PAPER, OURS, DIFFERENCE))):
            line = [self.cells.get((name, column), ("", "", ""))[place] for column in columns]
            if any(line):
                rows.append([name, source, *line])
        return rows, ["", *columns]


def italic(printed: str) -> str:
    """A figure of the paper; whole numbers with a comma, as the paper sets them."""
    return f"*{int(printed):,}*" if printed.isdigit() else f"*{printed}*" if printed else ""


def compare(printed: str | None, ours: float | None) -> Cell:
    """Paper, ours, difference; a relative difference from a thousand up."""
    if printed is None or ours is None:
        return italic(printed or ""), NOT_RUN if ours is None else f"{ours:,.4g}", ""
    paper = float(printed)
    if "e" in printed or abs(paper) >= 1000:
        difference = signed(100 * (ours / paper - 1), 2, " %")
    else:
        difference = signed(ours - paper, 0 if isinstance(ours, int) else decimals(printed) + 1)
    return italic(printed), written(ours, printed), difference


def written(value: float, printed: str) -> str:
    """Our number with one digit more than the paper's; whole numbers and thousands as they are."""
    places = decimals(printed)
    if "e" in printed:
        return f"{value:.{places + 1}e}".replace("e+", "e").replace("e0", "e")
    if isinstance(value, int) or (abs(value) >= 1000 and not places):
        return f"{value:,.0f}"
    return f"{value:,.{places + 1}f}"


def signed(value: float, places: int, unit: str = "") -> str:
    """A difference with its sign, or 0."""
    text = f"{value:+,.{places}f}"
    return text + unit if text.strip("+-0.,") else "0"


def decimals(printed: str) -> int:
    return len(printed.partition("e")[0].partition(".")[2])


# Vision


def related_methods(base: Path, results: Path = frames.RESULTS) -> PaperTable:
    columns, printed = published.TABLES["related_methods"]["columns"], published.rows("related_methods")
    cells = {(m, columns[key]): (italic(word), "", "") for m, words in printed.items() for key, word in words.items()}
    return PaperTable("related_methods", cells, ["Measured here: docs/related-methods.md."], about="Method")


def vision_numbers(label: str, runs: list[Run]) -> dict[str, float | None]:
    """Every number of a row of tables 2, 3 and 5; top-1 is None until its run has finished."""
    cost, base = measured.cost(label), measured.cost(f"DeiT-{label.split('-')[1]}")
    trained = measured.vision_run(label, runs)
    return {
        "params": cost.parameters / 1e6,
        "attention": cost.attention / 1e6,
        "mlp": cost.mlp / 1e6,
        "sigma": cost.bandwidths,
        "gflops": cost.flops / 1e9,
        "size": cost.raw_mib,
        "delta_params": 100 * (cost.parameters / base.parameters - 1),
        "delta_attention": 100 * (cost.attention / base.attention - 1),
        "delta_flops": 100 * (cost.flops / base.flops - 1),
        "top1": trained["metrics"]["ema_top1"] if trained else None,
    }


def vision(name: str, base: Path, results: Path = frames.RESULTS) -> PaperTable:
    """Tables 2, 3 and 5; below the last the hybrid that `make ablate-projections` trains, which the paper left out."""
    runs, cells, commands = measured.finished_runs(base, results), {}, []
    columns = published.TABLES[name]["columns"]
    for label, printed in published.rows(name).items():
        numbers = vision_numbers(label, runs)
        for key, heading in columns.items():
            if key == "projections":
                letters = f"{KINDS[measured.KIND_OF[label.split('-')[0]]].input_projections}O"
                ours = ", ".join(f"W_{letter}" for letter in letters)
                cells[label, heading] = italic(printed[key]), ours, "" if printed[key].startswith(ours) else "differs"
            elif key in printed:
                cells[label, heading] = compare(printed[key], numbers[key])
        if "top1" in printed and numbers["top1"] is None:
            commands.append(f"{training_target(label)} DATA=/imagenet NGPU={GPUS}")
    notes = ["Our sizes are MiB of the bare weights."] if "size" in columns else []
    if "top1" in columns:
        notes.append("Our top-1 is of averaged weights, and only of a finished run of this model and recipe.")
    for line in (line for line in runs if name == "ablation" and line["config"].get("model_tag") == HYBRID):
        metrics = line["metrics"]
        numbers = {"params": metrics["parameters"] / 1e6, "gflops": metrics["flops"] / 1e9, "top1": metrics["ema_top1"]}
        cells |= {("GGGA-Ti (ours)", columns[key]): ("", f"{value:.3f}", "") for key, value in numbers.items()}
    return PaperTable(name, cells, notes, commands)


def training_target(label: str) -> str:
    """The target of make that trains a row of the vision tables."""
    paper_name, size = label.split("-")
    kind = measured.KIND_OF[paper_name]
    return f"make train-deit-{size.lower()}" + {"gka": "", "softmax": "-base"}.get(kind, f"-{kind}")


def runtime(base: Path, results: Path = frames.RESULTS) -> PaperTable:
    """Training rates of one GPU beside the paper's total over its GPUs; GKA fused and unfused (the paper's)."""
    benchmark, cells = measured.gpu_benchmark(results), {}
    for label, printed in published.rows("runtime").items():
        for role in ("baseline",) if label.startswith("DeiT") else ("ours", "unfused"):
            name = f"{label}, unfused" if role == "unfused" else label
            line = measured.fastest(benchmark, label, "inference", role)
            cells[name, "inference: img/s, 1 GPU"] = compare(printed["inference"], line.get("items_per_second"))
            cells[name, "inference: batch"] = compare(printed["batch"], line.get("batch"))
            cells[name, "inference: MB"] = compare(printed["inference_memory"], line.get("peak_mib"))
            for size in ("64", "128"):
                line = measured.fastest(benchmark, label, "training", role, size)
                total, training = printed[f"training_{size}"], f"training bs {size}:"
                if role != "unfused":
                    cells[name, f"{training} img/s, {GPUS} GPUs"] = italic(total), "", ""
                share = f"{int(total) / GPUS:.0f}"
                cells[name, f"{training} img/s, 1 GPU"] = compare(share, line.get("items_per_second"))
                cells[name, f"{training} MB, 1 GPU"] = compare(printed[f"memory_{size}"], line.get("peak_mib"))
    where = f"Ours: {benchmark.machine.iloc[0]}." if len(benchmark) else "No GPU has run ours yet."
    notes = [
        "Our GKA is fused; unfused it builds W as the paper's does. The paper's figures stand beside both.",
        f"The paper's training rates of 1 GPU are its totals over {GPUS} GPUs divided by {GPUS}.",
        where,
    ]
    return PaperTable("runtime", cells, notes, ["python -m runs.bench.deit"], long=True)


# Language


def bpb(base: Path, results: Path = frames.RESULTS) -> PaperTable:
    runs, cells, commands, records = measured.finished_runs(base, results), {}, [], {}
    for model, printed in published.rows("bpb").items():
        trained = measured.language_run(model, runs)
        for key, heading in published.TABLES["bpb"]["columns"].items():
            cells[model, heading] = compare(printed[key], trained["metrics"].get(key) if trained else None)
        if trained is None:
            commands.append(LANGUAGE_COMMANDS[model])
        else:
            records[model] = trained["metrics"]
    return PaperTable("bpb", cells, [CORPUS, *remarks(records)], commands)


def compute(base: Path, results: Path = frames.RESULTS) -> PaperTable:
    """Counts alone; the ratios are those in the text beside the table."""
    counts = {model: measured.language_counts(model) for model in measured.RECIPES}
    columns, cells = published.TABLES["compute"]["columns"], {}
    for model, printed in published.rows("compute").items():
        numbers = {**counts[model], "parameters": counts[model]["parameters"] / 1e6}
        cells |= {(model, columns[key]): compare(printed[key], float(numbers[key])) for key in columns}
    softmax, gka = counts.values()
    for key, ratio in published.TABLES["compute"]["ratios"].items():
        cells["GKA / nanochat_base", columns[key]] = compare(ratio, gka[key] / softmax[key])
    return PaperTable("compute", cells)


def with_error(value: Value | None, sign: str = "") -> str:
    return f"{value[0]:{sign}.4f} ± {value[1]:.3f}" if value else NOT_RUN


def difference_of(base: Value, gka: Value) -> Value:
    """GKA - base, and its standard error from the examples of each."""
    return gka[0] - base[0], (base[1] ** 2 + gka[1] ** 2) ** 0.5


def mean_of(scores: list[Score]) -> Value:
    """The mean over tasks, and its standard error."""
    return aggregate(scores)[1:]


def core_cell(paper: Value, ours: Value | None, examples: Sequence[str] = ("", ""), sign: str = "") -> Cell:
    """examples: how many each is of, in words."""
    if not ours:
        return f"*{with_error(paper, sign)}{examples[0]}*", NOT_RUN, ""
    apart = with_error(difference_of(paper, ours), "+")
    return f"*{with_error(paper, sign)}{examples[0]}*", with_error(ours, sign) + examples[1], apart


def core_subset(base: Path, results: Path = frames.RESULTS) -> PaperTable:
    """Centred scores with standard errors, each from the number of examples that its column used."""
    runs, ours, commands = measured.finished_runs(base, results), [], []
    for model in measured.RECIPES:
        trained, steps = measured.language_run(model, runs), measured.language_counts(model)["steps"]
        ours.append(measured.core_scores(trained, steps, results, base))
        if not ours[-1].keys() >= set(PAPER_TASKS):
            target = "eval-core" if model == "GKA" else "eval-core-base"
            commands += [LANGUAGE_COMMANDS[model], f"make {target} NGPU={GPUS}"]
    *columns, delta = published.TABLES["core_subset"]["columns"].values()
    cells: dict[tuple[str, str], Cell] = {}
    for row, tasks in {**{task: (task,) for task in PAPER_TASKS}, "mean": PAPER_TASKS}.items():
        paper = [[paper_score(task, column, GUESSING[task]) for task in tasks] for column in (0, 1)]
        mine = [[scores[task] for task in tasks] if scores.keys() >= set(tasks) else [] for scores in ours]
        for heading, printed, scores, mean in zip(columns, paper, mine, PAPER_MEAN):
            value = (mean, mean_of(printed)[1]) if row == "mean" else mean_of(printed)
            counts = [f" (n = {each[0].examples:,})" if len(each) == 1 else "" for each in (printed, scores)]
            cells[row, heading] = core_cell(value, scores and mean_of(scores), counts)
        both = difference_of(*map(mean_of, mine)) if all(mine) else None
        cells[row, delta] = core_cell(difference_of(*map(mean_of, paper)), both, sign="+")
    notes = ["± is one standard error, from the n of each column.", CORPUS]
    return PaperTable("core_subset", cells, notes, commands, about="Task")


# Of a number: the table, from BASE and the folder of the result files.
BUILDERS: dict[int, Callable[..., PaperTable]] = {
    1: related_methods,
    2: partial(vision, "main_results"),
    3: partial(vision, "efficiency"),
    4: runtime,
    5: partial(vision, "ablation"),
    6: bpb,
    7: core_subset,
    8: compute,
}


# Tables of the repository's pages


def sizes() -> list[Table]:
    """Every vision model of the paper: counts, the paper's top-1, and the command that trains it."""
    rows = []
    for label, printed in published.VISION.items():
        cost = measured.cost(label)
        counts = [f"{cost.parameters:,}", f"{cost.attention:,}", str(cost.bandwidths or "")]
        measures = [f"{cost.flops / 1e9:.2f}", f"{cost.raw_mib:.1f}", f"*{printed['top1']}*"]
        rows.append([label, f"`{training_target(label)}`", *counts, *measures])
    headings = ["", "command", "parameters", "attention", "sigma", "GFLOPs", "weights, MiB", "*paper: top-1*"]
    return [Table.of(headings, rows, words=2)]


def core() -> list[Table]:
    """CORE's six tasks: centred scores of the demo's models beside published ones, which are in italics."""
    records = {}
    for name, variant in VARIANTS.items():
        path = frames.RESULTS / "core" / f"{run_tag(name)}_step{STEPS:06d}.jsonl"
        if lines := frames.records(path, "accuracy", "baseline", "examples", kind="core"):
            records[variant.label] = {line["config"]["task"]: line for line in lines}
    references = ("GPT-2 124M", "paper: base", f"paper: GKA, n = {PAPER_EXAMPLES[1]}")
    columns: list[list[Score]] = [[] for _ in (*records, *references)]
    rows = []
    for task in PAPER_TASKS:
        ours = [score_of(task, lines[task]["metrics"]) for lines in records.values()]
        gpt2 = Score(task, GPT2_ACCURACY[task][0], GUESSING[task], CORE_SIZES[task])
        scores = [*ours, gpt2, *(paper_score(task, model, GUESSING[task]) for model in range(2))]
        for column, score in zip(columns, scores):
            column.append(score)
        cells = [with_error(mean_of([score])) for score in scores]
        rows.append([task, str(ours[0].examples), *cells[: len(ours)], *map("*{}*".format, cells[len(ours) :])])
    marks = ["**{}**"] * len(records) + ["*{}*"] * len(references)
    means = [mark.format(with_error(mean_of(column))) for mark, column in zip(marks, columns)]
    headings = ["centred, ± standard error", "examples", *records, *map("*{}*".format, references)]
    sources = [sources_of([line for lines in records.values() for line in lines.values()], "core/*.jsonl")]
    return [Table.of(headings, [*rows, ["**mean**", "", *means]], sources=sources)]


def demo_language() -> list[Table]:
    """The models that today's demo trains, then the paper's as printed."""
    trained = {one["config"]["model_tag"]: one for one in frames.records(frames.RESULTS / "demo.jsonl", *COLUMNS)}
    tags = {variant.label: run_tag(name) for name, variant in VARIANTS.items()}
    records = {label: trained[tag] for label, tag in tags.items() if tag in trained}
    sources = [sources_of(list(records.values()), "demo.jsonl")]
    return [language.table({label: record["metrics"] for label, record in records.items()}, sources=sources)]


def demo_vision() -> list[Table]:
    """The demo's vision models on digits: the mean over seeds and half their range."""
    records: dict[str, list[dict]] = {}
    for record in frames.records(frames.RESULTS / "demo_vision.jsonl", "parameters", "flops", "top1", "ema_top1"):
        records.setdefault(record["label"], []).append(record)
    sources = [sources_of([*itertools.chain(*records.values())], "demo_vision.jsonl")]
    return [digits.table({label: [run["metrics"] for run in runs] for label, runs in records.items()}, sources=sources)]


def classifier() -> list[Table]:
    """The text classifier with its default settings."""
    name = text_classifier.FILE
    records = text_classifier.records_of(frames.RESULTS / name, text_classifier.TextClassifierConfig())
    return [text_classifier.table(records, [sources_of(records, name)] if records else [])]


PAGES = ("docs/train-images.md", "runs/README.md", "runs/results/TABLES.md")
TABLES: pages.Builders = {
    "sizes": sizes,
    "core": core,
    "demo": demo_language,
    "vision": demo_vision,
    "text-classifier": classifier,
}


@dataclass
class TablesConfig:
    """Print the paper's tables with ours beside them, or write the tables of the repository's pages."""

    base: Path = Path("out")
    """Folder of all outputs: finished runs are read from BASE/results.jsonl, scores from BASE/core."""
    format: Literal["terminal", "markdown"] = "terminal"
    """How the tables are written."""
    only: list[Literal[tuple(BUILDERS)]] = field(default_factory=list)
    """Numbers of the tables to print, in this order; empty = all."""
    write: bool = False
    """Bring the tables of the repository's pages up to date, and print none."""
    check: bool = False
    """Exit with 1 if a table of the repository's pages is out of date, and print none."""


def main(config: TablesConfig) -> None:
    check_named(config.base, TablesConfig.base, "the outputs of runs")
    if config.write or config.check:
        pages.write(TABLES, PAGES, "python -m runs.tables --write", config.check)
        return
    for number in config.only or BUILDERS:
        table = BUILDERS[number](config.base).table()
        if config.format == "markdown":
            print(table.markdown(), end="\n\n")
        else:
            table.show(TERMINAL)


if __name__ == "__main__":
    run(main, TablesConfig)
