"""What is said of the study's rows: means, paired differences, fits of a known law, crossings, and what is not run."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from runs.study import pictures, statistics
from runs.study.families import ALL, FAMILIES
from runs.study.grid import DEEPER, LONGEST, scaled_places
from runs.study.rates import SMALLEST
from runs.study.scores import Scores, rate_to_compare
from runs.study.statistics import Interval
from runs.study.trials import Trial
from runs.tables import findings, sentences, study, study_equal
from runs.tables.study_equal import other_places
from shown import cells, numbers, shown
from study_rows import DATA, row, write
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


def test_families_are_compared_at_the_rate_with_most_seeds(tmp_path):
    softmax, gka = (Trial(**SMALLEST, **FAMILIES[name]) for name in ("softmax", "GKA"))
    rows = [row(replace(softmax, rate=2.0, seed=seed), 1.9 + noise) for seed, noise in NOISE.items()]
    rows += [row(replace(softmax, rate=1.0), 1.85)]  # better, but of one seed
    rows += [row(replace(gka, rate=rate), 2.0 + rate / 10) for rate in (1.0, 2.0)]
    stale = row(replace(gka, rate=0.5), 0.1)
    rows += [{**stale, "key": "of another version"}, {**stale, "data": {"another": "text"}}]
    rows += [row(replace(softmax, rate=4.0), 1.95)]
    table = study.families(write(tmp_path / "study", rows))
    loss = "validation bits per byte"
    said = cells(table, "softmax")
    assert (said[loss], said["rate"], said["seeds"]) == ("1.9000 ± 0.0036", "2*", "3")
    said = cells(table, "GKA")
    assert (said[loss], said["rate"], said["over softmax"]) == ("2.1000", "1*", "+0.1960")  # of the same seed, 1.904
    assert cells(table, "VLT + offsets")[loss] == "not run" and study.PROVISIONAL in shown(table)


def test_of_rates_with_as_many_seeds_the_chosen_one_is_compared():
    scores = {1.0: [(1.8,)], 2.0: [(1.9,)], 4.0: [(2.0,), (2.1,)]}
    assert rate_to_compare(scores, 1.0) == 4.0
    del scores[4.0]
    assert (rate_to_compare(scores, 2.0), rate_to_compare(scores, None)) == (2.0, 1.0)


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


def test_the_time_of_training_is_drawn_where_the_speed_is_known(tmp_path):
    place = dict(depth=2, tokens=2**21)
    rows = [row(Trial(**place, **ALL[name]), loss) for name, loss in (("softmax", 1.8), ("GKA + offsets", 1.7))]
    folder = write(tmp_path / "study", rows)
    [drawn] = figures_of(folder, tmp_path, **{"GKA + offsets": 2**21 / 90})["time"]
    assert (drawn["family"], drawn["minutes"], drawn["loss"]) == ("GKA + offsets", pytest.approx(1.5), 1.7)
    assert "time" not in figures_of(folder, tmp_path)


def test_losses_along_a_row_are_drawn_of_the_first_seed_that_was_looked_at(tmp_path):
    first = Trial(**LONGEST, **ALL["GKA"])
    trials = [replace(first, seed=1), first]
    folder, lines = write(tmp_path / "study", [row(trial, 1.9) for trial in trials]), []
    about = {"date": "2026-11-25", "commit": "abc", "hardware": "a CPU", "torch": "2.14", "kind": "study-heads"}
    for trial, loss in zip(trials, (5.0, 4.2)):
        by_position = {"1": loss, "2-3": loss, "4": 9.0}  # the last group, which may be one token, is left out
        config = {"name": trial.key(DATA), "sha256": str(trial.seed)}
        metrics = {"loss_by_position": by_position, "heads": [{"effective tokens": 3.0}]}
        lines.append({**about, "config": config, "metrics": metrics})
    (tmp_path / "study_heads.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    figure = pictures.context(folder, tmp_path)
    assert figure.path.exists()
    assert [tuple(row.values()) for row in figure.rows] == [("GKA", "1", 4.2), ("GKA", "2-3", 4.2)]


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
        (
            (0.02, 0.01, 0.04),
            "0.020 [0.010, 0.040] bits per byte behind softmax",
            "behind",
            "-0.020 [-0.040, -0.010] (a rise)",
        ),
        ((-0.02, -0.03, -0.01), "0.020 [0.010, 0.030] bits per byte ahead of softmax", "ahead", "0.020 [0.010, 0.030]"),
        (
            (0.02, -0.01, 0.05),
            "not significantly different from softmax (+0.020 [-0.010, +0.050] bits per byte)",
            "level",
            "-0.020 [-0.050, 0.010] (not significant)",
        ),
        ((-0.02, math.nan, math.nan), "0.020 bits per byte ahead of softmax (one seed)", "open", "0.020 (one seed)"),
    ],
)
def test_sentences_call_a_lead_what_its_interval_says(difference, said, word, given):
    found = statistics.Interval(*difference)
    assert sentences.standing(found, "softmax") == said
    assert (sentences.verdict(found), sentences.gain(found)) == (word, given)


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
    assert heights.pop("GKA: 2.50 ↑") == pytest.approx(1.70 + 0.1 * 0.6)
    assert sorted(heights.values()) == pytest.approx([1.6, 1.65, 1.7])


def test_verdicts_turn_with_the_rows(tmp_path):
    """The same sentence of two worlds: in one bandwidths and gates help GKA, in the other they do not."""
    for gained, verdict, rise in ((0.05, "No", ""), (-0.05, "Not settled", " (a rise)")):
        losses = {sentences.HALF: 1.75, sentences.PRESET: 1.75 - gained, sentences.CONTROL: 1.73}
        folder = write(tmp_path / verdict / "study", with_seeds(DEEPER, losses))
        said = sentences.learned(sentences.Study(folder / "words.jsonl"))
        assert said.startswith(f"**{verdict}")
        assert f"{gained:.3f} [{gained:.3f}, {gained:.3f}]{rise} together" in said
        assert "not compared with softmax yet at equal tokens" in said


def test_what_is_counted_is_equal_time(tmp_path, monkeypatch):
    behind, ahead = Interval(0.1, 0.05, 0.15), Interval(-0.1, -0.15, -0.05)
    study = sentences.Study(tmp_path / "words.jsonl")
    monkeypatch.setattr(study, "ways", lambda name, other, place: [behind, behind, ahead])
    monkeypatch.setattr(study, "at_both", lambda place: True)
    assert f"this GKA is ahead in {len(other_places())}, level in 0, behind in 0." in study.counted("this GKA")
