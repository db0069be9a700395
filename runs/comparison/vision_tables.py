"""Tables 1 to 5 of the paper beside ours: methods, the vision models' size, accuracy and speed."""

from collections.abc import Iterable

from gka.kinds import KINDS
from runs.comparison import measured
from runs.comparison.measured import FinishedRun, Sources
from runs.paper import published
from runs.paper.cells import alone, compare, italic, percent
from runs.paper.deit import DEFAULT_KIND, SOFTMAX_TARGET
from runs.paper.published import table
from runs.table import NOT_RUN, Row, Table

Cell = tuple[str, str, float | None]  # measure, the paper's figure, ours


def related_methods(sources: Sources) -> Table:
    """The paper's words; what was measured of these methods is on a page of its own."""
    columns, printed = published.TABLES["related_methods"]["columns"], published.rows("related_methods")
    rows = [
        [method, columns[key], italic(word), "", ""] for method, words in printed.items() for key, word in words.items()
    ]
    return table("related_methods", rows, ["Measured here: docs/related-methods.md."], [], about="Method", words=5)


def training_command(label: str) -> str:
    """The command that trains a row of the vision tables."""
    paper_name, size = label.split("-")
    kind = measured.KIND_OF[paper_name]
    suffix = {DEFAULT_KIND: "", "softmax": f"-{SOFTMAX_TARGET}"}.get(kind, f"-{kind}")
    return f"make train-deit-{size.lower()}{suffix} DATA=/imagenet NGPU={measured.GPUS}"


def vision_numbers(label: str, runs: list[FinishedRun]) -> dict[str, float | None]:
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


def vision(name: str, sources: Sources, others: Iterable[Row] = ()) -> Table:
    """Tables 2, 3 and 5. others: rows of other runs."""
    runs, rows, commands = sources.runs(), [], []
    columns = published.TABLES[name]["columns"]
    for label, printed in published.rows(name).items():
        numbers = vision_numbers(label, runs)
        for key, heading in columns.items():
            if key == "projections":
                letters = f"{KINDS[measured.KIND_OF[label.split('-')[0]]].input_projections}O"
                ours = ", ".join(f"W_{letter}" for letter in letters)
                same = printed[key].startswith(ours)
                rows.append([label, heading, italic(printed[key]), ours, "" if same else "differs"])
            elif key in printed:
                rows.append([label, heading, *compare(printed[key], numbers[key])])
        if "top1" in printed and numbers["top1"] is None:
            commands.append(training_command(label))
    remarks = ["Our sizes are MiB of the bare weights."] if "size" in columns else []
    if "top1" in columns:
        remarks.append("Our top-1 is of averaged weights, and only of a finished run of this model and recipe.")
    return sources.remark(table(name, [*rows, *others], remarks, commands))


def main_results(sources: Sources) -> Table:
    """With the other vision runs of BASE below."""
    columns, rows = published.TABLES["main_results"]["columns"], []
    printed = published.rows("main_results")["DeiT-Ti"]  # how many digits
    for run in sources.other_runs("top1"):
        flops, top1 = run.metrics.get("flops"), run.metrics.get("ema_top1", run.metrics["top1"])
        numbers = {"params": run.metrics["parameters"] / 1e6, "gflops": flops and flops / 1e9, "top1": top1}
        for key, value in numbers.items():
            rows += [[run.name, columns[key], "", alone(value, printed[key]), ""]] if value is not None else []
    return vision("main_results", sources, rows)


def efficiency(sources: Sources) -> Table:
    return vision("efficiency", sources)


def ablation(sources: Sources) -> Table:
    return vision("ablation", sources)


def runtime(sources: Sources) -> Table:
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
        f"The paper's training rates of 1 GPU are its totals over {gpus} GPUs divided by {gpus}.",
        f"{where} Our totals are of short trainings, loading of images included; the trainer has no unfused form.",
    ]
    totals = [row[3] for row in rows if f"{gpus} GPUs" in row[1]]
    shares = [row[3] for row in rows if f"{gpus} GPUs" not in row[1]]
    commands = ["python -m runs.bench.deit"] if NOT_RUN in shares else []
    if NOT_RUN in totals:
        short = f"--batch-size {64 * gpus} --epochs 1 --warmup-epochs 0 --model-tag ti-64"
        commands.append(f'make train-deit-ti DATA=/imagenet NGPU={gpus} ARGS="{short}"')
    return table("runtime", rows, remarks, commands)


def runtime_cells(
    label: str, role: str, printed: dict[str, str], benchmark: measured.Runtime | None, runs: list[FinishedRun]
) -> list[Cell]:
    """What a model's row group of table 4 has."""
    gpus = measured.GPUS
    batch, line = (benchmark.best_inference(label, role) if benchmark else None) or (None, {})
    cells: list[Cell] = [
        ("inference: img/s, 1 GPU", printed["inference"], line.get("items_per_second")),
        ("inference: batch", printed["batch"], batch),
        ("inference: MB", printed["inference_memory"], line.get("peak_mib")),
    ]
    for size in (64, 128):
        line = (benchmark.line(label, size, "training", role) if benchmark else None) or {}
        total, training = printed[f"training_{size}"], f"training bs {size}:"
        if role != "unfused":
            cells.append((f"{training} img/s, {gpus} GPUs", total, measured.total_rate(label, size, runs)))
        cells.append((f"{training} img/s, 1 GPU", f"{int(total) / gpus:.0f}", line.get("items_per_second")))
        cells.append((f"{training} MB, 1 GPU", printed[f"memory_{size}"], line.get("peak_mib")))
    return cells
