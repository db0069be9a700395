"""The paper's tables 1 to 8 beside ours: rows of text, and under each table what was not run and how to run it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gka import attention_cost
from gka.kinds import KINDS
from nanochat_gka.core_metric.bundle import PAPER_TASKS
from nanochat_gka.core_metric.published import PAPER_MEAN
from nanochat_gka.core_metric.report import Score, aggregate, error_of_mean
from runs.paper import core_scores, measured, published
from runs.paper.deit import DEFAULT_KIND, SOFTMAX_TARGET
from runs.paper.paper_table import NOT_RUN, PaperTable, Row, compare, percent, signed

BUILT = {"Standard Attention": "softmax", "GKA": "gka"}  # methods of table 1 that this project has
LAYER = (192, 3, 197)  # width, heads and tokens of size Ti, for table 1
HEADINGS = ["Model", "Measure", "Paper", "Ours", "Ours - paper"]


@dataclass(frozen=True)
class Sources:
    """Where ours come from."""

    base: Path = Path("out")
    results: Path = measured.RESULTS

    def runs(self) -> list[measured.FinishedRun]:
        return measured.finished_runs(self.base, self.results)


def table(name: str, headings: Row, rows: list[Row], remarks: Row, commands: Row, **more: Any) -> PaperTable:
    """The published table `name` with its own title and notes. commands: those that fill what was not run."""
    about = published.TABLES[name]
    notes = [*about["notes"], *remarks]
    return PaperTable(about["number"], about["caption"], headings, rows, notes, list(dict.fromkeys(commands)), **more)


def training_command(label: str) -> str:
    """The command that trains a row of the vision tables."""
    paper_name, size = label.split("-")
    kind = measured.KIND_OF[paper_name]
    suffix = {DEFAULT_KIND: "", "softmax": f"-{SOFTMAX_TARGET}"}.get(kind, f"-{kind}")
    return f"make train-deit-{size.lower()}{suffix} DATA=/imagenet NGPU={measured.GPUS}"


# Tables


def related_methods(sources: Sources) -> PaperTable:
    dim, heads, tokens = LAYER
    softmax, rows = attention_cost("softmax", dim, heads, tokens), []
    for method, text in published.rows("related_methods").items():
        cells = [method, text["kernel"], text["projections"], text["domain"], text["notes"]]
        if method in BUILT:
            kind = KINDS[BUILT[method]]
            ours = attention_cost(kind.name, dim, heads, tokens)
            relative = signed(percent(ours.parameters, softmax.parameters), 1)
            cells += [kind.input_projections or "none", f"{ours.parameters:,}", f"{ours.flops / 1e6:.1f}", relative]
        rows.append(cells + ["not built"] * (9 - len(cells)))
    headings = ["Method", "Kernel type", "QKV projection", "Domain", "Notes", "Ours: projections"]
    headings += ["Ours: parameters of a layer", "Ours: MFLOPs of a layer", "Parameters against softmax, %"]
    remark = f"Ours: one layer of width {dim}, {heads} heads, {tokens} tokens; the other methods are not built here."
    return table("related_methods", headings, rows, [remark], [], text_columns=6, paper_columns=frozenset(range(1, 5)))


def vision_numbers(label: str, runs: list[measured.FinishedRun]) -> dict[str, float | None]:
    """Every number of a row of tables 2, 3 and 5; top-1 is None until its run has finished."""
    cost, base = measured.cost(label), measured.cost(f"DeiT-{label.split('-')[1]}")
    run = measured.vision_run(label, runs)
    return {
        "params": cost.parameters / 1e6,
        "attention": cost.attention / 1e6,
        "mlp": cost.mlp / 1e6,
        "sigma": cost.bandwidths,
        "gflops": cost.flops / 1e9,
        "size": cost.raw_mib,
        "delta_params": percent(cost.parameters, base.parameters),
        "delta_attention": percent(cost.attention, base.attention),
        "delta_flops": percent(cost.flops, base.flops),
        "top1": run.metrics["ema_top1"] if run else None,
    }


def vision(name: str, sources: Sources) -> PaperTable:
    """Tables 2, 3 and 5."""
    runs, rows, commands = sources.runs(), [], []
    columns = published.TABLES[name]["columns"]
    for label, printed in published.rows(name).items():
        numbers = vision_numbers(label, runs)
        for key, heading in columns.items():
            if key == "projections":
                letters = f"{KINDS[measured.KIND_OF[label.split('-')[0]]].input_projections}O"
                ours = ", ".join(f"W_{letter}" for letter in letters)
                rows.append([label, heading, printed[key], ours, "" if printed[key].startswith(ours) else "differs"])
            elif key in printed:
                rows.append([label, heading, *compare(printed[key], numbers[key])])
        if "top1" in printed and numbers["top1"] is None:
            commands.append(training_command(label))
    remarks = ["Our sizes are MiB of the bare weights."] if "size" in columns else []
    if "top1" in columns:
        remarks.append("Our top-1 is of averaged weights, and only of a finished run of this model and recipe.")
    return table(name, HEADINGS, rows, remarks, commands)


def main_results(sources: Sources) -> PaperTable:
    return vision("main_results", sources)


def efficiency(sources: Sources) -> PaperTable:
    return vision("efficiency", sources)


def ablation(sources: Sources) -> PaperTable:
    return vision("ablation", sources)


def runtime(sources: Sources) -> PaperTable:
    """Training rates as the paper's total over its GPUs and a GPU's share; GKA fused and as the paper's."""
    benchmark, runs, gpus, rows = measured.runtime(sources.results), sources.runs(), measured.GPUS, []
    for label, printed in published.rows("runtime").items():
        for role in measured.ROLES_OF[measured.KIND_OF[label.split("-")[0]]]:
            cells = runtime_cells(label, role, printed, benchmark, runs)
            name = f"{label}, unfused" if role == "unfused" else label
            rows += [[name, measure, *compare(paper, ours)] for measure, paper, ours in cells]
    where = f"Ours: {benchmark.hardware}." if benchmark else "No GPU has run ours yet."
    remarks = [
        "Our GKA is fused; unfused it builds W as the paper's does. The paper's figures stand beside both.",
        f"The paper's training rates per GPU are its totals over {gpus} GPUs divided by {gpus}.",
        f"{where} Our totals are of short trainings, loading of images included; the trainer has no unfused form.",
    ]
    totals = [row[3] for row in rows if "total" in row[1]]
    commands = ["python -m runs.bench.deit"] if any(r[3] == NOT_RUN and "total" not in r[1] for r in rows) else []
    if NOT_RUN in totals:
        short = f"--batch-size {64 * gpus} --epochs 1 --warmup-epochs 0 --model-tag ti-64"
        commands.append(f'make train-deit-ti DATA=/imagenet NGPU={gpus} ARGS="{short}"')
    return table("runtime", HEADINGS, rows, remarks, commands)


Cell = tuple[str, str, float | None]


def runtime_cells(
    label: str, role: str, printed: dict[str, str], benchmark: measured.Runtime | None, runs: list[measured.FinishedRun]
) -> list[Cell]:
    """What a model's row group of table 4 has: measure, the paper's figure, ours."""
    gpus = measured.GPUS
    batch, line = (benchmark.best_inference(label, role) if benchmark else None) or (None, {})
    cells: list[Cell] = [
        ("inference img/s, 1 GPU", printed["inference"], line.get("items_per_second")),
        ("inference batch", printed["batch"], batch),
        ("inference MB", printed["inference_memory"], line.get("peak_mib")),
    ]
    for size in (64, 128):
        line = (benchmark.line(label, size, "training", role) if benchmark else None) or {}
        total, rate = printed[f"training_{size}"], f"training img/s, {size} a GPU"
        if role != "unfused":
            cells.append((f"{rate}, total of {gpus}", total, measured.total_rate(label, size, runs)))
        cells.append((f"{rate}, per GPU", f"{int(total) / gpus:.0f}", line.get("items_per_second")))
        cells.append((f"training MB, {size} a GPU", printed[f"memory_{size}"], line.get("peak_mib")))
    return cells


LANGUAGE_COMMANDS = {
    "nanochat_base": f"make pretrain-d20-base NGPU={measured.GPUS}",
    "GKA": f"make pretrain-d20 NGPU={measured.GPUS}",
}


def bpb(sources: Sources) -> PaperTable:
    runs, rows, commands = sources.runs(), [], []
    for model, printed in published.rows("bpb").items():
        run = measured.language_run(model, runs)
        for key, heading in published.TABLES["bpb"]["columns"].items():
            rows.append([model, heading, *compare(printed[key], run.metrics.get(key) if run else None)])
        if run is None:
            commands.append(LANGUAGE_COMMANDS[model])
    return table("bpb", HEADINGS, rows, [], commands)


def compute(sources: Sources) -> PaperTable:
    """Counts alone; the ratios are those in the text beside the table."""
    counts = {model: measured.language_counts(model) for model in measured.RECIPES}
    columns, rows = published.TABLES["compute"]["columns"], []
    for model, printed in published.rows("compute").items():
        numbers = {**counts[model], "parameters": counts[model]["parameters"] / 1e6}
        rows += [[model, columns[key], *compare(printed[key], float(numbers[key]))] for key in columns]
    base, gka = counts.values()
    for key, printed in published.TABLES["compute"]["ratios"].items():
        rows.append(["GKA / nanochat_base", columns[key], *compare(printed, gka[key] / base[key])])
    return table("compute", HEADINGS, rows, [], [])


def with_error(value: float, error: float, sign: str = "") -> str:
    return f"{value:{sign}.4f} ± {error:.3f}"


def core_subset(sources: Sources) -> PaperTable:
    """Centred scores with standard errors, each from the number of examples that its column used."""
    runs, scores, commands = sources.runs(), {}, []
    for model in measured.RECIPES:
        scores[model] = measured.core_scores(model, measured.language_run(model, runs), sources.base, sources.results)
        if not scores[model].keys() >= set(PAPER_TASKS):
            suffix = "" if model == "GKA" else f"-{SOFTMAX_TARGET}"
            commands += [LANGUAGE_COMMANDS[model], f"make eval-core{suffix} NGPU={measured.GPUS}"]
    papers: list[list[Score]] = [[core_scores.printed(task, model) for task in PAPER_TASKS] for model in (0, 1)]
    rows = []
    for task, base, gka in zip(PAPER_TASKS, *papers):
        ours = [scores[model].get(task) for model in measured.RECIPES]
        cells = [
            f"{with_error(score.centered, score.standard_error)} (n = {score.examples:,})" for score in (base, gka)
        ]
        cells.append(with_error(*core_scores.difference(base, gka), "+"))
        cells += [f"{with_error(s.centered, s.standard_error)} (n = {s.examples:,})" if s else NOT_RUN for s in ours]
        both = core_scores.difference(*ours) if all(ours) else None
        cells.append(with_error(*both, "+") if both else NOT_RUN)
        cells.append(signed(both[0] - core_scores.difference(base, gka)[0], 4) if both else "")
        rows.append([task, *cells])
    rows.append(["mean", *_means(papers, [list(scores[model].values()) for model in measured.RECIPES])])
    headings = ["Task", "Paper: base", "Paper: GKA", "Paper: Δ (GKA - base)", "Ours: base", "Ours: GKA"]
    headings += ["Ours: Δ (GKA - base)", "Ours - paper, of Δ"]
    remark = "± is one standard error, from the n of each column; the paper does not state its n, its digits do."
    return table("core_subset", headings, rows, [remark], commands, text_columns=1)


def _means(papers: list[list[Score]], ours: list[list[Score]]) -> Row:
    """The last row: means of the six tasks and their difference."""
    difference = core_scores.mean_difference(*papers)
    errors = [error_of_mean([score.standard_error for score in column]) for column in papers]
    cells = [with_error(value, error) for value, error in zip(PAPER_MEAN, errors)] + [with_error(*difference, "+")]
    six = [[score for task in PAPER_TASKS for score in column if score.label == task] for column in ours]
    complete = [len(column) == len(PAPER_TASKS) for column in six]
    for column, whole in zip(six, complete):
        error = error_of_mean([score.standard_error for score in column]) if whole else 0.0
        cells.append(with_error(aggregate(column)[1], error) if whole else NOT_RUN)
    both = core_scores.mean_difference(*six) if all(complete) else None
    cells.append(with_error(*both, "+") if both else NOT_RUN)
    return [*cells, signed(both[0] - difference[0], 4) if both else ""]


BUILDERS = {
    published.TABLES[builder.__name__]["number"]: builder
    for builder in (related_methods, main_results, efficiency, runtime, ablation, bpb, core_subset, compute)
}
