"""What the study and the benchmarks found, in sentences whose numbers and verdicts come from the result files.

A difference whose interval holds 0 is called not significant; so a new row can change a word, not only a number.
"""

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from nanochat_gka.accounting import AccountingConfig, account
from runs import frames
from runs.examples.text_classifier import FILE as CLASSIFIER
from runs.examples.text_classifier import TextClassifierConfig
from runs.examples.text_classifier import records_of as records_of_classifier
from runs.study.families import ALL, PRESET, RIVAL, WIDE_HEADS, shape_of
from runs.study.grid import CONTROL, DEEPER, HALF, LONGER, LONGEST, scaled_places
from runs.study.scores import Place, Scores, family_of, probed_models
from runs.study.speed import speeds_of
from runs.study.statistics import Interval, common_seeds
from runs.study.vision.families import FEWER_EPOCHS, SHORTER_SOFTMAX, planned
from runs.study.vision.images import IMAGES, setting_of
from runs.study.vision.scores import results_of, rows_of
from runs.tables.study import ROWS, interval_of
from runs.tables.study_equal import other_places, three_ways
from runs.tables.study_vision import best_offsets

TEXT = ROWS / "text_large.jsonl"
OFFSETS, PAPER, SOFTMAX = "GKA + offsets", "GKA", "softmax"
BARE_NORM, BARE_NORM_CHANNELS = "GKA, norm without weight", "GKA, norm without weight, channel bandwidths"
NAMES = {
    HALF: "GKA with head offsets, and value embeddings in every second layer as softmax has them,",
    PRESET: "The preset, GKA with head offsets, value embeddings in every second layer as softmax has them, a "
    "bandwidth for every channel and a gate for every head,",
    CONTROL: "softmax with the same offsets",
    OFFSETS: "GKA with head offsets",
    SOFTMAX: "nanochat's softmax",
}
FEWEST_SEEDS = 3  # of which an interval says something
BITS, POINTS = " bits per byte", " points"


def standing(
    difference: Interval | None, other: str = "", unit: str = BITS, form: str = ".3f", less_wins: bool = True
) -> str:
    """Where something stands that has this difference from another: behind it, ahead of it, or neither.

    other: what it is called; without it the sentence has said so.
    """
    if difference is None:
        return f"not compared with {other or 'it'} yet"
    value, low, high = difference.value, difference.low, difference.high
    behind, ahead = (f"behind {other}", f"ahead of {other}") if other else ("behind", "ahead")
    place = behind if (value > 0) == less_wins else ahead
    if low != low:  # one seed has no interval
        return f"{abs(value):{form}}{unit} {place} (one seed)"
    if low <= 0 <= high:
        words = f"not significantly different from {other}" if other else "not significantly different"
        return f"{words} ({value:+{form}} [{low:+{form}}, {high:+{form}}]{unit})"
    ends = sorted((abs(low), abs(high)))
    return f"{abs(value):{form}} [{ends[0]:{form}}, {ends[1]:{form}}]{unit} {place}"


def verdict(difference: Interval | None) -> str:
    """Of a loss minus another, in a word."""
    if difference is None or difference.low != difference.low:
        return "open"
    return "behind" if difference.low > 0 else "ahead" if difference.high < 0 else "level"


def gain(difference: Interval | None) -> str:
    """What something gives: bits per byte that it takes away, with their interval, and whether that settles it."""
    if difference is None:
        return "an amount not measured yet"
    value, low, high = -difference.value, -difference.high, -difference.low
    if low != low:
        return f"{value:.3f} (one seed)"
    settled = " (not significant)" if low <= 0 <= high else " (a rise)" if value < 0 else ""
    return f"{value:.3f} [{low:.3f}, {high:.3f}]{settled}"


class Study:
    """The finished rows of the text that pages speak of."""

    def __init__(self, path: Path = TEXT):
        self.scores, self.speeds = Scores.read(path), speeds_of(path.parent)

    def over(self, name: str, other: str, place: Place) -> Interval | None:
        """A family's loss minus another's."""
        return self.scores.over(ALL[name], ALL[other], place)

    def against(self, name: str, other: str, place: Place) -> str:
        """Where a family stands at equal tokens."""
        return standing(self.over(name, other, place), NAMES[other])

    def ways(self, name: str, other: str, place: Place) -> list[Interval | None]:
        """The same at equal tokens, equal FLOPs and equal time."""
        return three_ways(self.scores, self.speeds, name, other, place)

    def best_stands(self, words: str) -> str:
        """Where GKA stands beside softmax with the same offsets, bandwidths and gates, after the longest training."""
        tokens, _, time = self.ways(PRESET, RIVAL, LONGEST)
        return f"{standing(tokens, words)} at equal tokens, and {standing(time)} at equal time"

    def loss_of(self, name: str) -> str:
        """A family's loss after the longest training."""
        result = self.scores.at(ALL[name], LONGEST)
        return f"{result.mean:.3f}" if result else "a loss not measured yet"

    def counted(self, name: str) -> str:
        """How often the best form that has rows everywhere leads at equal time, over sizes and budgets with seeds."""
        words = [verdict(self.ways(HALF, CONTROL, place)[2]) for place in other_places() if self.at_both(place)]
        counts = {word: words.count(word) for word in ("ahead", "level", "behind")}
        said = ", ".join(f"{word} in {count}" for word, count in counts.items())
        total = sum(counts.values())
        where = f"At the {total} sizes and budgets where shorter trainings tell equal time, over several seeds,"
        return f"{where} {name} is {said}."

    def at_both(self, place: Place) -> bool:
        """Whether both are finished there."""
        return all(self.scores.at(ALL[name], place) for name in (HALF, CONTROL))


def tokens_of(place: Place) -> str:
    return f"2^{place['tokens'].bit_length() - 1} tokens"


# Text


def text_quality(study: Study) -> str:
    """The verdict on text, for the front page, whose table has the numbers of the preset."""
    tokens, _, time = map(verdict, study.ways(PRESET, CONTROL, LONGEST))
    elsewhere = {}  # of every other depth, after its longest training whose time can be compared
    for place in scaled_places():
        at_time = study.ways(PRESET, CONTROL, place)[2]
        if place["depth"] != LONGEST["depth"] and verdict(at_time) != "open":
            elsewhere[place["depth"]] = f"with {place['depth']} layers the preset is {standing(at_time)}"
    return (
        f"**Text.** With four layers and {tokens_of(LONGEST)} of books the paper's form is "
        f"{standing(study.over(PAPER, SOFTMAX, LONGEST), NAMES[SOFTMAX])}. The preset is {tokens} with "
        f"{NAMES[CONTROL]} after as many tokens, and {time} after as much time on a CPU. At equal time softmax has the "
        f"number of layers that is best for it: {', '.join(elsewhere.values())}. Six layers are too many for so few "
        "tokens, for softmax too."
    )


def paper_form(study: Study) -> str:
    """Question 1."""
    short, long = LONGER[0], LONGER[-1]
    sigmas = [result.sigma_squared for place in (short, long) if (result := study.scores.at(ALL[PAPER], place))]
    return (
        f"**It is {verdict(study.over(PAPER, SOFTMAX, LONGEST))}.** With four layers it is "
        f"{study.against(PAPER, SOFTMAX, DEEPER)} after {tokens_of(DEEPER)}, and "
        f"{standing(study.over(PAPER, SOFTMAX, LONGEST), 'it')} after {tokens_of(LONGEST)}. Its kernel opens towards a "
        f"mean of all tokens: with two layers the median σ² is {sigmas[0]:,.0f} after {tokens_of(short)} and "
        f"{sigmas[-1]:,.0f} after {tokens_of(long)}, and its loss is then "
        f"{standing(study.over(PAPER, 'causal mean', long), 'that of such a mean in its place')}."
    )


def repair(study: Study) -> str:
    """Question 2."""
    given = gain(study.over(OFFSETS, "GKA unrotated", LONGER[0]))
    long = standing(study.over(OFFSETS, SOFTMAX, LONGEST), "it")
    return (
        f"**Head offsets**: each head pairs the key of a token with the value of its neighbour. They lower the loss of "
        f"GKA (values not rotated) by {given} bits per byte with two layers, and that of softmax by "
        f"{gain(study.over(CONTROL, SOFTMAX, LONGER[0]))} ({tokens_of(LONGER[0])}). They cost no parameters and no "
        f"FLOPs. With four layers GKA with them is {study.against(OFFSETS, SOFTMAX, DEEPER)} after "
        f"{tokens_of(DEEPER)}, and {long} after {tokens_of(LONGEST)}."
    )


def recommended(study: Study) -> str:
    """Question 3."""
    ways = study.ways(HALF, CONTROL, LONGEST)
    words = [verdict(way) for way in ways]
    tokens, flops, time = (standing(way, NAMES[CONTROL] if not place else "it") for place, way in enumerate(ways))
    return (
        f"**At equal tokens {words[0]}, at equal FLOPs {words[1]}, at equal time {words[2]}.** {NAMES[HALF]} is "
        f"{tokens} at equal tokens, {flops} at equal FLOPs, and {time} at equal time on the CPU that was timed, each "
        f"with the fastest kernel there (four layers, {tokens_of(LONGEST)}). "
        f"{study.counted('this GKA')}"
    )


def learned(study: Study) -> str:
    """Question 4: bandwidths of channels and gates of heads, at four layers."""
    helps = verdict(study.over(PRESET, HALF, DEEPER)) == "ahead"
    answer = "No, for text with head offsets" if helps else "Not settled"
    return (
        f"**{answer}.** A bandwidth for every channel lowers the loss of {NAMES[HALF]} by "
        f"{gain(study.over(f'{HALF} + channels', HALF, DEEPER))} bits per byte, and by "
        f"{gain(study.over(PRESET, HALF, DEEPER))} together with a gate for every head. Both lower that of "
        f"{NAMES[CONTROL]} by {gain(study.over(RIVAL, CONTROL, DEEPER))} (four layers, {tokens_of(DEEPER)}). "
        f"With both on both sides GKA is {study.best_stands('softmax')} ({tokens_of(LONGEST)})."
    )


def wide_heads(study: Study) -> str:
    """Question 4: heads of 128 channels in place of 64, of the preset and of its rival."""
    own, rival = WIDE_HEADS
    stands = standing(study.over(own, rival, LONGEST), "softmax with the same offsets, bandwidths, gates and heads")
    longer = [gain(study.over(one, narrow, LONGEST)) for one, narrow in ((own, PRESET), (rival, RIVAL))]
    return (
        f"Heads of 128 channels, half as many, lower the loss of the preset by another "
        f"{gain(study.over(own, PRESET, DEEPER))} bits per byte, and that of softmax with the same by "
        f"{gain(study.over(rival, RIVAL, DEEPER))} (four layers, {tokens_of(DEEPER)}). With four times the tokens the "
        f"gains are {' and '.join(longer)}, and the preset is {stands} at equal tokens. At depth 20 all forms have "
        "heads of 128."
    )


def with_length(study: Study) -> str:
    """Question 4: how the preset's lead at equal tokens changes with the budget, at every depth."""
    leads = {}
    for place in scaled_places():
        if lead := study.over(PRESET, CONTROL, place):
            leads.setdefault(place["depth"], []).append(lead)
    ends = {depth: (own[0], own[-1]) for depth, own in leads.items()}
    shrinks = all(abs(last.value) < abs(first.value) for first, last in ends.values())

    def lead(difference: Interval) -> str:
        return f"{-difference.value:.3f}" + (" (one seed)" if difference.low != difference.low else "")

    said = ", ".join(f"{lead(first)} to {lead(last)} with {depth} layers" for depth, (first, last) in ends.items())
    return (
        f"The preset's lead over {NAMES[CONTROL]}, at equal tokens, {'shrinks' if shrinks else 'changes'} as training "
        f"gets longer: from the shortest to the longest trainings from {said}."
    )


def kernel_or_offset(study: Study) -> str:
    """Question 5: the Gaussian beside other things in its place."""
    place = LONGER[0]
    lost = {name: study.over(f"offsets, {name}", OFFSETS, place) for name in ("fixed sigma", "causal mean")}
    tied = standing(study.over("offsets, tied softmax", OFFSETS, place), "the Gaussian kernel")
    said = {name: "" if one is None else interval_of(one, ".3f") for name, one in lost.items()}
    return (
        f"**No; its width counts.** Softmax over the same dot products, without the keys' norms, is {tied}. Bandwidths "
        f"that stay where they start cost {said['fixed sigma']} bits per byte, a mean of all earlier tokens "
        f"{said['causal mean']} (two layers, {tokens_of(place)}, GKA with head offsets)."
    )


def heads(study: Study) -> str:
    """Question 6: what models gain on the second half of a repeated sequence."""
    gains: dict[str, list[float]] = {}
    right = 0.0
    for trial, record in probed_models(study.scores.folder):
        if trial and (trial.depth, trial.tokens) == (LONGEST["depth"], LONGEST["tokens"]):
            family = family_of(trial)
            gains.setdefault(family, []).append(record["metrics"]["induction"]["gain"])
            if family in (CONTROL, OFFSETS, HALF, SOFTMAX, PAPER):
                right = max(right, record["metrics"]["induction"]["accuracy"])
    said = {name: f"{min(values):.1f} to {max(values):.1f}" for name, values in gains.items()}
    return (
        f"**With head offsets they begin to copy.** When a row of random tokens comes a second time, its loss falls by "
        f"so many nats a token (four layers, {tokens_of(LONGEST)}): softmax with offsets {said[CONTROL]}, GKA with "
        f"offsets {said[OFFSETS]}, with value embeddings in half of its layers {said[HALF]}; without offsets "
        f"softmax {said[SOFTMAX]} and GKA {said[PAPER]}. It is a beginning: the right token is the most likely one in "
        f"{right:.1%} of places at most."
    )


# Images


def images_quality(folder: Path = ROWS) -> str:
    """The verdict on images, for the front page: of CIFAR-10, which has most of them."""
    results = results_of(rows_of(folder)["cifar10"])
    letters = best_offsets(results)
    return (
        f"**Images.** On CIFAR-10 (six layers of width 96, 8 epochs; top-1) GKA has "
        f"{beside_in_images(results, 'GKA', SOFTMAX)}; VLT, which is softmax without W_V, has "
        f"{beside_in_images(results, 'VLT', SOFTMAX)}. With spatial offsets (`{letters}`: heads take the value of a "
        f"neighbouring patch) GKA has "
        f"{beside_in_images(results, f'GKA + {letters}', f'softmax + {letters}', ' with the same')}."
    )


def image_sentences(folder: Path = ROWS) -> str:
    """Beside the table of question 7: softmax of fewer epochs, norms without weight, and what is not finished."""
    told = []
    for rows in rows_of(folder).values():
        name, results = rows[-1]["data"]["images"], results_of(rows)
        if shorter := beside_in_images(results, "GKA", SHORTER_SOFTMAX, " after 6 epochs"):
            softmax, gka = results[SHORTER_SOFTMAX], results["GKA"]
            setting = setting_of(name)
            epochs = FEWER_EPOCHS[SHORTER_SOFTMAX]["epochs"] / setting.epochs
            share = epochs * gka.images_per_second / softmax.images_per_second
            told.append(f"On {IMAGES.get(name, name)} GKA has {shorter}, which takes {share:.2f} of GKA's time.")
        told += filter(None, [of_norms(rows)])
        if not beside_in_images(results, "GKA", SOFTMAX):
            count = f"{len(rows)} of {planned(setting_of(name))}"
            told.append(f"On {IMAGES.get(name, name)} {count} trainings are finished: no answer yet.")
    return "\n\n".join(told)


def of_norms(rows: list[dict]) -> str:
    """What the norm's weight, which scales distances channel by channel, gives on a set of images; empty before both
    forms without it have three seeds.
    """
    results, name = results_of(rows), rows[-1]["data"]["images"]
    bare = beside_in_images(results, BARE_NORM, "GKA", " with the weight", whose="GKA's")
    channels = beside_in_images(results, BARE_NORM_CHANNELS, BARE_NORM, " without them", whose="the")
    if not bare or not channels:
        return ""
    return (
        f"The weight of the norm before attention is a bandwidth for every channel. On {IMAGES.get(name, name)} GKA "
        f"without it has {bare}; with learned channel bandwidths in its place {channels}."
    )


def beside_in_images(results: dict, own: str, other: str, words: str = "", whose: str = "softmax's") -> str:
    """How two forms compare on a set of images, or "" before they share seeds enough."""
    ours, rival = results.get(own), results.get(other)
    seeds = common_seeds([ours.losses, rival.losses]) if ours and rival else []
    if len(seeds) < FEWEST_SEEDS:
        return ""
    ours, rival = ours.of_seeds(seeds), rival.of_seeds(seeds)
    place = standing(ours.over(rival), f"{whose} {rival.mean:.1f} %{words}", POINTS, ".1f", less_wins=False)
    return f"{ours.mean:.1f} % ({len(seeds)} seeds), {place}"


def classifier() -> str:
    """BERT on docstrings."""
    records = records_of_classifier(frames.RESULTS / CLASSIFIER, TextClassifierConfig())
    rows = pd.DataFrame([record["config"]["case"] | record["metrics"] for record in records])
    by_seed = rows.pivot(index="seed", columns="attention", values="accuracy")
    leads = by_seed["gka"] > by_seed["softmax"]
    order = (
        "ahead with every seed" if leads.all() else "ahead with some seeds" if leads.any() else "behind with every seed"
    )
    gka, softmax = (f"{100 * by_seed[kind].mean():.1f} %" for kind in ("gka", "softmax"))
    ends = f"{100 * by_seed['gka'].min():.1f} to {100 * by_seed['gka'].max():.1f}"
    return (
        f"**Classifying text.** In one example, BERT trained from scratch on docstrings, the paper's form is {order} "
        f"({gka}, from {ends} over {len(by_seed)} seeds, against softmax's {softmax}; "
        f"[the example](runs/README.md#an-example-on-text)). Head offsets were not "
        "tried there."
    )


# Cost and speed


def cost() -> str:
    """Parameters and FLOPs at the paper's depth, by the project's accounting."""
    counted = {name: account(AccountingConfig(depth=20, **shape_of(name))) for name in (SOFTMAX, PAPER, PRESET)}

    def shares(name: str) -> str:
        own, base = counted[name], counted[SOFTMAX]
        return f"{own['parameters'] / base['parameters']:.2f}x the parameters and " + (
            f"{own['flops_per_token'] / base['flops_per_token']:.2f}x the FLOPs per token"
        )

    return (
        f"**Cost.** At depth 20 GKA, with head offsets or without, has {shares(PAPER)} of nanochat's softmax; the "
        f"preset, which has value embeddings too, has {shares(PRESET)}."
    )


def speed() -> str:
    """The verdict on speed, for the front page."""
    operator, models = _ratios("attention", "forward+backward")[0], _of_models()
    on_cpus = (
        f"**Speed.** On server CPUs with AVX-512, on one or two threads in float32, attention of the paper's form is "
        f"{_range(operator, 'float32')} as fast as the fastest softmax attention in PyTorch, forward and backward, and "
        f"a training step of a whole model {_range(models, 'float32')} ([benchmarks](runs/README.md#benchmarks))."
    )
    return " ".join([on_cpus, *map(_on_gpu, _gpus())])


def _gpus() -> list[pd.DataFrame]:
    """The lines of every GPU."""
    lines = frames.bench("attention")
    return [own for _, own in lines[lines.threads.isna()].assign(threads=0).groupby("machine")]


def _on_gpu(lines: pd.DataFrame) -> str:
    """Attention on a GPU, against the fastest of torch and against its default."""
    left_out = lines.case.str.startswith(("decode", "padded"))
    both = lines[(lines["dtype"] == "bfloat16") & ~left_out & (lines.phase == "forward+backward")]
    return (
        f"On an {lines.machine.iloc[0]} in bfloat16, forward and backward, it is {_of_cases(both)} as fast as the "
        f"fastest, and "
        f"{_of_cases(both, 'flash')} as fast as torch's default, FlashAttention-2; whole models were not timed there "
        "([measured in 15 minutes](gka/impl/triton/README.md#measured-on-a-gpu))."
    )


def speed_on_cpus() -> str:
    """What the CPU kernel gains over torch's softmax attention, in the bare operator and in training steps; then what
    is left of it on machines that are held to older instructions.
    """
    operator, held = _ratios("attention", "forward+backward")
    models, forward_held = _of_models(), _ratios("attention", "forward")[1]

    def machines(dtype: str) -> str:
        timed = pd.concat([operator, models]).xs(dtype, level="dtype").index.unique("machine")
        whole = [name for name in timed if not any(other.startswith(f"{name} ") for other in timed)]
        return ", ".join(name.replace("(R)", "") for name in whole)

    return (
        f"Over all cases but padded batches and decoding, on one thread and on two: in float32 "
        f"({machines('float32')}) the operator, forward and backward, is {_range(operator, 'float32')} as fast as the "
        f"fastest softmax attention in PyTorch, a training step of a whole model {_range(models, 'float32')}; in "
        f"bfloat16 ({machines('bfloat16')}) {_range(operator, 'bfloat16')} and {_range(models, 'bfloat16')}."
    ) + "".join(
        f" On an {machine.replace('(R)', '')}, as CPUs without AVX-512 are, the operator is "
        f"{_range(held.loc[[machine]], 'float32', 2)} as fast, forward alone "
        f"{_range(forward_held.loc[[machine]], 'float32', 2)}."
        for machine in held.index.unique("machine")
    )


def _of_models() -> pd.Series:
    """Softmax's time over ours, of training steps."""
    return pd.concat([_ratios("deit", "training")[0], _ratios("gpt", "training")[0]])


def _of_cases(timed: pd.DataFrame, kernel: str = "") -> str:
    """The smallest and largest of softmax's time over ours; with `kernel` of that one's."""
    if kernel:
        timed = timed[(timed.family == "gka") | (timed.kernel == kernel)]
    ratios = pd.concat([frames.ratios(own) for _, own in timed.groupby(["case", "phase"])])
    return f"{ratios.min():.1f} to {ratios.max():.1f} times"


def _ratios(benchmark: str, phase: str) -> tuple[pd.Series, pd.Series]:
    """Softmax's time over ours on CPUs, for every machine, case of a phase and number of threads: of machines as they
    are, and of those that are held to older instructions.
    """
    lines, keys = frames.bench(benchmark), ["machine", "case", "dtype"]
    left_out = lines.case.str.startswith(("sweep", "padded", "decode"))
    timed = lines[(lines.phase == phase) & lines.threads.notna() & ~left_out]
    ratios = pd.concat({key: frames.ratios(own) for key, own in timed.groupby(keys)}, names=keys)
    held = ratios.index.get_level_values("machine").str.contains("held to")
    return ratios[~held], ratios[held]


def _range(ratios: pd.Series, dtype: str, digits: int = 1) -> str:
    own = ratios.xs(dtype, level="dtype")
    return f"{own.min():.{digits}f} to {own.max():.{digits}f} times (median {own.median():.{digits}f})"


def of_text(sentence: Callable[[Study], str]) -> Callable[[], str]:
    return lambda: sentence(Study())


SENTENCES: dict[str, Callable[[], str]] = {
    "text-quality": of_text(text_quality),
    "images-quality": images_quality,
    "classifier": classifier,
    "cost": cost,
    "speed": speed,
    "speed-cpus": speed_on_cpus,
    "study-paper-form": of_text(paper_form),
    "study-repair": of_text(repair),
    "study-recommended": of_text(recommended),
    "study-learned": of_text(learned),
    "study-wide-heads": of_text(wide_heads),
    "study-with-length": of_text(with_length),
    "study-kernel": of_text(kernel_or_offset),
    "study-heads-sentence": of_text(heads),
    "study-images-sentence": image_sentences,
}
