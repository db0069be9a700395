"""Claims about parameters, FLOPs and checkpoints of the vision models (tables 1, 2, 3 and 5)."""

from runs.comparison import measured
from runs.comparison.evidence import COUNTS, PRINTED, Finding, follows, holds
from runs.paper import published
from runs.paper.cells import percent

SIZES = ("Ti", "S", "B")


def _costs():
    """(DeiT, GKA) of every size."""
    return {size: (measured.cost(f"DeiT-{size}"), measured.cost(f"GKA-{size}")) for size in SIZES}


def _falls(measure: str) -> dict[str, float]:
    """By how many percent GKA has less, from exact counts."""
    return {size: -percent(getattr(gka, measure), getattr(deit, measure)) for size, (deit, gka) in _costs().items()}


def _listed(values: dict[str, float], form: str = ".2f", unit: str = " %") -> str:
    return ", ".join(f"{name} {value:{form}}{unit}" for name, value in values.items())


def one_scalar_a_head() -> Finding:
    counts, true = {}, True
    for size, (_, gka) in _costs().items():
        width = {"Ti": 192, "S": 384, "B": 768}[size]
        layers = gka.bandwidths / (width // 64)
        counts[size] = float(gka.bandwidths)
        true &= gka.attention == layers * (width * width + width) + gka.bandwidths
        true &= published.rows("efficiency")[f"GKA-{size}"]["sigma"] == str(gka.bandwidths)
    return holds(true, COUNTS, f"Beside W_O and its bias there are only the σ: {_listed(counts, '.0f', '')}.")


def parameters_fall() -> Finding:
    falls = _falls("parameters")
    return follows(all(23 <= round(fall) <= 25 for fall in falls.values()), COUNTS, f"Less: {_listed(falls)}.")


def flops_fall() -> Finding:
    falls = _falls("flops")
    return follows(all(21 <= round(fall) <= 24 for fall in falls.values()), COUNTS, f"Less: {_listed(falls)}.")


def attention_falls() -> Finding:
    falls = _falls("attention")
    return follows(all(round(fall) == 75 for fall in falls.values()), COUNTS, f"Less: {_listed(falls)}.")


def differences_of_size_ti() -> Finding:
    printed, falls = published.rows("main_results")["GKA-Ti"], (_falls("parameters")["Ti"], _falls("flops")["Ti"])
    shown = [abs(float(printed[key])) for key in ("delta_params", "delta_flops")]
    same = all(round(fall, 1) == number for fall, number in zip(falls, shown))
    exact = f"Exact counts give -{falls[0]:.2f} and -{falls[1]:.2f} %; the printed ones come from rounded figures."
    return follows(same, f"{COUNTS}, in the last digit", exact)


def checkpoint_of_size_s() -> Finding:
    printed = [float(published.rows("main_results")[f"{name}-S"]["size"]) for name in ("DeiT", "GKA")]
    ours = [cost.raw_mib for cost in _costs()["S"]]
    near = all(abs(one - other) < 0.15 for one, other in zip(printed, ours))
    return follows(near, COUNTS, f"float32 weights: {ours[0]:.2f} and {ours[1]:.2f} MiB, without the file's own bytes.")


def flops_of_deit_s() -> Finding:
    shown = [published.rows(name)["DeiT-S"]["gflops"] for name in ("main_results", "efficiency")]
    exact = _costs()["S"][0].flops / 1e9
    text = f"Table 2 has {shown[0]}, table 3 {shown[1]}; matrix products alone are {exact:.3f}."
    return follows(len(set(shown)) == 1, PRINTED, text)
