"""Claims about parameters, FLOPs and checkpoints of the vision models (tables 1, 2, 3 and 5)."""

from gka import attention_cost
from gka.kinds import KINDS
from gka.masking import Mask
from runs.paper import measured, published
from runs.paper.cells import percent
from runs.paper.evidence import COUNTS, PRINTED, Finding, follows, holds

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


def projections_share() -> Finding:
    falls = {name: _falls(name) for name in ("parameters", "flops")}
    text = f"Of DeiT's parameters {_listed(falls['parameters'])}; of its FLOPs {_listed(falls['flops'])}."
    return follows(min(min(values.values()) for values in falls.values()) > 20, COUNTS, text)


def largest_reduction() -> Finding:
    """Of table 5's three variants; the drop in accuracy is the printed figures'."""
    deit, printed, less = measured.cost("DeiT-Ti"), published.rows("ablation"), {}
    for kind in ("VLT", "GKA"):
        cost = measured.cost(f"{kind}-Ti")
        less[kind] = -percent(cost.parameters, deit.parameters), -percent(cost.flops, deit.flops)
    drops = [float(printed[f"{kind}-Ti"]["top1"]) - float(printed["GKA-Ti"]["top1"]) for kind in ("DeiT", "VLT")]
    counts = ", ".join(f"{kind} {pair[0]:.1f} % parameters and {pair[1]:.1f} % FLOPs" for kind, pair in less.items())
    drop = f"The printed drop is {drops[0]:.2f} points from DeiT-Ti, {drops[1]:.2f} from VLT-Ti"
    true = all(gka > vlt for gka, vlt in zip(less["GKA"], less["VLT"]))
    return follows(true, f"{COUNTS}; not the accuracy", f"Less than DeiT-Ti: {counts}. {drop}.")


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


def windowed_memory() -> Finding:
    """The entries that equation 7 leaves; the dense matrix that it writes has all of them."""
    allowed = [int(Mask(causal=True, window=255).dense(tokens, tokens, "cpu").sum()) for tokens in (2048, 4096)]
    fused = _layer(4096, 256).operator_bytes / _layer(2048, 256).operator_bytes
    grows = allowed[1] / allowed[0]
    text = f"Twice the tokens: {grows:.2f}x the entries in windows of 256, {fused:.0f}x the bytes of a fused operator,"
    text = f"{text} but 4x the bytes of a dense matrix that is masked, as equation 7 writes it."
    return follows(grows < 2.2, "allowed entries", text)


def quadratic_memory() -> Finding:
    """Of an unfused operator: a fused one moves O(B N D) bytes and never has W."""
    matrix = _layer(4096).matrix_bytes / _layer(2048).matrix_bytes
    fused = _layer(4096).operator_bytes / _layer(2048).operator_bytes
    text = f"Twice the tokens: {matrix:.0f}x the bytes of W, {fused:.0f}x those of a fused operator, which never has W."
    return follows(matrix == 4, "cost model of an unfused operator", text)
