"""The tables of the operator's errors: every route, and the CPU kernel beside plain PyTorch."""

from runs.bench import error
from runs.table import Table, measured

OUTPUTS = {"y": "y", "dx": "dx", "dkeys": "dkeys", "dvalues": "dvalues", "dlog_sigma": "dlogσ"}


def errors() -> list[Table]:
    """The relative errors of every operator route, float32 beside bfloat16; the worse of the masks."""
    records = error.records("routes")
    paired: dict[tuple[str, str], list[dict]] = {}
    for record in records:
        paired.setdefault((record["config"]["features"], record["config"]["route"]), []).append(record["metrics"])
    rows = []
    for names, (single, half) in paired.items():
        sizes = [f"{single[name]:.0f}" for name in ("max_norm2_over_sigma2", "log_sigma_condition")]
        off = [one[name] for one in (single, half) for name in ("y", "dx", "dlog_sigma")]
        rows.append([*names, *sizes, *("NaN" if value is None else f"{value:.0e}" for value in off)])
    outputs = [f"{dtype} {name}" for dtype in ("fp32", "bf16") for name in ("y", "dx", "dlogσ")]
    headings = ["features", "route", "max x²/σ²", "cond", *outputs]
    return [Table.of(headings, rows, words=2, sources=[measured(records, error.FILE.name)])]


def cpu_errors() -> list[Table]:
    """The CPU kernel beside plain PyTorch in float32: over many small cases, and in a few with long rows among them."""
    swept, cases = error.records("sweep"), error.records("cases")
    rows = []
    for config, shown in ((record["config"], record["metrics"]) for record in swept):
        name = config["output"]
        plain, cpu = (
            [one["metrics"][name] for one in cases if one["config"]["route"] == route and name in one["metrics"]]
            for route in error.BOTH
        )
        times = max(ours / theirs for ours, theirs in zip(cpu, plain, strict=True))
        small = [f"{shown['median']:.2f}", f"{shown['most']:.2f}", f"{shown['above_1']} of {config['cases']:,}"]
        rows.append([OUTPUTS[name], *small, shown["worst"], f"{times:.2f}", f"{max(cpu):.1e}"])
    headings = ["times plain PyTorch's error", "median", "most", "above 1", "where it is most"]
    count = len({record["config"]["case"] for record in cases})
    headings += [f"most of {count} cases", f"largest error of {count} cases"]
    return [Table.of(headings, rows, sources=[measured(swept + cases, error.FILE.name)])]
