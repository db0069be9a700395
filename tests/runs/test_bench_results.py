"""The benchmarks' results: ratios inside a comparison, tables that never mix hardware."""

import re

import torch

from bench_lines import line, write
from runs.bench import report
from runs.bench.config import BenchConfig
from runs.bench.measurement import Measurement
from runs.bench.operators import FULL
from runs.bench.results import Comparison, Recorder, load, result_file
from trainkit_gka.progress import read_lines

CPU = torch.device("cpu")


def test_the_ratio_is_of_the_faster_baseline_that_is_right():
    lines = [
        line("gka triton", "ours", 1.0, peak_mib=5.0),
        line("softmax flash", "baseline", 2.0),
        line("softmax cudnn", "baseline", 1.5),
        line("softmax fa3", "baseline", 0.1, status="wrong"),
        line("softmax flex", "other", 0.5),
        line("gka flex", "variant", 0.2),
        line("gka eager", "eager", 9.0),
    ]
    comparison = Comparison("vit-ti", "forward", lines)
    assert (comparison.ratio(), comparison.ratio("eager"), comparison.ratio(metric="peak_mib")) == (1.5, 9.0, 2.0)
    assert comparison.unlike() == ""
    lines[2]["metrics"]["graphed"] = False
    assert comparison.unlike() == "without a CUDA graph: softmax cudnn"
    assert (
        Comparison("vit-ti", "forward", lines[1:]).ratio() is None
        and Comparison("vit-ti", "forward", lines[:1]).ratio() is None
    )


def test_hardware_has_a_file_of_its_own(tmp_path, monkeypatch):
    names = {"NVIDIA H200": "nvidia-h200", "Intel(R) Xeon(R), 16 threads": "intel-xeon-16-threads"}
    for name in names:
        for module in ("runs.bench.results", "trainkit_gka.results"):
            monkeypatch.setattr(f"{module}.describe_hardware", lambda device, name=name: name)
        recorder, failed = Recorder(BenchConfig(results=tmp_path), "attention", CPU), Measurement("failed", "why")
        recorder.record("vit-ti", "forward", {"a": failed}, {"a": "ours"}, {"batch": 1}, lambda name, m: {"more": 2})
    assert {path.name for path in tmp_path.iterdir()} == {f"bench_attention_{slug}.jsonl" for slug in names.values()}
    (record,) = read_lines(result_file(tmp_path, "attention", "NVIDIA H200"))
    assert record["hardware"] == "NVIDIA H200" and record["config"]["batch"] == 1
    assert record["commit"] and record["command"]
    assert (record["metrics"]["status"], record["metrics"]["reason"], record["metrics"]["more"]) == ("failed", "why", 2)


def test_the_newest_comparison_counts_unless_it_was_quick(tmp_path):
    def pair(group, baseline, time, **quick):
        timed = ("gka triton", "ours", 1.0), (baseline, "baseline", time)
        return [line(*each, group=group, **quick) for each in timed]

    quick = pair("3", "softmax cudnn", 2.0, quick=True)
    write(tmp_path, *pair("1", "softmax flash", 9.0), *pair("2", "softmax cudnn", 3.0), *quick)
    assert load(tmp_path, "attention", "NVIDIA H200")["vit-ti", "forward"].ratio() == 3.0
    assert load(tmp_path, "attention", "nvidia-h200", quick=True)["vit-ti", "forward"].ratio() == 2.0
    assert load(tmp_path, "attention", "NVIDIA H100") == {}


def test_the_report_prints_tables_reasons_of_a_file(tmp_path, capsys):
    lines = []
    for phase in ("forward", FULL):
        timed = {"gka triton": ("ours", 1.0), "softmax flash": ("baseline", 1.6), "gka eager": ("eager", 4.0)}
        lines += [line(name, *of, phase=phase, group=phase) for name, of in timed.items()]
    missing = dict(status="failed", reason="flash_attn_interface is not installed", group="forward")
    write(tmp_path, *lines, line("softmax fa3", "baseline", None, **missing))
    report.main(report.ReportConfig(results=tmp_path, hardware="NVIDIA H200", out=tmp_path / "out"))
    said = capsys.readouterr().out
    assert re.search(r"vit-ti forward +1.6 \(flash\) +1 \(triton\) +1.60x +1.00x +4.00x", said)
    assert "softmax fa3 failed: flash_attn_interface is not installed (vit-ti forward)" in said
