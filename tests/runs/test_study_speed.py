"""Speed of the study's families: real steps that are timed, and losses at equal time."""

import pytest

from gka.impl import products
from runs.study import speed
from runs.study.families import ALL
from runs.study.trials import Trial
from runs.tables import study_equal, study_speed
from shown import cells
from study_rows import row, timed, write
from trainkit_gka.progress import read_lines


def test_real_steps_are_timed_in_turns(tmp_path, monkeypatch, capsys):
    results = tmp_path / speed.SPEEDS.name
    monkeypatch.setattr(speed, "TIMED", ("softmax", "GKA + offsets", "GGGA + offsets"))
    monkeypatch.setattr(products, "_multiplies_bfloat16", lambda: True)
    plain, calls = products.dot_product, []
    monkeypatch.setattr(products, "dot_product", lambda request: calls.append(1) or plain(request))
    speed.main(speed.SpeedConfig(depths=[2], rounds=3, sequence_len=32, vocab_size=64, results=results))
    records = read_lines(results)
    assert [record["config"]["family"] for record in records] == ["softmax", "GKA + offsets"]  # two layers
    for record in records:
        metrics = record["metrics"]
        assert metrics["samples"] == 3 and metrics["status"] == "ok"
        assert metrics["tokens_per_second"] == pytest.approx(64 * 32 / metrics["median_ms"] * 1e3)
    assert len(calls) >= 2 * 3  # softmax at its fastest: two layers, three steps
    assert "2 layers, GKA + offsets: " in capsys.readouterr().out


def test_the_newest_comparison_of_a_depth_counts(tmp_path):
    path = tmp_path / speed.SPEEDS.name
    assert study_speed.speed(tmp_path / "study") == []
    timed(path, {"softmax": 7.0}, depth=2, hardware="another CPU")
    timed(path, {"softmax + offsets": 100.0, "GKA": 300.0}, depth=4, group="old")
    timed(path, {"softmax + offsets": 1000.0, "GKA + offsets": 1500.0, "GKA": None}, depth=4, group="new")
    timed(path, {"softmax + offsets": 50.0}, depth=8)
    table = study_speed.speed(tmp_path / "study")
    assert cells(table, "GKA + offsets") == {"4 layers": "1,500 (1.50x)", "8 layers": ""}
    assert cells(table, "softmax + offsets") == {"4 layers": "1,000 (1.00x)", "8 layers": "50 (1.00x)"}
    assert set(cells(table, "GKA").values()) == {""}


def test_equal_time_is_a_shorter_training_of_the_slower_one(tmp_path):
    losses = {"softmax + offsets": {2**20: 1.8, 2**21: 1.7, 2**22: 1.6}, "GKA + offsets": {2**20: 1.9, 2**22: 1.62}}
    rows = [
        row(Trial(depth=4, tokens=tokens, **ALL[name]), loss, parameters=800 if "GKA" in name else 1000)
        for name, by_tokens in losses.items()
        for tokens, loss in by_tokens.items()
    ]
    folder = write(tmp_path / "study", rows)
    timed(tmp_path / speed.SPEEDS.name, {"softmax + offsets": 1000.0, "GKA + offsets": 2000.0}, depth=4)
    row_of = cells(study_equal.longer(folder), "GKA + offsets", "softmax + offsets", "depth 4, 2^22")
    # At half the speed softmax has trained 2^21 tokens, for 1.7.
    assert (row_of["equal tokens"], row_of["equal time"], row_of["seeds"]) == ("+0.020", "-0.080", "1")
    longest = cells(study_equal.longest(folder), "GKA + offsets")
    # FLOPs between 2^21 and 2^22 tokens of softmax, half of its time.
    assert -0.01 < float(longest["equal FLOPs"]) < 0 and longest["equal time"] == "-0.080"
    assert (longest["parameters"], longest["FLOPs"], longest["time of a step"]) == ("0.80x", "0.85x", "0.50x")


def test_between_budgets_a_baseline_is_on_the_parabola_through_them(tmp_path):
    losses = {2**20: 1.8, 2**21: 1.7, 2**22: 1.65}
    rows = [row(Trial(depth=4, tokens=tokens, **ALL["softmax"]), loss) for tokens, loss in losses.items()]
    rows += [row(Trial(depth=4, tokens=2**22, **ALL["GKA + offsets"]), 1.62)]
    folder = write(tmp_path / "study", rows)
    timed(tmp_path / speed.SPEEDS.name, {"softmax": 1000.0, "GKA + offsets": 1000.0 * 2**0.5}, depth=4)
    said = cells(study_equal.longer(folder), "GKA + offsets", "softmax", "depth 4, 2^22")
    # Half way from 2^21 to 2^22: -1/8 of 1.8, 3/4 of 1.7 and 3/8 of 1.65. The chord would give 1.675.
    assert said["equal time"] == "-0.049"
