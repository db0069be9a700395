"""Claims about the language models: budgets, bits per byte, CORE (tables 6, 7 and 8, section 5)."""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from nanochat_gka.core_metric.bundle import CORE_SIZES, CORE_TASKS, PAPER_TASKS
from nanochat_gka.core_metric.published import PAPER_MEAN
from nanochat_gka.core_metric.report import Score
from runs.comparison import core_scores, measured
from runs.comparison.evidence import COUNTS, DEMO_LANGUAGE, FAILS, PRINTED, UNTESTED, Finding, follows, holds, seen
from runs.demo.language import VARIANTS
from runs.paper import published
from runs.tables.demo import language_records

NOTICEABLE = 2.0  # standard errors
BASE, GKA = core_scores.BASE, core_scores.GKA


@cache
def _counts() -> tuple[dict[str, Any], dict[str, Any]]:
    """Of nanochat_base and GKA at depth 20."""
    base, gka = (measured.language_counts(model) for model in measured.RECIPES)
    return base, gka


def _ratio(key: str) -> float:
    base, gka = _counts()
    return gka[key] / base[key]


@cache
def _finished() -> dict[str, measured.FinishedRun | None]:
    """The depth-20 runs in runs/results."""
    runs = measured.finished_runs(Path("no outputs: the page is of runs/results alone"))
    return {model: measured.language_run(model, runs) for model in measured.RECIPES}


# Table 8


def parameter_ratio() -> Finding:
    ratio = _ratio("parameters")
    return follows(round(ratio, 2) == 0.42, COUNTS, f"{ratio:.4f}x parameters.")


def compute_ratio() -> Finding:
    token, tokens = _ratio("flops_per_token"), _ratio("train_tokens")
    text = f"{_ratio('train_flops'):.4f}x in all: {token:.2f}x for a token, on {tokens:.2f}x"
    return follows(round(_ratio("train_flops"), 2) == 0.49, COUNTS, f"{text} the tokens.")


def both_ratios_in_the_introduction() -> Finding:
    shown = published.TABLES["compute"]["ratios"]["parameters"]
    text = f"FLOPs {_ratio('train_flops'):.2f}x, but parameters {_ratio('parameters'):.2f}x; beside table 8: {shown}x."
    return follows(round(_ratio("parameters"), 2) == 0.49, COUNTS, text)


def parameters_in_millions() -> Finding:
    printed = [int(row["parameters"]) for row in published.rows("compute").values()]
    exact = [counts["parameters"] for counts in _counts()]
    rounded = [round(number / 1e6) for number in exact]
    text = f"{exact[0]:,} and {exact[1]:,}: cut off to {printed[0]}M and {printed[1]}M"
    text = f"{text}; rounded they are {rounded[0]}M and {rounded[1]}M."
    return follows(printed == [number // 10**6 for number in exact], COUNTS, text)


def compute_columns() -> Finding:
    keys, same = ("flops_per_token", "train_tokens", "train_flops"), True
    for counts, row in zip(_counts(), published.rows("compute").values()):
        same &= all(f"{counts[key]:.4e}" == f"{float(row[key]):.4e}" for key in keys)
    tokens = " and ".join(f"{counts['train_tokens']:,}" for counts in _counts())
    return follows(same, COUNTS, f"To every printed digit; {tokens} tokens.")


def budgets_differ() -> Finding:
    """What the text itself grants; the ratio is of tokens to matrices and head."""
    ratios = [counts["train_tokens"] / counts["scaling_parameters"] for counts in _counts()]
    text = (
        f"{ratios[0]:.2f} tokens a scaling parameter for the baseline, {ratios[1]:.2f} for GKA: a confound of its own."
    )
    return follows(round(ratios[0], 2) != round(ratios[1], 2), COUNTS, text)


# Table 6


def _demo(variant: str) -> dict[str, Any]:
    return language_records()[VARIANTS[variant].label]["metrics"]


def gaps_in_the_table() -> Finding:
    rows = published.rows("bpb").values()
    same = all(abs(float(r["val_bpb"]) - float(r["train_bpb"]) - float(r["gap"])) < 1e-9 for r in rows)
    gaps = [float(row["gap"]) for row in rows]
    return follows(same, PRINTED, f"{gaps[0]} and {gaps[1]}: a ratio of {gaps[1] / gaps[0]:.2f}.")


def _pair(key: str) -> tuple[float, float] | None:
    """A metric of our finished depth-20 runs, nanochat_base and GKA; None until both are there."""
    base, gka = _finished().values()
    return (base.metrics[key], gka.metrics[key]) if base and gka else None


def gap_is_much_smaller() -> Finding:
    shown = [float(row["gap"]) for row in published.rows("bpb").values()]
    printed = f"Printed: {shown[1] / shown[0]:.2f}x the baseline's gap, on {_ratio('train_tokens'):.2f}x the tokens."
    if ours := _pair("gap"):
        return holds(ours[1] < 0.5 * ours[0], "depth 20", f"Ours: {ours[0]:.4f} and {ours[1]:.4f} (GKA). {printed}")
    ratio = _demo("gka-paper")["gap"] / _demo("softmax")["gap"]
    text = f"{printed} The demo has {ratio:.2f}x on equal tokens, but sees its corpus more than once."
    return Finding(UNTESTED, "depth 20", text)


def higher_bpb() -> Finding:
    shown = [float(row["val_bpb"]) for row in published.rows("bpb").values()]
    printed = f"Printed: {shown[1] - shown[0]:+.4f}, at less compute."
    if ours := _pair("val_bpb"):
        return holds(ours[1] > ours[0], "depth 20", f"Ours: {ours[0]:.4f} and {ours[1]:.4f} (GKA). {printed}")
    softmax, gka, offsets = (_demo(name)["val_bpb"] for name in ("softmax", "gka-paper", "gka-offsets"))
    text = f"Validation {softmax:.4f} softmax, {gka:.4f} GKA (in the paper's form), on equal tokens. With head offsets,"
    return seen(gka > softmax, DEMO_LANGUAGE, f"{text} which are not the paper's, GKA has {offsets:.4f}. {printed}")


def trains_stably() -> Finding:
    metrics = _demo("gka-paper")
    stable = math.isfinite(metrics["val_bpb"]) and metrics["val_bpb"] == metrics["min_val_bpb"]
    text = f"Ends at {metrics['val_bpb']:.4f} bits per byte, the lowest of its evaluations."
    return seen(stable, DEMO_LANGUAGE, text)


# Table 7


def _difference(task: str) -> tuple[float, float]:
    return core_scores.difference(core_scores.printed(task, BASE), core_scores.printed(task, GKA))


def _errors(*tasks: str) -> str:
    parts = []
    for task in tasks:
        value, error = _difference(task)
        parts.append(f"{task} {value:+.3f} ± {error:.3f} ({abs(value) / error:.1f} standard errors)")
    return f"Printed: {', '.join(parts)}."


def _mean_difference() -> tuple[float, float]:
    columns = [[core_scores.printed(task, model) for task in PAPER_TASKS] for model in (BASE, GKA)]
    return core_scores.mean_difference(*columns)


def _scored() -> list[dict[str, Score]] | None:
    """Our CORE scores of nanochat_base and GKA at depth 20; None while a task is missing."""
    nowhere = Path("no outputs: the page is of runs/results alone")
    steps = [counts["steps"] for counts in _counts()]
    scores = [measured.core_scores(run, step, nowhere) for run, step in zip(_finished().values(), steps)]
    return scores if all(column.keys() >= set(PAPER_TASKS) for column in scores) else None


def _of_core(tasks: tuple[str, ...], true: Callable[[float, float], bool], printed: str, scale: str) -> Finding:
    """Whether `true(difference, standard error)` is so of every task in our scores; untested without them."""
    scores = _scored()
    if scores is None:
        return Finding(UNTESTED, scale, printed)
    pairs = {task: core_scores.difference(scores[BASE][task], scores[GKA][task]) for task in tasks}
    ours = ", ".join(f"{task} {value:+.3f} ± {error:.3f}" for task, (value, error) in pairs.items())
    return holds(all(true(*pair) for pair in pairs.values()), "depth 20", f"Ours: {ours}. {printed}")


def _scale(*differences: tuple[float, float]) -> str:
    """Whether the printed figures alone show a difference."""
    shown = all(abs(value) > NOTICEABLE * error for value, error in differences)
    return "depth 20" if shown else "depth 20; the printed figures do not show it"


def _better(value: float, error: float) -> bool:
    return value > NOTICEABLE * error


def _worse(value: float, error: float) -> bool:
    return value < -NOTICEABLE * error


def improves_two_tasks() -> Finding:
    tasks = ("openbook_qa", "winogrande")
    return _of_core(tasks, _better, _errors(*tasks), _scale(*map(_difference, tasks)))


def lags_on_lambada() -> Finding:
    return follows(_worse(*_difference("lambada_openai")), PRINTED, _errors("lambada_openai"))


def _mean() -> tuple[str, Finding | None]:
    """The printed difference of means in words, and what our scores say of a lower mean."""
    value, error = _mean_difference()
    printed = f"Printed: {PAPER_MEAN[GKA]} - {PAPER_MEAN[BASE]}"
    text = (
        f"{printed} = {value:+.4f} ± {error:.4f}, {abs(value) / error:.1f} standard errors. Of the six tasks the text"
    )
    text = f"{text} names five: winograd, {_difference('winograd')[0]:+.3f}, is left out."
    scores = _scored()
    if scores is None:
        return text, None
    ours = core_scores.mean_difference(*([column[task] for task in PAPER_TASKS] for column in scores))
    return text, holds(_worse(*ours), "depth 20", f"Ours: {ours[0]:+.4f} ± {ours[1]:.4f}. {text}")


def mean_is_modestly_lower() -> Finding:
    text, ours = _mean()
    return ours or Finding(UNTESTED, _scale(_mean_difference()), text)


@cache
def same_examples() -> Finding:
    """Which caps on examples print each column."""
    base, gka = core_scores.fitting_caps(BASE), core_scores.fitting_caps(GKA)
    whole = max(CORE_SIZES[task] for task in PAPER_TASKS)
    right = [core_scores.printed(task, GKA) for task in PAPER_TASKS]
    counts = ", ".join(f"{round(score.accuracy * score.examples)}/{score.examples}" for score in right)
    fit = f"{len(base):,} caps, {'the full tasks among them, ' if whole in base else ''}all from {min(base):,} up"
    caps, least = " or ".join(map(str, gka)), core_scores.CAPS[0]
    text = f"GKA's six scores fit a cap of {caps} examples and no other from {least} to {whole:,}"
    text = f"The tasks are shared, the examples are not: {text} ({counts}); the baseline's fit {fit}."
    return follows(bool(set(base) & set(gka)), PRINTED, text)


def competitive_on_core() -> Finding:
    """Competitive: not noticeably lower."""
    text, ours = _mean()
    if ours:
        return holds(ours.verdict == FAILS, ours.scale, ours.measured)
    return Finding(UNTESTED, "depth 20", f"{text} These are {len(PAPER_TASKS)} of CORE's {len(CORE_TASKS)} tasks.")
