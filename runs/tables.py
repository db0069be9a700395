"""Write the measured tables of the READMEs from the result files, so that no number is typed by hand.

python -m runs.tables            rewrite the pages
python -m runs.tables --check    exit with 1 if a page is not what the result files say
"""

import argparse
import re
import sys
from pathlib import Path

from deit_gka.model.accounting import vit_cost
from deit_gka.model import registry as models
from nanochat_gka.core_metric.bundle import CORE_SIZES, PAPER_TASKS
from nanochat_gka.core_metric.published import GPT2_ACCURACY, PAPER_EXAMPLES
from nanochat_gka.core_metric.report import Score, aggregate, error_of_mean, paper_score, score_of
from runs.bench import operator_error
from runs.bench import results as bench_results
from runs.demo import vision as demo_vision
from runs.demo.__main__ import STEPS, VARIANTS, run_tag
from runs.demo.report import COLUMNS, PAPER, PAPER_VISION
from trainkit.progress import read_lines
from trainkit.results import read_results

ROOT = Path(__file__).resolve().parents[1]
DEMO_RESULTS = ROOT / "runs" / "results" / "demo.jsonl"
VISION_RESULTS = ROOT / "runs" / "results" / "demo_vision.jsonl"
CORE_RESULTS = ROOT / "runs" / "results" / "core"
DECODERS = {
    "softmax": "softmax",
    "gka": "GKA",
    "gka-normalised": "GKA, values normalised (ours)",
    "gka-keys": "the same, keys kept",
}
SIZES = {"Ti": "tiny", "S": "small", "B": "base"}
KINDS = {"DeiT": "softmax", "VLT": "vlt", "GKA": "gka"}


def demo_table() -> str:
    """The last demo's models, measured (of an older demo those that are the same today); then the paper's, as printed."""
    found = {record["config"]["model_tag"]: record for record in read_lines(DEMO_RESULTS)}
    records = {label: found[run_tag(name)] for name, (label, _) in VARIANTS.items() if run_tag(name) in found}
    lines = [f"| | {' | '.join(heading for heading, _ in COLUMNS.values())} |", "|---|" + "---:|" * len(COLUMNS)]
    for label, record in records.items():
        lines.append(
            f"| **{label}** | {' | '.join(form.format(record['metrics'][key]) for key, (_, form) in COLUMNS.items())} |"
        )
    for label, row in PAPER.items():
        lines.append(
            f"| *paper, depth 20: {label}* | {' | '.join(f'*{row[key]}*' if key in row else '' for key in COLUMNS)} |"
        )
    return "\n".join([*lines, measured(next(reversed(records.values())), "demo.jsonl")])


def measured(record: dict, file: str) -> str:
    """Where a table's numbers come from."""
    return f"\nMeasured {record['date'][:10]} at commit {record['commit']} on {record['hardware']}, torch {record['torch']} (`runs/results/{file}`)."


def vision_table() -> str:
    """The demo's micro-ViTs on digits: mean over seeds and half their range."""
    records: dict[str, list[dict]] = {}
    for record in read_lines(VISION_RESULTS):
        records.setdefault(record["label"], []).append(record)
    lines = [f"| | {' | '.join(demo_vision.HEADINGS)} |", "|---|" + "---:|" * len(demo_vision.HEADINGS)]
    lines += [
        f"| **{label}** | {' | '.join(demo_vision.cells([run['metrics'] for run in runs]))} |"
        for label, runs in records.items()
    ]
    return "\n".join([*lines, measured(next(reversed(records.values()))[-1], "demo_vision.jsonl")])


def sizes_table() -> str:
    """Parameters and FLOPs of the paper's vision models, counted here, beside the paper's accuracies."""
    lines = [
        "| | command | parameters | attention | sigma | GFLOPs | weights, MiB | *paper: top-1* |",
        "|---|---|" + "---:|" * 6,
    ]
    for label, figures in PAPER_VISION.items():
        kind, size = label.split("-")
        shape = models.SIZES[SIZES[size]]
        cost = vit_cost(KINDS[kind], shape["embed_dim"], shape["depth"], shape["num_heads"])
        suffix = {"DeiT": "-base", "VLT": "-vlt", "GKA": ""}[kind]
        lines.append(f"| {label} | `make train-deit-{size.lower()}{suffix}` | {cost.parameters:,} | {cost.attention:,} | {cost.bandwidths or ''} | "
                     f"{cost.flops / 1e9:.2f} | {cost.raw_mib:.1f} | *{figures['top1']}* |")  # fmt: skip
    return "\n".join(lines)


def bench_table() -> str:
    """Whole models and the operator, softmax's fastest over ours, a row for each hardware's newest comparisons."""
    lines = ["| | softmax | GKA | speed-up |", "|---|---:|---:|---:|"]
    for path in sorted(bench_results.RESULTS.glob("bench_deit_*.jsonl")):
        hardware = path.stem.removeprefix("bench_deit_")
        compared = {}
        for what in ("deit", "gpt", "attention"):
            compared |= bench_results.load(bench_results.RESULTS, what, hardware)
        for (case, phase), comparison in compared.items():
            theirs, ours = (comparison.fastest(role) for role in ("baseline", "ours"))
            if theirs and ours and not case.startswith("sweep") and not phase.startswith("decode"):
                times = [f"{line['metrics']['median_ms']:,.4g} ms" for line in (theirs, ours)]
                lines.append(f"| {case}, {phase} | {times[0]} | {times[1]} | {comparison.ratio():.2f}x |")
        record = next(iter(compared.values())).lines[0]
        lines.append(measured(record, f"bench_*_{hardware}.jsonl"))
    return "\n".join(lines)


def core_table() -> str:
    """The demo's models on the paper's six tasks, centred, beside published figures, all with their standard errors."""
    paths = {label: CORE_RESULTS / f"{run_tag(name)}_step{STEPS:06d}.jsonl" for name, (label, _) in VARIANTS.items()}
    found = {label: read_results(path) for label, path in paths.items() if path.exists()}
    records = {
        label: {line["config"]["task"]: line for line in lines if line.get("kind") == "core"}
        for label, lines in found.items()
    }
    headings = [*records, "*GPT-2 124M*", "*paper: base*", f"*paper: GKA, n = {PAPER_EXAMPLES[1]}*"]
    lines = [
        f"| centred, ± standard error | examples | {' | '.join(headings)} |",
        "|---|" + "---:|" * (len(headings) + 1),
    ]
    columns: list[list[Score]] = [[] for _ in headings]
    for task in PAPER_TASKS:
        ours = [score_of(task, each[task]["metrics"]) for each in records.values()]
        baseline = ours[0].baseline
        gpt2 = Score(task, GPT2_ACCURACY[task][0], baseline, 0, CORE_SIZES[task])
        row = [*ours, gpt2, *(paper_score(task, model, baseline) for model in range(2))]
        for column, score in zip(columns, row):
            column.append(score)
        cells = [f"{score.centered:.4f} ± {score.standard_error:.3f}" for score in row]
        lines.append(f"| {task} | {ours[0].examples} | {' | '.join(italic(cells, len(ours)))} |")
    means = [
        f"{aggregate(column)[1]:.4f} ± {error_of_mean([score.standard_error for score in column]):.3f}"
        for column in columns
    ]
    cells = [f"**{cell}**" for cell in means[: len(records)]] + italic(means, len(records))[len(records) :]
    lines.append(f"| **mean** | | {' | '.join(cells)} |")
    newest = list(records["softmax"].values())[-1]
    return "\n".join([*lines, measured(newest, "core/*.jsonl")])


def italic(cells: list[str], first: int) -> list[str]:
    """The cells from number `first` on, which others published, in italics."""
    return [*cells[:first], *(f"*{cell}*" for cell in cells[first:])]


def decode_table() -> str:
    """Tokens per second of whole models while they generate, and what their caches hold, for each hardware."""
    lines = ["| | cache, 8 rows | tokens/s, 1 row | tokens/s, 8 rows |", "|---|---:|---:|---:|"]
    for path in sorted(bench_results.RESULTS.glob("bench_gpt_*.jsonl")):
        hardware = path.stem.removeprefix("bench_gpt_")
        compared = bench_results.load(bench_results.RESULTS, "gpt", hardware)
        for case in sorted({case for case, phase in compared if phase == "decode-8"}):
            one, eight = (
                {line["config"]["candidate"]: line["metrics"] for line in compared[case, phase].lines}
                for phase in ("decode-1", "decode-8")
            )
            if not DECODERS.keys() <= eight.keys():
                continue  # of other kinds than these
            for kind, label in DECODERS.items():
                speeds = [f"{metrics[kind]['items_per_second']:,.0f}" for metrics in (one, eight)]
                lines.append(f"| {case}, {label} | {eight[kind]['cache_mib']:.1f} MiB | {' | '.join(speeds)} |")
            lines.append(measured(compared[case, "decode-8"].lines[0], path.name))
    return "\n".join(lines)


def scorer_table() -> str:
    """The CORE scorer's speed, the newest line of every model and task, for each hardware."""
    lines = ["| examples/s, six tasks | one prompt at a time | one example at a time | batched | beginnings shared | over by prompt | over by example |",
             "|---|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    for path in sorted(bench_results.RESULTS.glob("bench_core_*.jsonl")):
        newest = {
            (record["config"]["model"], record["config"]["vocab_size"], record["config"]["task"]): record
            for record in read_lines(path)
        }
        models = {run_tag(name) for name in VARIANTS}
        for model, vocabulary in dict.fromkeys(
            (model, vocabulary) for model, vocabulary, _ in newest if model in models
        ):
            found = [
                record["metrics"] for (name, size, _), record in newest.items() if (name, size) == (model, vocabulary)
            ]
            examples = sum(metrics["examples"] for metrics in found)
            seconds = {how: sum(metrics["seconds"][how] for metrics in found) for how in found[0]["seconds"]}
            speeds = " | ".join(f"{examples / value:,.0f}" for value in seconds.values())
            gains = " | ".join(f"{seconds[how] / min(seconds.values()):.1f}x" for how in ("by prompt", "by example"))
            lines.append(f"| {model}, vocabulary {vocabulary:,} | {speeds} | {gains} |")
        lines.append(measured(next(reversed(newest.values())), path.name))
    return "\n".join(lines)


def errors_table() -> str:
    """Errors of every operator route."""
    return operator_error.markdown([record["metrics"] for record in read_lines(operator_error.RESULTS)])


PAGES = {
    "README.md": {
        "demo": demo_table,
        "vision": vision_table,
        "sizes": sizes_table,
        "bench": bench_table,
        "core": core_table,
        "decode": decode_table,
        "scorer": scorer_table,
    },
    "gka/README.md": {"errors": errors_table},
}


def render(page: str, text: str) -> str:
    """`text` with every `<!-- table:NAME -->` ... `<!-- /table -->` block of the page filled."""
    for name, table in PAGES[page].items():
        try:
            block = f"<!-- table:{name} -->\n{table()}\n<!-- /table -->"
        except (KeyError, IndexError, StopIteration, TypeError) as error:
            sys.exit(
                f"error: the results behind the table {name} of {page} are not whole ({error!r}); make them again, or git checkout runs/results"
            )
        text, count = re.subn(
            rf"<!-- table:{name} -->.*?<!-- /table -->", lambda _, block=block: block, text, flags=re.DOTALL
        )
        if count != 1:
            sys.exit(f"error: {page} needs one block <!-- table:{name} --> ... <!-- /table -->, it has {count}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="do not write; exit with 1 if a page is out of date")
    config = parser.parse_args()
    for page in PAGES:
        text = (ROOT / page).read_text()
        rendered = render(page, text)
        if not config.check:
            (ROOT / page).write_text(rendered)
        elif text != rendered:
            sys.exit(f"{page} is out of date: run python -m runs.tables")


if __name__ == "__main__":
    main()
