"""The study's tables: intervals and readings of curves worked out by hand."""

import math

import pandas as pd
import pytest
from scipy import stats

from bench_lines import write_lines
from runs.study import analyse
from runs.study.analyse import CONTROL, FLOPS, PRESET, TIME, Study, chosen_rows, intervals
from trainkit_gka.cli import UserError


def row(form, place, seed, loss, cost=1.0, **changed):
    depth, tokens = place
    trial = {"depth": depth, "tokens": tokens, "seed": seed, "rate": 1.0}
    metrics = {"val_bpb": loss, "parameters": 10, "flops_per_token": 1, "train_flops": cost, "sigma": {}}
    about = {"kind": "study", "date": "2026-11-22 12:00", "commit": "abc1234", "hardware": "a CPU", "torch": "2.14"}
    key = f"{form} {place} {seed}"
    return {**about, "key": key, "trial": trial, "metrics": metrics, "data": 1, "form": form, "chosen": True, **changed}


def test_intervals_are_pooled_over_places():
    """Three seeds at each of two places: variances 1 and 4 on four degrees of freedom."""
    computed = intervals({"a": pd.Series([1.0, 2.0, 3.0]), "b": pd.Series([0.0, 2.0, 4.0]), "one": pd.Series([7.0])})
    half = stats.t.ppf(0.975, 4) * math.sqrt((1 + 4) / 2)
    for place, mean, seeds in (("a", 2.0, 3), ("b", 2.0, 3), ("one", 7.0, 1)):
        one = computed[place]
        assert (one.value, one.seeds) == (mean, seeds) and one.high == pytest.approx(mean + half / math.sqrt(seeds))
    alone = intervals({"a": pd.Series([1.0, 2.0, 3.0])})["a"]
    assert math.isnan(alone.low) and alone.text("+.1f") == "+2.0"


def test_at_equal_flops_the_baselines_best_is_read_from_a_parabola():
    """Losses of the baseline with two layers are quadratic in the logarithm of FLOPs; four layers are better there."""
    budgets = [(2, tokens, math.log(cost), cost) for tokens, cost in ((2**20, 1.0), (2**21, 2.0), (2**22, 8.0))]
    curve = [row(CONTROL, (2, t), seed, 3 - x + 0.1 * x * x, c) for _, t, x, c in budgets for seed in (0, 1)]
    better = [row(CONTROL, (4, 2**20), seed, 1.0 + seed / 10, 5.0) for seed in (0, 1)]
    ours = [row("GKA", (2, 2**21), seed, 2.0 + seed / 10, 4.0) for seed in (0, 1)]
    x = math.log(4.0)
    read = Study([*curve, *ours], {}).difference("GKA", CONTROL, (2, 2**21), FLOPS)
    assert list(read) == pytest.approx([2.0 - (3 - x + 0.1 * x * x) + seed / 10 for seed in (0, 1)])
    cheap = [{**one, "metrics": {**one["metrics"], "train_flops": 3.0}} for one in better]
    study = Study([*curve, *ours, *cheap], {2: {"GKA": 1.0, CONTROL: 2.0}})
    assert list(study.difference("GKA", CONTROL, (2, 2**21), FLOPS)) == pytest.approx([1.0, 1.0])
    dearer = Study([*curve, *ours, *better], {}).difference("GKA", CONTROL, (2, 2**21), FLOPS)
    assert list(dearer) == pytest.approx(list(read))
    far = [row("GKA", (2, 2**21), seed, 2.0, 100.0) for seed in (0, 1)]
    assert Study([*curve, *far], {}).difference("GKA", CONTROL, (2, 2**21), FLOPS).empty
    assert study.cost("GKA", (2, 2**21), TIME) == 2**21 and math.isnan(study.cost("softmax", (2, 2**21), TIME))


def test_the_last_row_of_a_key_counts_and_rows_of_two_texts_are_refused(tmp_path):
    path, place = tmp_path / "text.jsonl", (2, 2**20)
    rows = [row("GKA", place, 0, 2.0), row("GKA", place, 0, 1.9), row("GKA", place, 2, 1.0, chosen=False)]
    old = {name: value for name, value in row("x", place, 3, 1.8).items() if name not in ("form", "chosen")}
    write_lines(path, *rows, old)
    write_lines(tmp_path / "chosen.jsonl", {"key": old["key"], "form": "softmax", "rate": 1.0, "settled": True})
    computed = [(one["form"], one["metrics"]["val_bpb"]) for one in chosen_rows(path, "val_bpb")]
    assert computed == [("softmax", 1.8), ("GKA", 1.9)]
    write_lines(path, row("GKA", place, 1, 9.0, data=2), *rows, old)
    with pytest.raises(UserError, match=r"text\.jsonl has rows of 2 sets of data"):
        chosen_rows(path, "val_bpb")


def test_tables_have_the_sizes_that_were_trained_alone(tmp_path, capsys):
    rows = [row(form, (3, 2**18), seed, 1.5) for form in (CONTROL, PRESET) for seed in range(3)]
    study = Study(rows, {})
    table = analyse.sizes(study)
    assert (table.headings[1:], [line[0] for line in table.rows]) == (["depth 3, 2^18"], [CONTROL, PRESET])
    assert [study.over(PRESET, CONTROL, place) for place in study.places] == ["+0.000"]
    for empty in (analyse.preset, analyse.counts, analyse.differences):
        assert not empty(study).rows
    write_lines(tmp_path / "text.jsonl", *rows)
    analyse.main(analyse.AnalyseConfig(results=tmp_path))
    assert "not run" not in capsys.readouterr().out
    for name in ("a", "b"):
        write_lines(tmp_path / f"two/{name}.jsonl", *rows)
    assert [table.title for table in analyse.TABLES["counts"](tmp_path / "two")] == ["a:", "b:"]


def test_counts_are_of_places_with_several_seeds():
    places = [(2, 2**20), (2, 2**21), (4, 2**20)]
    baseline = [row(CONTROL, place, seed, 2.0 + 0.01 * seed) for place in places for seed in range(3)]
    shifts = {places[0]: (-1.0, -1.1, -0.9), places[1]: (0.1, -0.1, 0.0), places[2]: (1.0, 1.1, 0.9)}
    ours = [row(PRESET, p, s, 2.0 + 0.01 * s + shifts[p][s]) for p in places for s in range(3)]
    [of_tokens, *_] = analyse.counts(Study([*baseline, *ours], {})).rows
    assert of_tokens == [CONTROL, "equal tokens", "1", "1", "1"]


def test_pictures_are_drawn_of_what_there_is(tmp_path):
    forms, places = (CONTROL, PRESET, "GKA"), [(2, 2**21), *((4, 2**power) for power in (20, 21, 22))]
    rows = [row(form, place, seed, 1.5) for form in forms for place in places for seed in (0, 1)]
    write_lines(tmp_path / "rows/text.jsonl", *rows)
    analyse.draw(tmp_path / "rows", tmp_path / "pictures")
    names = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert names == {"study-budgets-text.png", "quality-text.png"}
    with pytest.raises(UserError, match="no results"):
        analyse.main(analyse.AnalyseConfig(results=tmp_path))
