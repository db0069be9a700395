"""The grid as data: groups of trials that each answer a question.

A group is a function of the finished trials: seeds are trained at the best rate of their family, which the first group
finds. A new question is a function here and its line in `GROUPS`.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from runs.study.families import (
    ALL,
    CHANNELS,
    FAMILIES,
    FURTHER,
    HYBRIDS,
    IDEAS,
    KERNELS,
    LEARNED,
    PATTERNS,
    PRESET,
    REFERENCES,
    REPAIRS,
    RIVAL,
    VALUE_EMBEDS,
    WIDE_HEADS,
    WITHOUT,
    Family,
    fits_depth,
)
from runs.study.rates import (
    DEEPEST,
    RATES,
    SMALLEST,
    Done,
    around_one,
    around_the_best,
    best_at_the_deepest,
    best_rate,
    rate_to_train,
    tried_rates,
)
from runs.study.trials import Trial

SEEDS = (0, 1, 2)
FIRST_SEED = SEEDS[:1]
LONGER = [dict(depth=2, tokens=tokens) for tokens in (2**20, 2**21, 2**22)]
DEEPER = dict(depth=4, tokens=2**20)


TRAINED_LONGER = {name: FAMILIES[name] for name in ("softmax", "GKA", "GKA unrotated", "GKA + offsets")}
HEADLINE = ("softmax", "softmax + offsets", "GKA", "GKA + offsets")
HALF = "GKA + offsets + half VE"
CONTROL = "softmax + offsets"
CONTENDERS = (
    PRESET,
    RIVAL,
    "GGGA + offsets + channels + gates",
    "GKA + offsets + half VE + channels",
)
REPEATED = (*HEADLINE, "GGGA + offsets")  # with more seeds at four layers and above
SCALED = (*HEADLINE, "VLT + offsets", "softmax without VE", "GGGA + offsets", "GGGGGA + offsets")
# Three budgets at every size; the deeper two, which cost more, are trained half as long.
SHORT, LONG = (2**19, 2**20, 2**21), (2**20, 2**21, 2**22)
BUDGETS = {2: LONG, 4: LONG, 6: SHORT, 8: SHORT}
# Muon's step takes a quarter of the time at depth 8 and 4,096 tokens a step; the trainer scales rates to the batch.
BATCH_AT_DEPTH = {2: 2048, 4: 2048, 6: 4096, 8: 4096}


def rates(done: Done) -> list[Trial]:
    """Which learning rate is best for each family, at the smallest size?"""
    return _at_every_rate(FAMILIES, done)


def seeds(done: Done) -> list[Trial]:
    """How much does each family's best vary over seeds?"""
    return _at_best_rate(FAMILIES, done, [SMALLEST])


def further_rates(done: Done) -> list[Trial]:
    """The same as rates, for other value embeddings and VLT."""
    return _at_every_rate(FURTHER, done)


def further_seeds(done: Done) -> list[Trial]:
    """The same as seeds, for other value embeddings and VLT."""
    return _at_best_rate(FURTHER, done, [SMALLEST])


def depth_4(done: Done) -> list[Trial]:
    """Do families, repairs and kernels keep their order at four layers? `HEADLINE` and a hybrid with three seeds."""
    all_once = _at_best_rate({**FAMILIES, **HYBRIDS, **REPAIRS, **KERNELS}, done, [DEEPER], FIRST_SEED)
    return [*all_once, *_at_best_rate(_repeated(), done, [DEEPER], SEEDS[1:])]


def longer(done: Done) -> list[Trial]:
    """What does training longer do to the paper's form, to sigma in it, and to what it is compared with?"""
    references = _at_best_rate(REFERENCES, done, LONGER, FIRST_SEED)
    return _seeds_in_turn([*_at_best_rate(TRAINED_LONGER, done, LONGER), *references])


def longer_families() -> dict[str, Family]:
    """What is trained longer, and compared with the paper's form."""
    return TRAINED_LONGER | REFERENCES


def sizes(done: Done) -> list[Trial]:
    """How does the loss fall with compute, at four depths and three budgets? Other groups have the seeds."""
    others = {name: ALL[name] for name in SCALED if name not in REPEATED}
    families = (_repeated(), others)
    return [trial for some in families for trial in _at_best_rate(some, done, scaled_places(), FIRST_SEED)]


def scaled_places() -> list[dict]:
    """Sizes and budgets of `sizes`, with the tokens of a step."""
    return [
        dict(depth=depth, tokens=tokens, batch=BATCH_AT_DEPTH[depth])
        for depth, budgets in BUDGETS.items()
        for tokens in budgets
    ]


LONGEST = max(scaled_places(), key=lambda place: (place["tokens"], place["depth"]))


def largest_rates(done: Done) -> list[Trial]:
    """Is the transferred rate still best at the largest size? Half and twice of it, and beyond as in `tried_rates`."""
    return [trial for name in SCALED for trial in around_the_best(ALL[name], DEEPEST, done)]


def deeper_rates(done: Done) -> list[Trial]:
    """The same at four layers, for `REPEATED`."""
    return [trial for family in _repeated().values() for trial in around_the_best(family, DEEPER, done)]


def sizes_seeds(done: Done) -> list[Trial]:
    """How much does `sizes` vary over seeds? `largest-seeds` answers it for `DEEPEST`."""
    return _at_best_rate(_repeated(), done, [place for place in scaled_places() if place != DEEPEST], SEEDS[1:])


def largest_seeds(done: Done) -> list[Trial]:
    """Does the order at the largest size hold over seeds, each family at its best rate of `largest-rates`?"""
    best = [best_at_the_deepest(family, done) for family in _repeated().values()]
    return [replace(trial, seed=seed) for seed in SEEDS[1:] for trial in best if trial]


def _repeated() -> dict[str, Family]:
    return {name: ALL[name] for name in REPEATED}


def value_embeds(done: Done) -> list[Trial]:
    """How much are value embeddings at four layers, in none, half or all of them and in a hybrid's softmax layer?"""
    in_few = {name: ALL[name] for names in VALUE_EMBEDS.values() for name in names[:2]}
    in_few |= {name: ALL[name] for name in ("GGGA + offsets", "GGGA + offsets without VE")}
    in_every = {names[2]: ALL[names[2]] for names in VALUE_EMBEDS.values()}
    return [*_at_best_rate(in_few, done, [DEEPER]), *_at_best_rate(in_every, done, [DEEPER], FIRST_SEED)]


def value_embeds_longer(done: Done) -> list[Trial]:
    """Does GKA with as many value embeddings keep up in longer training? Six layers have more seeds at 2^20 only."""
    few_layers = [place for place in scaled_places() if place["depth"] <= DEEPER["depth"]]
    six_layers = [place for place in scaled_places() if place["depth"] == 6]
    half = {HALF: ALL[HALF]}
    longest_first = _at_best_rate(half, done, few_layers[::-1])
    longest_first += _at_best_rate(half, done, six_layers[::-1], FIRST_SEED)
    more_seeds = [place for place in six_layers if place["tokens"] == SMALLEST["tokens"]]
    return [*longest_first, *_at_best_rate(half, done, more_seeds, SEEDS[1:])]


def sigma_starts(done: Done) -> list[Trial]:
    """Where should sigma^2 start, in the paper's form and with offsets (head_dim is 64)?"""
    starts = [dict(SMALLEST, sigma_squared=value) for value in (1.0, 4.0, 16.0, 64.0, 256.0)]
    families = {name: FAMILIES[name] for name in ("GKA", "GKA unrotated", "GKA + offsets")}
    return _at_best_rate(families, done, starts, FIRST_SEED)


def windows(done: Done) -> list[Trial]:
    """What do half windows in three layers of four cost?"""
    families = {name: FAMILIES[name] for name in ("softmax", "GKA", "GKA + offsets")}
    return _at_best_rate(families, done, [dict(DEEPER, window_pattern=name) for name in ("L", "SSSL")], FIRST_SEED)


def offset_patterns(done: Done) -> list[Trial]:
    """Which pattern of heads is best, at four layers with four heads?"""
    family = FAMILIES["GKA + offsets"]
    rate = best_rate(family, done)
    patterns = ("P", "S", "N", "PS", "PPS", "PSS", "PNS", "PNSS")
    settings = [{**family, "head_offsets": "" if pattern == "N" else pattern} for pattern in patterns]
    # Without offsets sigma^2 would start elsewhere.
    shared = dict(DEEPER, sigma_squared=16.0, rate=rate)
    return [Trial(**shared, **setting) for setting in settings] if rate else []


def further_offsets(done: Done) -> list[Trial]:
    """Do offsets of several tokens, or others in other layers, give more than `PS`?"""
    return _at_best_rate(PATTERNS, done, [DEEPER])


def reference_rates(done: Done) -> list[Trial]:
    """The same as rates, for no attention, the causal mean and the previous token."""
    return _at_every_rate(REFERENCES, done)


def repair_rates(done: Done) -> list[Trial]:
    """The same as rates, for KV shift, token shift, Canon and partial offset, on GKA and on softmax."""
    return _at_every_rate(REPAIRS, done)


def repairs(done: Done) -> list[Trial]:
    """Which is the least that repairs GKA, and what does it do for softmax?"""
    return _at_best_rate(REPAIRS, done, [SMALLEST])


def kernel_rates(done: Done) -> list[Trial]:
    """The same as rates, for GKA + offsets without its kernel."""
    return _at_every_rate(KERNELS, done)


def kernels(done: Done) -> list[Trial]:
    """How much is the offset and how much the kernel?"""
    return _at_best_rate(KERNELS, done, [SMALLEST])


def precision(done: Done) -> list[Trial]:
    """Does bfloat16 change the loss? The same trials in float32."""
    families = {name: FAMILIES[name] for name in ("softmax", "GKA", "GKA + offsets")}
    return _at_best_rate(families, done, [dict(SMALLEST, dtype="float32")])


def channel_rates(done: Done) -> list[Trial]:
    """How fast should channel bandwidths and head gates learn, in each form that has them?"""
    trials = []
    for family in WITHOUT.values():
        rate = best_rate(family, done)
        if rate is None or not fits_depth(family, SMALLEST["depth"]):
            continue
        for name, own_rate in (("channels", "channel_rate"), ("gates", "gate_rate")):
            trials += around_one(Trial(**{**family, **LEARNED[name], **SMALLEST}, rate=rate), own_rate, done)
    return trials


def channels(done: Done) -> list[Trial]:
    """What do a bandwidth for every channel and a gate for every head give, to GKA and to softmax and VLT?"""
    with_offsets = {name: family for name, family in CHANNELS.items() if "offsets" in name}
    without = {name: family for name, family in CHANNELS.items() if name not in with_offsets}
    deeper = [*_at_best_rate(with_offsets, done, [DEEPER]), *_at_best_rate(without, done, [DEEPER], FIRST_SEED)]
    return [*deeper, *_at_best_rate(with_offsets, done, [SMALLEST])]


def channels_longer(done: Done) -> list[Trial]:
    """Does it last in longer training and at six layers? The preset and softmax with the same; others once."""
    pair, others = ({name: CHANNELS[name] for name in names} for names in (CONTENDERS[:2], CONTENDERS[2:]))
    places = [place for place in scaled_places() if place["depth"] <= 6]
    every = _seeds_in_turn(_at_best_rate(pair, done, places[::-1]))
    return [*every, *_at_best_rate(others, done, [LONGEST], FIRST_SEED)]


def ideas(done: Done) -> list[Trial]:
    """Does anything else help the preset: wider heads, rows without the own slot, shares of the value before?"""
    once, more = _at_best_rate(IDEAS, done, [DEEPER], FIRST_SEED), _at_best_rate(WIDE_HEADS, done, [DEEPER], SEEDS[1:])
    return [*once, *more, *_at_best_rate(WIDE_HEADS, done, [LONGEST])]


def _at_every_rate(families: dict[str, dict], done: Done) -> list[Trial]:
    """Every family at the middle rate, then at those around it: a first comparison comes early."""
    trials = [
        Trial(**SMALLEST, **family, rate=rate) for family in families.values() for rate in tried_rates(family, done)
    ]
    return sorted(trials, key=lambda trial: abs(math.log2(trial.rate / RATES[1])))


def _at_best_rate(families: dict[str, dict], done: Done, places: list[dict], seeds=SEEDS) -> list[Trial]:
    """Every family whose rate is known, at every place, with every seed; seeds in turn, so that all have one first."""
    return [
        Trial(**{**family, **place}, rate=rate, seed=seed)
        for place in places
        for seed in seeds
        for family in families.values()
        if fits_depth(family, place["depth"]) and (rate := rate_to_train(family, place, done)) is not None
    ]


def _seeds_in_turn(trials: list[Trial]) -> list[Trial]:
    """Everything with the first seed comes before anything with the second."""
    return sorted(trials, key=lambda trial: trial.seed)


GROUPS: dict[str, Callable[[Done], list[Trial]]] = {
    "rates": rates,
    "seeds": seeds,
    "precision": precision,
    "depth-4": depth_4,
    "longer": longer,
    "further-rates": further_rates,
    "further-seeds": further_seeds,
    "sigma-starts": sigma_starts,
    "windows": windows,
    "offset-patterns": offset_patterns,
    "further-offsets": further_offsets,
    "reference-rates": reference_rates,
    "repair-rates": repair_rates,
    "repairs": repairs,
    "kernel-rates": kernel_rates,
    "kernels": kernels,
    "sizes": sizes,
    "sizes-seeds": sizes_seeds,
    "largest-rates": largest_rates,
    "largest-seeds": largest_seeds,
    "value-embeds": value_embeds,
    "value-embeds-longer": value_embeds_longer,
    "deeper-rates": deeper_rates,
    "channel-rates": channel_rates,
    "channels": channels,
    "channels-longer": channels_longer,
    "ideas": ideas,
}
