"""The benchmarks' rows and report: ratios inside a comparison, tables that never mix hardware, pages up to date."""

import pytest
import torch

from bench_lines import line, write
from gka.impl.cpu import build
from runs import frames
from runs.bench import error, report
from runs.bench.operators import FULL
from runs.bench.program import BenchConfig, Comparison, facts_of, result_file
from runs.bench.timing import Measurement
from trainkit_gka import cli
from trainkit_gka.progress import read_lines

CPU = torch.device("cpu")
CAUSAL = {"batch": 1, "tokens": 512, "queries": 512, "heads": 4, "head_dim": 32, "causal": True, "window": None}


def ratio_of(folder, *lines, **options):
    write(folder, *lines)
    return frames.ratios(frames.bench("attention", folder, **options)).tolist()


def test_the_ratio_is_of_the_faster_baseline_that_is_right(tmp_path):
    lines = [
        line("gka triton", "ours", 1.0),
        line("softmax flash", "baseline", 2.0),
        line("softmax cudnn", "baseline", 1.5),
        line("softmax fa3", "baseline", 0.1, status="wrong"),
        line("softmax flex", "other", 0.5),
        line("gka flex", "variant", 0.2),
    ]
    assert ratio_of(tmp_path, *lines) == [1.5]
    assert ratio_of(tmp_path, *lines[1:]) == ratio_of(tmp_path, lines[0]) == []
    lines[2]["metrics"]["graphed"] = False
    write(tmp_path, *lines)
    remarks = report.remarks(frames.bench("attention", tmp_path))
    assert "timed without a CUDA graph: softmax cudnn (vit-ti forward)" in remarks


def test_the_newest_comparison_counts_unless_it_was_quick(tmp_path):
    lines = []
    for group, time in (("1", 9.0), ("2", 3.0), ("quick", 2.0)):
        about = dict(group=group, quick=group == "quick")
        lines += [line("gka triton", "ours", 1.0, **about), line("softmax cudnn", "baseline", time, **about)]
    assert ratio_of(tmp_path, *lines) == [3.0] and ratio_of(tmp_path, *lines, quick=True) == [2.0]
    write(tmp_path / "quick", *lines[4:])
    assert frames.bench("attention", tmp_path / "quick").empty


def test_hardware_has_a_file_of_its_own(tmp_path, monkeypatch):
    names = {"NVIDIA H200": "nvidia-h200", "Intel(R) Xeon(R), 16 threads": "intel-xeon-16-threads"}
    for name in names:
        for module in ("runs.bench.program", "trainkit_gka.results"):
            monkeypatch.setattr(f"{module}.describe_hardware", lambda device, name=name: name)
        settings, failed = {"batch": 1, "dtype": "float32"}, Measurement("failed", "why")
        one = Comparison(settings, {"a": failed}, {"a": "ours"}, {"a": {"more": 2}})
        one.record(BenchConfig(results=tmp_path), "attention", "vit-ti", "forward", CPU)
    assert {path.name for path in tmp_path.iterdir()} == {f"bench_attention_{slug}.jsonl" for slug in names.values()}
    (record,) = read_lines(result_file(tmp_path, "attention", "NVIDIA H200"))
    assert record["hardware"] == "NVIDIA H200" and record["config"]["batch"] == 1
    assert record["commit"] and record["command"]
    assert (record["metrics"]["status"], record["metrics"]["reason"], record["metrics"]["more"]) == ("failed", "why", 2)


@pytest.mark.parametrize("name", ["attention", "deit", "gpt"])
def test_rows_say_what_their_candidates_are(name):
    lines = [line for path in frames.RESULTS.glob(f"bench_{name}_*.jsonl") for line in frames.records(path)]
    assert len(lines) > 20
    for record in lines:
        config = record["config"]
        facts = facts_of(config["candidate"], config["phase"], config, record["hardware"])
        assert facts.items() <= config.items() and facts["family"] in ("softmax", "gka"), config


def test_the_picture_of_speed_has_a_point_for_each_case_chip_and_number_of_threads(tmp_path):
    times = {"gka cpu": ("ours", 10.0), "softmax": ("baseline", 30.0), "softmax dense mask": ("baseline", 90.0)}
    about = [dict(hardware=f"a CPU, {threads}", settings=CAUSAL) for threads in ("1 thread", "2 threads")]
    lines = [
        line(n, *of, "lm-full", phase, **a) for a in about for phase in (FULL, "forward") for n, of in times.items()
    ]
    gpt = dict(hardware="a CPU, 1 thread", benchmark="gpt", settings={"depth": 4, "batch": 4, "sequence_len": 512})
    lines += [
        line("softmax", "baseline", 9.0, "d4", "training", **gpt),
        line("gka", "ours", 10.0, "d4", "training", **gpt),
    ]
    write(tmp_path, *lines)
    frame = report.speedups(tmp_path)
    points = [(row.chip, row.threads, round(row.ratio, 3)) for row in frame.itertuples()]
    assert points == [("a CPU, bfloat16", 1, 3.0), ("a CPU, bfloat16", 2, 3.0), ("a CPU, bfloat16", 1, 0.9)]
    assert frame.title.nunique() == 2
    assert report.draw_speedups(frame, tmp_path / "speed.png").stat().st_size > 10_000


def test_a_gpu_is_held_to_the_fastest_attention_and_to_torchs_default():
    """Worked out from the file by hand: a causal step of 2,048 tokens, where cuDNN's is the fastest."""
    rows = read_lines(frames.RESULTS / "bench_attention_nvidia-h200.jsonl")
    rows = [row for row in rows if (row["config"]["case"], row["config"]["phase"]) == ("lm-full", FULL)]
    times = {row["config"]["candidate"]: row["metrics"]["median_ms"] for row in rows}
    ours, cudnn, flash = (times[name] for name in ("gka triton", "softmax cudnn", "softmax flash"))
    [table] = report.gpus()
    [row] = [row for row in table.rows if row[:2] == ["causal, 16 × 2048 × 10 × 128", "forward + backward"]]
    assert ours > cudnn and flash > ours
    assert row[2:] == [f"{cudnn:.3g} (cudnn)", f"{ours:.3g}", f"{cudnn / ours:.2f}x", f"{flash / ours:.2f}x"]


@pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))
@pytest.mark.usefixtures("one_thread")  # as the page's figures are measured
def test_routes_are_measured_anew_and_other_rows_stay(tmp_path, monkeypatch):
    """Every route's error is of the size that the page has; where and when it was measured, dlog_sigma is chance."""
    path = tmp_path / "error.jsonl"
    path.write_bytes(error.FILE.read_bytes())
    monkeypatch.setattr(error, "KINDS", ("unit_norm", "all+100"))
    cli.run(error.main, error.ErrorConfig, ["--results", str(path)])
    before, after = read_lines(error.FILE), read_lines(path)
    other_parts = [row for row in before if row["config"]["part"] != error.PART]
    assert other_parts and [row for row in after if row["config"]["part"] != error.PART] == other_parts
    published = [row for row in error.records() if row["config"]["features"] in error.KINDS]
    measured = error.records(path)
    assert [row["config"] for row in measured] == [row["config"] for row in published]
    for row, known in zip(measured, published, strict=True):
        for name in ("y", "dx", "max_norm2_over_sigma2", "log_sigma_condition"):
            want = known["metrics"][name]
            assert row["metrics"][name] == (want and pytest.approx(want, rel=0.7)), (row["config"], name)
