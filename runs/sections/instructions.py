"""The table of instruction counts: plain flash attention beside the Gaussian kernels, as compiled and never timed."""

from collections import Counter

from runs.bench import instruction_counts
from runs.sections.sources import table
from trainkit_gka.results import read_results

COLUMNS = {  # heading -> the classes that it adds up
    "2^s": ("mufu",),
    "float32 arithmetic": ("multiply_add", "compare"),
    "conversions": ("convert",),
    "shared memory": ("shared",),
    "all": ("total",),
}
NORMS = {"causal": "GKA, constant norms", "full": "GKA, general norms"}


def instructions() -> str:
    """Instructions of all threads for each pair of query and key, a pass's kernels added up; products in units of D;
    bytes of the pass for each token and head.
    """
    passes: dict[tuple, Counter] = {}
    for record in read_results(instruction_counts.FILE):
        config, metrics = record["config"], record["metrics"]
        if config["attention"] == "softmax" and config["mask"] == "full":
            continue  # the loop over whole tiles is the causal kernel's
        key = config["phase"], config["head_dim"], config["capability"], config["attention"], config["mask"]
        counts = passes.setdefault(key, Counter())
        counts.update(metrics["whole"])
        counts.update({name: metrics[name] for name in ("bytes_read", "bytes_written")})
        newest = record
    rows = []
    for (phase, head_dim, capability, attention, mask), counts in sorted(passes.items(), key=order):
        label = attention if attention == "softmax" else NORMS[mask]
        numbers = [f"{sum(counts[name] for name in names):.1f}" for names in COLUMNS.values()]
        moved = [f"{counts[name]:,.0f}" for name in ("bytes_read", "bytes_written")]
        products = f"{counts['products'] / head_dim:.3g}"
        rows.append([f"{phase}, D = {head_dim}, sm_{capability}", label, products, *numbers, *moved])
    headings = ["", "attention", "products", *COLUMNS, "bytes read", "bytes written"]
    versions = f"Triton {newest['config']['triton']}, ptxas {newest['config']['ptxas']}"
    source = f"\nCounted {newest['date'][:10]} at commit {newest['commit']}, {versions} for the newest architecture"
    return table(headings, rows, left=2) + f"{source} (`runs/results/{instruction_counts.FILE.name}`)."


def order(item: tuple[tuple, Counter]) -> tuple:
    """Forward first, then by head size and architecture; softmax first."""
    (phase, head_dim, capability, attention, mask), _ = item
    return phase != "forward", head_dim, capability, attention == "GKA", mask
