"""Claims about parameters, FLOPs and checkpoints of the vision models (tables 1, 2, 3 and 5)."""

from gka import attention_cost
from gka.kinds import KINDS
from runs.paper import measured, published
from runs.paper.evidence import COUNTS, PRINTED, Finding, follows, holds
from runs.paper.paper_table import percent

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


def no_input_projections() -> Finding:
    kind = KINDS["gka"]
    text = f"Input projections: {kind.input_projections or 'none'}; of softmax {KINDS['softmax'].input_projections}."
    return holds(not kind.input_projections, COUNTS, text)


def parameters_fall() -> Finding:
    falls = _falls("parameters")
    return follows(all(23 <= round(fall) <= 25 for fall in falls.values()), COUNTS, f"Less: {_listed(falls)}.")


def flops_fall() -> Finding:
    falls = _falls("flops")
    return follows(all(21 <= round(fall) <= 24 for fall in falls.values()), COUNTS, f"Less: {_listed(falls)}.")


def attention_falls() -> Finding:
    falls = _falls("attention")
    return follows(all(round(fall) == 75 for fall in falls.values()), COUNTS, f"Less: {_listed(falls)}.")


def mlp_unchanged() -> Finding:
    costs = _costs().values()
    same = all(deit.mlp == gka.mlp for deit, gka in costs)
    same &= all(deit.parameters - gka.parameters == deit.attention - gka.attention for deit, gka in costs)
    return follows(same, COUNTS, "The whole difference of parameters is the attention modules'." if same else "")


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


def accuracy_gaps() -> Finding:
    top1 = {name: float(row["top1"]) for name, row in published.rows("main_results").items()}
    gaps = {size: top1[f"DeiT-{size}"] - top1[f"GKA-{size}"] for size in SIZES}
    true = round(gaps["Ti"], 2) == 0.66 and round(gaps["S"], 2) == 1.57
    return follows(true, PRINTED, f"Points: {_listed(gaps, unit='')}; the text names Ti and S alone.")


def vlt_gain() -> Finding:
    printed = {name: float(row["top1"]) for name, row in published.rows("ablation").items()}
    gain = printed["VLT-Ti"] - printed["DeiT-Ti"]
    return follows(round(gain, 1) == 1.3, PRINTED, f"{gain:+.1f} points as printed; who trained what is another claim.")


def batch_and_rate() -> Finding:
    batch = measured.GPUS * 256
    rate = 1e-3 * batch / 1024
    return follows(
        batch == 1792, PRINTED, f"{measured.GPUS} x 256 = {batch:,}, so the peak learning rate is {rate:.2e}."
    )


# Complexity


def _layer(tokens: int, window: int | None = None):
    return attention_cost("gka", 768, 12, tokens, window=window)


def _operator_flops(tokens: int, window: int | None = None) -> int:
    """Scores and mixing, without W_O."""
    return _layer(tokens, window).flops - 2 * tokens * 768**2


def quadratic_time() -> Finding:
    ratio = _operator_flops(4096) / _operator_flops(2048)
    return follows(ratio == 4, "cost model", f"Twice the tokens: {ratio:.2f}x the FLOPs of scores and mixing.")


def windowed_time() -> Finding:
    ratio = _operator_flops(4096, 256) / _operator_flops(2048, 256)
    return follows(ratio == 2, "cost model", f"Twice the tokens in windows of 256: {ratio:.2f}x the FLOPs.")


def quadratic_memory() -> Finding:
    """Of the operator as such: a fused one moves O(B N D) bytes and never has W."""
    matrix = _layer(4096).matrix_bytes / _layer(2048).matrix_bytes
    fused = _layer(4096).operator_bytes / _layer(2048).operator_bytes
    text = f"Twice the tokens: {matrix:.0f}x the bytes of W, but {fused:.0f}x those of a fused operator, without W."
    return follows(fused == matrix, "cost model: not of a fused operator; true of an unfused one", text)
