"""The table of text generation."""

from gka.kinds import KINDS
from runs import frames
from runs.table import Table, measured

GKA = KINDS["gka"].label
DECODERS = {
    "softmax": KINDS["softmax"].label,
    "gka": GKA,
    "gka-normalised": f"{GKA}, values normalised (not the paper's)",
    "gka-keys": "the same, keys kept",
}


def decode() -> list[Table]:
    """Tokens per second of whole models while they generate, and what their caches hold, for each hardware."""
    tables, lines = [], frames.bench("gpt")
    for _, of_hardware in lines[lines.phase.str.startswith("decode")].groupby("hardware", sort=False):
        rows = []
        for case, timed in of_hardware.groupby("case"):
            speeds = timed.pivot(index="candidate", columns="phase", values="items_per_second")
            caches = timed[timed.phase == "decode-8"].set_index("candidate").cache_mib
            if not DECODERS.keys() <= set(caches.index):
                continue  # measured of other forms than these
            for kind, label in DECODERS.items():
                said = [f"{speeds[phase][kind]:,.0f}" for phase in ("decode-1", "decode-8")]
                rows.append([f"{case}, {label}", f"{caches[kind]:.1f} MiB", *said])
        if rows:
            headings = ["", "cache, 8 rows", "tokens/s, 1 row", "tokens/s, 8 rows"]
            tables.append(
                Table.of(headings, rows, sources=[measured(list(of_hardware.record), of_hardware.file.iloc[0])])
            )
    return tables
