"""What is said of the study's rows: means, paired differences, fits of a known law, crossings, and what is not run."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from nanochat_gka.model.accounting import flops_per_token, meta_model
from nanochat_gka.model.config import ModelFlags
from runs.study import pictures, statistics
from runs.study.families import ALL, FAMILIES
from runs.study.grid import DEEPER, LONGEST, scaled_places
from runs.study.rates import DEEPEST, SMALLEST
from runs.study.scores import Scores, rate_to_compare
from runs.study.speed import SPEEDS
from runs.study.trials import Trial
from runs.tables import findings, sentences, study, study_equal, study_heads, study_settings
from shown import cells, numbers, shown
from study_rows import DATA, row, timed, write
from trainkit_gka.cli import UserError

NOISE = {0: 0.004, 1: -0.001, 2: -0.003}  # of a seed, the same for every family


def law(flops, a, b, c):
    return a + b * (flops / 1e14) ** -c


LAWS = {"softmax": (1.0, 0.5, 0.3), "GKA + offsets": (1.0, 0.5, 0.4), "GKA": (1.4, 0.5, 0.3)}


def with_seeds(place, losses):
    """Rows of families at a place, by their names, with the noise of every seed."""
    return [
        row(Trial(**place, **ALL[name], seed=seed), loss + noise)
        for name, loss in losses.items()
        for seed, noise in NOISE.items()
    ]


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    """Rows of a world in which every family follows its law, whatever the depth, with the noise of seeds."""
    rows = []
    for family, parameters in LAWS.items():
        for place in scaled_places():
            trial = Trial(**place, **FAMILIES[family])
            loss = law(trial.flops(512, 4096), *parameters)
            rows += [row(replace(trial, seed=seed), loss + noise) for seed, noise in NOISE.items()]
    return write(tmp_path_factory.mktemp("scaled") / "study", rows)


def test_differences_are_paired_over_seeds():
    ours, baseline = {0: 1.90, 1: 1.80, 2: 1.85, 7: 9.9}, {0: 1.91, 1: 1.83, 2: 1.87}
    difference = statistics.paired_difference(ours, baseline)
    assert difference.value == pytest.approx(-0.02)
    # stdev of (-.01, -.03, -.02) is 0.01; t with 2 degrees of freedom is 4.303.
    assert difference.high - difference.low == pytest.approx(2 * 4.303 * 0.01 / 3**0.5, rel=1e-4)
    alone = statistics.paired_difference({0: 1.0}, {0: 2.0, 1: 3.0})
    assert alone.value == -1.0 and math.isnan(alone.low)
    assert statistics.paired_difference({0: 1.0}, {1: 2.0}) is None


@pytest.mark.parametrize("numbers", [(1.0, 0.5, 0.3), (0.0, 2.0, 0.05), (1.5, 0.2, 1.0)])
def test_a_known_law_is_found(numbers):
    flops = np.geomspace(1e13, 1e16, 8)
    fitted = statistics.fit(flops, law(flops, *numbers))
    assert fitted(flops) == pytest.approx(law(flops, *numbers), abs=2e-3)
    assert fitted.c == pytest.approx(numbers[2], rel=0.05) and fitted.a == pytest.approx(numbers[0], abs=0.1)


def test_only_what_is_better_than_everything_cheaper_is_fitted():
    flops, loss = np.array([4.0, 1.0, 2.0, 3.0]), np.array([1.0, 4.0, 3.0, 3.5])
    assert statistics.frontier(flops, loss).tolist() == [1, 2, 0]


def test_draws_of_other_seeds_spread_as_students_t():
    losses = [1.90, 1.93, 1.88]
    points = {"three seeds": (1.0, losses), "one seed": (2.0, [1.5])}
    noise = statistics.SeedNoise.pooled([losses, [1.5]])
    assert noise.deviation == pytest.approx(np.std(losses, ddof=1)) and noise.freedom == 2
    # Quartiles of Student's t with 2 degrees of freedom are at 0.816.
    for (_, seeds), drawn in zip(points.values(), noise.draw(points)):
        low, middle, high = np.percentile(drawn, (25, 50, 75))
        half = 0.816 * noise.deviation / len(seeds) ** 0.5
        assert middle == pytest.approx(np.mean(seeds), abs=0.3 * half)
        assert (high - low) / 2 == pytest.approx(half, rel=0.2)
    assert statistics.SeedNoise.pooled([[1.0], [2.0]]) is None


def test_noise_of_seeds_is_pooled_over_places():
    pooled = statistics.SeedNoise.pooled([[1.0, 3.0], [5.0, 5.0, 5.0], [7.0]])
    assert pooled.deviation == pytest.approx((2.0 / 3) ** 0.5) and pooled.freedom == 3
    places = {str(flops): (flops, [law(flops, 1.0, 0.5, 0.3)]) for flops in np.geomspace(1e13, 1e15, 5)}
    assert math.isnan(statistics.scaling(places).interval("a").low)  # nothing is known of other seeds
    borrowed = statistics.scaling(places, statistics.SeedNoise(0.005, 4)).interval("c")
    assert borrowed.low < 0.3 < borrowed.high


def test_fits_have_intervals_that_hold_the_truth_and_cross_where_the_laws_do(scaled):
    fitted = Scores.read(scaled / "words.jsonl").scalings()
    for family, parameters in LAWS.items():
        for name, truth in zip("abc", parameters):
            interval = fitted[family].interval(name)
            assert interval.low < truth < interval.high, (family, name, interval)
    where, share = statistics.crossing(fitted["GKA + offsets"], fitted["softmax"])
    assert where.low <= where.value <= where.high and where.value == pytest.approx(1e14, rel=0.05) and share > 0.9
    assert statistics.crossing(fitted["GKA"], fitted["softmax"]) == (None, 0.0)
    assert all(own.miss < 0.01 and own.points >= 4 for own in fitted.values() if own)
    fits = study.fits(scaled)
    assert cells(fits, "GKA")["finished sizes and budgets"] == "12"
    assert cells(fits, "GKA")["crosses softmax at FLOPs (share of draws)"] == "nowhere in reach (0%)"
    assert cells(fits, "GGGA + offsets")["a"] == "not run"


def over_softmax(at, equal):
    """GKA + offsets over softmax by the laws, at the FLOPs of a place, at equal tokens and at equal FLOPs."""
    own, other = (Trial(**at, **FAMILIES[name]).flops(512, 4096) for name in ("GKA + offsets", "softmax"))
    assert own < other
    ours = law(own, *LAWS["GKA + offsets"])  # the noise of three seeds adds up to 0
    return [ours - law(own if equal else other, *LAWS["softmax"])] * 3  # for all seeds, so without a width


@pytest.mark.parametrize(
    "table, start, place",
    [
        (study_equal.equal, ("GKA + offsets", "softmax", "6"), dict(depth=6, tokens=2**20, batch=4096)),
        (study_equal.longer, ("GKA + offsets", "softmax", "depth 4, 2^22"), dict(depth=4, tokens=2**22)),
    ],
    ids=["between depths", "between budgets"],
)
def test_equal_flops_are_a_place_on_the_baselines_curve(scaled, table, start, place):
    row = cells(table(scaled), *start)
    assert numbers(row["equal tokens"]) == pytest.approx(over_softmax(place, equal=False), abs=1e-3)
    # The law and the interpolation differ a little.
    assert numbers(row["equal FLOPs"]) == pytest.approx(over_softmax(place, equal=True), abs=5e-3)
    assert row.get("equal time", "") == "" and "GGGA" not in shown(table(scaled))  # nothing is timed


def test_the_noise_of_seeds_is_said(scaled):
    assert "pooled over 36 trials: 0.0036." in shown(study.sizes(scaled))


def test_equal_cost_is_compared_with_the_best_of_all_depths_that_cost_no_more(tmp_path):
    losses = {2: (1.9, 1.8, 1.6), 4: (1.85, 1.75, 1.65)}
    rows = [
        row(Trial(depth=depth, tokens=2 ** (20 + number), **ALL["softmax"]), loss)
        for depth, of_depth in losses.items()
        for number, loss in enumerate(of_depth)
    ]
    rows += [row(Trial(depth=4, tokens=tokens, **ALL["GKA + offsets"]), 1.7) for tokens in (2**20, 2**22)]
    longer = cells(study_equal.longer(write(tmp_path / "study", rows)), "GKA + offsets", "softmax", "depth 4, 2^22")
    # Two layers on 2^22 tokens are cheaper, and better.
    assert longer == {"equal tokens": "+0.050", "equal FLOPs": "+0.100", "equal time": "", "seeds": "1"}


def test_forms_are_compared_where_both_sides_have_what_is_compared(tmp_path):
    losses = {"softmax": 1.9, "softmax without VE": 1.95, "GKA + offsets": 1.85, "GKA + offsets + half VE": 1.8}
    table = study_settings.value_embeds(write(tmp_path / "embeddings", with_seeds(SMALLEST, losses)))
    compared = list(cells(table, "GKA + offsets over softmax").values())
    assert compared == ["-0.100 [-0.100, -0.100]"] * 2 + [""] * 4

    losses = {"GGGA + offsets": 1.74, "GGGA + offsets without VE": 1.76, "GKA + offsets": 1.79}
    table = study_settings.hybrid(write(tmp_path / "hybrid", with_seeds(DEEPER, losses)))
    for name, loss, over in (("GGGA + offsets", 1.74, -0.05), ("GGGA + offsets without VE", 1.76, -0.03)):
        said = cells(table, name)
        assert said["validation bits per byte"] == f"{loss:.4f} ± 0.0036" and said["over softmax + offsets"] == ""
        assert numbers(said["over GKA + offsets"]) == [over] * 3

    losses = {"GKA + offsets": 1.79, "GKA + offsets P2S2": 1.77, "softmax + offsets": 1.73}
    losses |= {"softmax + offsets PSP2S2": 1.74}
    table = study.further_offsets(write(tmp_path / "offsets", with_seeds(DEEPER, losses)))
    over = "over GKA + offsets and softmax + offsets"
    assert numbers(cells(table, "GKA + offsets P2S2")[over]) == [-0.02] * 3
    assert numbers(cells(table, "softmax + offsets PSP2S2")[over]) == [0.01] * 3
    assert cells(table, "GKA + offsets")[over] == "" and "not run" in cells(table, "GKA + offsets P,S").values()


def test_equal_parameters_are_compared_seed_by_seed(tmp_path):
    places, losses = study_equal.common_places()[:2], {"softmax": (1.9, 1.8), "GKA + offsets": (1.85, 1.7)}
    shifts = {"softmax": {0: 0.0, 1: 0.1, 2: 0.05}, "GKA + offsets": {0: 0.01, 1: 0.09, 2: 5.0, 3: 9.0}}
    rows = [
        row(Trial(**place, **ALL[name], seed=seed), loss + shift, parameters=parameters)
        for name, sizes in {"softmax": (100, 400), "GKA + offsets": (50, 200)}.items()
        for place, loss, parameters in zip(places, losses[name], sizes)
        for seed, shift in shifts[name].items()
        if (name, place, seed) != ("softmax", places[1], 2)  # a seed that one depth alone has
    ]
    said = cells(study_equal.equal(write(tmp_path / "study", rows)), "GKA + offsets", "softmax", "4")
    # softmax of 200 parameters is half way between 100 and 400: 1.85 + shift. Seeds 0 and 1 differ by -0.14, -0.16.
    half = 12.706 * 0.01
    assert numbers(said["equal parameters"]) == pytest.approx([-0.15, -0.15 - half, -0.15 + half], abs=1e-3)


def test_differences_of_every_depth_are_paired_over_the_seeds_that_both_have(tmp_path):
    places, names = study_equal.common_places(), ("softmax", "softmax + offsets", "GKA + offsets")
    losses = dict(zip(names, (1.9, 1.8, 1.85)))
    rows = [
        row(Trial(**places[0], **ALL[name], seed=seed), losses[name] + n) for name in names for seed, n in NOISE.items()
    ]
    rows += [row(Trial(**places[2], **ALL[name]), losses[name]) for name in names[:2]]
    rows += [row(Trial(**places[2], **ALL["softmax"], seed=1), 2.5)]  # of a seed that the other does not have
    folder = write(tmp_path / "study", rows)
    [table] = study_equal.differences(folder)
    assert table.rows == [
        ["softmax + offsets", "softmax", "-0.100 [-0.100, -0.100]", "", "-0.100", "", "3 / 0 / 1 / 0"],
        ["GKA + offsets", "softmax", "-0.050 [-0.050, -0.050]", "", "", "", "3 / 0 / 0 / 0"],
        ["GKA + offsets", "softmax + offsets", "+0.050 [+0.050, +0.050]", "", "", "", "3 / 0 / 0 / 0"],
    ]
    [longer] = study_equal.longer(folder)  # six layers alone: they have a shorter budget
    assert [row[:3] for row in longer.rows] == [["softmax + offsets", "softmax", "depth 6, 2^20"]]


def test_families_are_compared_at_the_rate_with_most_seeds(tmp_path):
    softmax, gka = (Trial(**SMALLEST, **FAMILIES[name]) for name in ("softmax", "GKA"))
    rows = [row(replace(softmax, rate=2.0, seed=seed), 1.9 + noise) for seed, noise in NOISE.items()]
    rows += [row(replace(softmax, rate=1.0), 1.85)]  # better, but of one seed
    rows += [row(replace(gka, rate=rate), 2.0 + rate / 10, sigma={"layer_0": [2.0, 4.0, 3.0]}) for rate in (1.0, 2.0)]
    stale = row(replace(gka, rate=0.5), 0.1)
    rows += [{**stale, "key": "of another version"}, {**stale, "data": {"another": "text"}}]
    rows += [row(replace(softmax, rate=4.0), 1.95)]
    rows[1]["hardware"] = "another CPU"
    rows += [{**row(Trial(**SMALLEST, **ALL["GKA + Canon"]), 1.9), "hardware": "the CPU of a row that is not shown"}]
    table = study.families(write(tmp_path / "study", rows))
    loss = "validation bits per byte"
    said = cells(table, "softmax")
    assert (said[loss], said["rate"], said["seeds"]) == ("1.9000 ± 0.0036", "2*", "3")
    said = cells(table, "GKA")
    assert (said[loss], said["rate"], said["over softmax"]) == ("2.1000", "1*", "+0.1960")  # of the same seed, 1.904
    assert cells(table, "VLT + offsets")[loss] == "not run" and study.PROVISIONAL in shown(table)
    assert "on a CPU, torch 2.14; 2026-11-22 at commit abc1234 on another CPU" in shown(table)
    assert "not shown" not in shown(table)
    assert list(cells(study.longer(tmp_path / "study"), "GKA").values())[:2] == ["2.1000; σ² 9", "not run"]


def test_of_a_pair_the_loss_is_of_the_seeds_that_both_have(tmp_path):
    gka = FAMILIES["GKA + offsets"]
    single, rates = Trial(**SMALLEST, **gka, dtype="float32"), ((1.0, 1.8), (2.0, 1.9), (4.0, 2.0), (0.5, 1.85))
    rows = [row(Trial(**SMALLEST, **gka, rate=rate), loss) for rate, loss in rates]
    rows += [row(replace(single, seed=seed), 1.79 + noise) for seed, noise in {**NOISE, 7: 9.0}.items()]
    rows += [row(replace(single, seed=seed, dtype="bfloat16"), 1.81 + noise) for seed, noise in NOISE.items()]
    said = cells(study_settings.precision(write(tmp_path / "study", rows)), "GKA + offsets")
    assert said["float32"] == "1.7900 ± 0.0036" and said["bfloat16"] == "1.8100 ± 0.0036"


def test_of_rates_with_as_many_seeds_the_chosen_one_is_compared():
    scores = {1.0: [(1.8,)], 2.0: [(1.9,)], 4.0: [(2.0,), (2.1,)]}
    assert rate_to_compare(scores, 1.0) == 4.0
    del scores[4.0]
    assert (rate_to_compare(scores, 2.0), rate_to_compare(scores, None)) == (2.0, 1.0)


def test_settings_are_compared_at_the_transferred_rate_and_paired_over_seeds(tmp_path):
    place, gka = DEEPEST, FAMILIES["GKA + offsets"]
    rows = [
        row(Trial(**SMALLEST, **gka, rate=rate), loss)
        for rate, loss in ((1.0, 1.8), (2.0, 1.9), (4.0, 2.0), (0.5, 1.85))
    ]
    rows += [
        row(Trial(**place, **gka, rate=rate), loss) for rate, loss in ((0.5, 1.65), (1.0, 1.6), (2.0, 1.5), (4.0, 1.55))
    ]
    single = Trial(**SMALLEST, **gka, dtype="float32")
    rows += [row(replace(single, seed=seed), 1.79 + noise) for seed, noise in NOISE.items()]
    rows += [row(replace(single, seed=seed, dtype="bfloat16"), 1.81 + noise) for seed, noise in NOISE.items()]
    [six_layers] = [place for place in study_equal.common_places() if place["depth"] == 6]
    rows += [row(Trial(**six_layers, **gka, rate=rate), loss) for rate, loss in ((1.0, 1.66), (2.0, 1.64))]
    folder = write(tmp_path / "study", rows)
    rates = cells(study_settings.largest_rates(folder), "GKA + offsets")
    assert list(rates.values()) == ["1.6500", "1.6000", "1.5000", "1.5500"]
    sizes = cells(study.sizes(folder), "GKA + offsets")
    assert sizes["depth 8, 2^20"] == "1.5000"  # the deepest has a best rate of its own
    assert sizes["depth 6, 2^20"] == "1.6600"  # elsewhere all have the rate of the smallest, and one try
    pairs = cells(study_settings.precision(folder), "GKA + offsets")
    assert pairs["float32"] == "1.7900 ± 0.0036" and numbers(pairs["difference"]) == [0.02] * 3


def figures_of(folder, tmp_path, **speeds):
    """What is drawn of the words in a folder, by a word of the file's name. speeds: tokens/s of two layers."""
    drawn = pictures.of_text(Scores.read(folder / "words.jsonl"), {2: speeds}, "words", tmp_path)
    assert all(figure.path.exists() for figure in drawn)
    return {figure.path.name.split("-")[1]: figure.rows for figure in drawn}


def test_repairs_and_kernels_are_drawn_over_what_they_change(tmp_path):
    losses = {"GKA unrotated": 1.96, "GKA + offsets": 1.85, "softmax": 1.87, "softmax + offsets": 1.81}
    rows = with_seeds(SMALLEST, losses)
    rows += [row(Trial(**DEEPER, **ALL[name]), losses[name] - 0.1) for name in ("GKA unrotated", "GKA + offsets")]
    figures = figures_of(write(tmp_path / "study", rows), tmp_path)
    drawn = {(row["family"], row["over"], row["layers"]): row for row in figures["forms"]}
    assert drawn["GKA + offsets", "GKA unrotated", 2]["difference"] == pytest.approx(-0.11)
    assert drawn["softmax + offsets", "softmax", 2]["high"] == pytest.approx(-0.06)  # paired: the noise is equal
    assert drawn["softmax + offsets", "GKA + offsets", 2]["difference"] == pytest.approx(-0.04)
    assert math.isnan(drawn["GKA + offsets", "GKA unrotated", 4]["low"]) and len(drawn) == 4


def test_every_depth_and_budget_is_drawn_over_softmax_with_offsets(tmp_path):
    places = [place for place in scaled_places() if place["depth"] in (2, 8)]
    losses = {"softmax + offsets": 1.8, "GKA + offsets": 1.85}
    rows = [row(Trial(**place, **ALL[name], seed=1), loss) for name, loss in losses.items() for place in places]
    rows += [row(Trial(**places[0], **ALL[name], seed=2), loss + 0.1) for name, loss in losses.items()]
    rows += [row(Trial(**places[0], **ALL["softmax"], seed=0), 1.0)]  # of a seed that the control does not have
    drawn = figures_of(write(tmp_path / "study", rows), tmp_path)["budgets"]
    assert [(one["layers"], one["tokens"]) for one in drawn] == [(p["depth"], p["tokens"]) for p in places]
    assert all(one["difference"] == pytest.approx(0.05) for one in drawn)
    assert [math.isnan(one["low"]) for one in drawn] == [False, *[True] * 5]
    assert "budgets" not in figures_of(write(tmp_path / "none", rows[-1:]), tmp_path)


def test_the_time_of_training_is_drawn_where_the_speed_is_known(tmp_path):
    place = dict(depth=2, tokens=2**21)
    rows = [row(Trial(**place, **ALL[name]), loss) for name, loss in (("softmax", 1.8), ("GKA + offsets", 1.7))]
    folder = write(tmp_path / "study", rows)
    [drawn] = figures_of(folder, tmp_path, **{"GKA + offsets": 2**21 / 90})["time"]
    assert (drawn["family"], drawn["minutes"], drawn["loss"]) == ("GKA + offsets", pytest.approx(1.5), 1.7)
    assert "time" not in figures_of(folder, tmp_path)


def test_losses_along_a_row_are_drawn_of_models_that_were_looked_at(tmp_path):
    trial = Trial(**LONGEST, **ALL["GKA"])
    second = replace(trial, seed=1)
    folder = write(tmp_path / "study", [row(second, 1.9), row(trial, 1.9)])
    by_position = {"1": 4.2, "2-3": 4.1, "4": 4.5}  # the last group, which may be one token, is left out
    metrics = {"loss_by_position": by_position, "heads": [{"effective tokens": 3.0}, {"effective tokens": 200.0}]}
    named = {"name": trial.key(DATA), "sha256": "a model"}
    about = {"date": "2026-11-25", "commit": "abc", "hardware": "a CPU", "torch": "2.14", "kind": "study-heads"}
    lines = [{**about, "config": {**named, "sha256": other}, "metrics": metrics} for other in "ab"]
    lines[1]["config"]["name"] = "of nobody's trial"
    worse = {**metrics, "loss_by_position": {"1": 5.0, "2-3": 5.0, "4": 5.0}}  # of another seed, so not drawn
    lines.insert(0, {**lines[0], "config": {"name": second.key(DATA), "sha256": "c"}, "metrics": worse})
    (tmp_path / "study_heads.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    figure = pictures.context(folder, tmp_path)
    assert figure.path.exists()
    for line, (gain, sigma) in zip(lines, ((0.5, 3.0), (1.5, 2.0), (9.0, None)), strict=True):
        line["metrics"] = {**line["metrics"], "induction": {"accuracy": 0.01, "gain": gain}} | {
            "copying": {"accuracy": 0.02, "gain": -gain},
            "heads": [{"effective tokens": 3.0 + gain, "sigma": sigma}],
        }
        line["config"] = {**line["config"], "depth": 9}
    (tmp_path / "study_heads.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = cells(study_heads.heads(folder), "GKA", "4")
    assert own["seeds"] == "2" and own["induction: gain"] == "+0.50 to +1.50" and own["σ"] == "2 to 3"
    assert own["effective tokens"] == "3.5 to 4.5" and own["gain from context"] == "+0.00 to +0.40"
    other = cells(study_heads.heads(folder), "of nobody's trial", "9")
    assert other["seeds"] == "1" and other["σ"] == "" and other["copying: gain"] == "-9.00"
    assert [tuple(row.values()) for row in figure.rows] == [("GKA", "1", 4.2), ("GKA", "2-3", 4.1)]


def test_the_command_prints_every_table_and_draws_what_there_is(scaled, tmp_path, capsys):
    findings.main(findings.FindingsConfig(results=scaled, out=tmp_path / "pictures"))
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("study-families", "study-fits", "study-patterns"))
    names = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert names == {"quality-words.png", "study-compute-words.png", "study-longer-words.png"}
    findings.main(findings.FindingsConfig(results=write(tmp_path / "study", []), out=tmp_path / "none"))
    assert list((tmp_path / "none").iterdir()) == []
    with pytest.raises(UserError, match="make study writes some"):
        findings.main(findings.FindingsConfig(results=tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("difference", "said", "word", "given"),
    [
        ((0.02, 0.01, 0.04), "0.020 [0.010, 0.040] bits per byte behind softmax", "behind", "-0.020 [-0.040, -0.010]"),
        ((-0.02, -0.03, -0.01), "0.020 [0.010, 0.030] bits per byte ahead of softmax", "ahead", "0.020 [0.010, 0.030]"),
        (
            (0.02, -0.01, 0.05),
            "not significantly different from softmax (+0.020 [-0.010, +0.050] bits per byte)",
            "level",
            "-0.020 [-0.050, 0.010]",
        ),
        ((-0.02, math.nan, math.nan), "0.020 bits per byte ahead of softmax (one seed)", "open", "0.020 (one seed)"),
    ],
)
def test_sentences_call_a_lead_what_its_interval_says(difference, said, word, given):
    found = statistics.Interval(*difference)
    assert sentences.standing(found, "softmax") == said
    assert (sentences.verdict(found), sentences.gain(found)) == (word, given)


def test_counts_and_verdicts_are_of_equal_time(tmp_path):
    """GKA is behind at equal tokens everywhere, and twice as fast."""
    control = {2: {2**20: 2.2, 2**21: 2.1, 2**22: 2.0}, 4: {2**20: 1.8, 2**21: 1.7, 2**22: 1.6}, 6: {2**20: 1.8}}
    half = {2: {2**21: 2.3, 2**22: 2.1}, 4: {2**21: 1.75, 2**22: 1.65}, 6: {2**20: 1.7}}  # ahead at four layers
    rows = []
    best = {4: {2**22: 1.65}}
    for name, losses in ((sentences.CONTROL, control), (sentences.HALF, half), (sentences.PRESET, best)):
        for depth, by_tokens in losses.items():
            for tokens, loss in by_tokens.items():
                noise = -1 if (name, depth, tokens) == (sentences.HALF, 2, 2**22) else 1  # so its interval holds 0
                place = dict(depth=depth, tokens=tokens, **(dict(batch=4096) if depth == 6 else {}))
                rows += [
                    row(Trial(**place, **ALL[name], seed=seed), loss + noise * of_seed)
                    for seed, of_seed in NOISE.items()
                ]
    folder = write(tmp_path / "study", rows)
    for depth, speed in ((2, 1e5), (4, 1e3)):  # the sixth has none
        faster = dict.fromkeys((sentences.HALF, sentences.PRESET), 2 * speed)
        timed(tmp_path / SPEEDS.name, {sentences.CONTROL: speed, **faster}, depth)
    study = sentences.Study(folder / "words.jsonl")
    assert study.counted("it") == (
        "Over all 4 sizes and budgets with several seeds it is, at equal time, ahead in 2, level in 1, behind in 1."
    )
    tokens = "is 0.050 [0.050, 0.050] bits per byte behind softmax with the same offsets"
    said = sentences.recommended(study)
    assert said.startswith("**At equal tokens behind, at equal FLOPs behind, at equal time ahead.**")
    assert f"{tokens} at equal tokens, 0." in said
    preset = sentences.text_quality(study)
    assert f"{tokens} at equal tokens, 0." in preset
    assert "it at equal FLOPs, and 0.050 [0.050, 0.050] bits per byte ahead of it at equal time" in preset


def test_what_is_said_of_the_paper_of_offsets_and_of_the_kernel(tmp_path):
    losses = {"GKA unrotated": 1.96, "GKA + offsets": 1.86, "softmax": 1.87, "softmax + offsets": 1.81}
    losses |= {"offsets, fixed sigma": 1.87, "offsets, causal mean": 1.89, "offsets, tied softmax": 1.855}
    rows = with_seeds(SMALLEST, losses)
    for place, sigma in ((SMALLEST, 2.0), (dict(depth=2, tokens=2**22), 3.0), (LONGEST, 9.0)):
        own = with_seeds(place, {"GKA": 1.95})
        rows += [{**one, "metrics": {**one["metrics"], "sigma": {"layer_0": [sigma]}}} for one in own]
    rows += with_seeds(LONGEST, {"softmax": 1.85})
    study = sentences.Study(write(tmp_path / "study", rows) / "words.jsonl")
    repair, kernel = sentences.repair(study), sentences.kernel_or_offset(study)
    assert "lower the loss of GKA (values not rotated) by 0.100 [0.100, 0.100] bits per byte" in repair
    assert "and that of softmax by 0.060 [0.060, 0.060] (2^20 tokens)" in repair
    assert "is 0.005 [0.005, 0.005] bits per byte ahead of the Gaussian kernel" in kernel
    assert "cost 0.010 [0.010, 0.010] bits per byte" in kernel and "tokens 0.030 [0.030, 0.030] (two" in kernel
    paper = sentences.paper_form(study)
    assert paper.startswith("**It is behind.**") and "0.100 [0.100, 0.100] bits per byte behind it after 2^22" in paper
    assert "median σ² is 4 after 2^20 tokens and 9 after 2^22 tokens" in paper


def test_what_heads_gain_is_said_as_a_range_over_seeds(tmp_path):
    names, lines = ("softmax + offsets", "GKA + offsets", sentences.HALF, "softmax", "GKA"), []
    about = {"date": "2026-11-25", "commit": "abc", "hardware": "a CPU", "torch": "2.14", "kind": "study-heads"}
    places = [(name, place) for name in names for place in (LONGEST, SMALLEST)]
    trials = [Trial(**place, **ALL[name], seed=seed) for name, place in places for seed in (0, 1)]
    for number, trial in enumerate(trials):
        gain, accuracy = (0.2 * number, 0.05 if number == 4 else 0.01) if trial.depth == 4 else (99.0, 0.9)  # not said
        metrics = {"heads": [], "induction": {"gain": gain, "accuracy": accuracy}}
        lines.append({**about, "config": {"name": trial.key(DATA), "sha256": str(number)}, "metrics": metrics})
    folder = write(tmp_path / "study", [row(trial, 1.9) for trial in trials])
    (tmp_path / "study_heads.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = sentences.heads(sentences.Study(folder / "words.jsonl"))
    assert "softmax with offsets 0.0 to 0.2, GKA with offsets 0.8 to 1.0, with value embeddings in half of its" in said
    assert "layers 1.6 to 1.8; without offsets softmax 2.4 to 2.6 and GKA 3.2 to 3.4." in said and "5.0% of" in said


def test_cost_is_in_shares_of_softmax():
    counts = {}
    for name in ("softmax", "GKA", sentences.HALF):
        model = meta_model(ModelFlags(**ALL[name]).shape(20, 2048, 32768))
        counts[name] = sum(p.numel() for p in model.parameters()), flops_per_token(model)
    shares = [
        f"{counts[name][0] / counts['softmax'][0]:.2f}x the parameters and "
        f"{counts[name][1] / counts['softmax'][1]:.2f}x the FLOPs"
        for name in ("GKA", sentences.HALF)
    ]
    said = sentences.cost()
    assert shares[0] != shares[1] and [said.index(share) > 0 for share in shares] == [True, True]
    assert said.index(shares[0]) < said.index(shares[1])


def test_a_loss_far_behind_stands_at_the_top_of_the_picture_of_quality_with_its_number(tmp_path):
    """And minutes are those of the tokens at the family's speed."""
    losses = {"softmax": 1.70, "softmax + offsets": 1.60, "GKA + offsets": 1.65, "GKA": 2.50}
    rows = with_seeds(LONGEST, losses)
    rows = [{**one, "metrics": {**one["metrics"], "parameters": 3_000_000}} for one in rows]
    scores = Scores.read(write(tmp_path / "study", rows) / "words.jsonl")
    frame = pictures.costs(scores, {4: {"softmax": 2**22 / 120}})
    assert frame.minutes.notna().tolist() == [True, False, False, False]
    assert frame.minutes[0] == pytest.approx(2) and set(frame.parameters) == {3.0}
    axis, _ = pictures.draw_quality(frame).axes
    heights = {text.get_text(): text.xy[1] for text in axis.texts}
    bars = [bar for container in axis.containers for bar in container.lines[2]]
    spreads = [round(float(np.ptp(bar.get_segments()[0][:, 1])) / 2, 4) for bar in bars]
    assert heights.pop("GKA: 2.50 ↑") == pytest.approx(1.70 + 0.1 * 0.6)
    assert sorted(heights.values()) == pytest.approx([1.6, 1.65, 1.7])
    assert sorted(spreads) == [0.0, 0.0036, 0.0036, 0.0036]
    frame.loc[frame.family == "GKA", "loss"] = 1.85  # as far again: as it is
    for part in (frame, frame[:2]):
        near = pictures.draw_quality(part).axes[0]
        assert sorted(text.xy[1] for text in near.texts) == pytest.approx(sorted(part.loss))


def test_verdicts_turn_with_the_rows(tmp_path):
    """The same sentence of two worlds: in one bandwidths and gates help GKA, in the other they do not."""
    for gained, verdict in ((0.05, "No"), (-0.05, "Not settled")):
        losses = {sentences.HALF: 1.75, sentences.PRESET: 1.75 - gained, sentences.CONTROL: 1.73}
        folder = write(tmp_path / verdict / "study", with_seeds(DEEPER, losses))
        said = sentences.learned(sentences.Study(folder / "words.jsonl"))
        assert said.startswith(f"**{verdict}.**") and f"{gained:.3f} [{gained:.3f}, {gained:.3f}] together" in said
        assert "not compared with softmax yet at equal tokens" in said


def test_wider_heads_are_held_against_the_same_form_with_narrow_ones(tmp_path):
    own, rival = sentences.WIDE_HEADS
    losses = {sentences.PRESET: 1.75, own: 1.72, sentences.RIVAL: 1.74, rival: 1.745}
    folder = write(tmp_path / "study", with_seeds(DEEPER, losses))
    said = sentences.wide_heads(sentences.Study(folder / "words.jsonl"))
    assert "preset by another 0.030 [0.030, 0.030]" in said and "the same by -0.005 [-0.005, -0.005]" in said
    assert "0.025 [0.025, 0.025] bits per byte ahead of softmax with all of that" in said
    own_rows = cells(study.ideas(folder), own)
    assert "-0.0300" in " ".join(own_rows.values())
