"""The benchmarks' report: ratios inside a comparison, and numbers of the pages worked out and measured again."""

import pytest

from bench_lines import line, write
from gka.impl.cpu import build
from runs import frames
from runs.bench import error, report
from runs.bench.operators import FULL
from runs.bench.program import result_file
from trainkit_gka import cli
from trainkit_gka.progress import read_lines


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


def test_the_newest_comparison_counts_unless_it_was_quick(tmp_path):
    lines = []
    for group, time in (("1", 9.0), ("2", 3.0), ("quick", 2.0)):
        about = dict(group=group, quick=group == "quick")
        lines += [line("gka triton", "ours", 1.0, **about), line("softmax cudnn", "baseline", time, **about)]
    assert ratio_of(tmp_path, *lines) == [3.0] and ratio_of(tmp_path, *lines, quick=True) == [2.0]
    write(tmp_path / "quick", *lines[4:])
    assert frames.bench("attention", tmp_path / "quick").empty


def test_hardware_has_a_file_of_its_own(tmp_path):
    named = {"NVIDIA H200": "nvidia-h200", "Intel(R) Xeon(R), 16 threads": "intel-xeon-16-threads"}
    files = [result_file(tmp_path, "attention", hardware).name for hardware in named]
    assert files == [f"bench_attention_{slug}.jsonl" for slug in named.values()]


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
def test_errors_measured_anew_are_those_of_the_page_and_other_rows_stay(tmp_path, monkeypatch):
    """Where and when it was measured, dlog_sigma is chance."""
    path = tmp_path / "error.jsonl"
    path.write_bytes(error.FILE.read_bytes())
    monkeypatch.setattr(error, "KINDS", ("unit_norm", "all+100"))
    cli.run(error.main, error.ErrorConfig, ["--results", str(path)])
    others = [[row for row in read_lines(file) if row["config"]["part"] != error.PART] for file in (error.FILE, path)]
    assert others[0] == others[1] != []
    published = [row for row in error.records() if row["config"]["features"] in error.KINDS]
    measured = error.records(path)
    assert [row["config"] for row in measured] == [row["config"] for row in published]
    for row, known in zip(measured, published, strict=True):
        for name in ("y", "dx", "max_norm2_over_sigma2", "log_sigma_condition"):
            want = known["metrics"][name]
            assert row["metrics"][name] == (want and pytest.approx(want, rel=0.7)), (row["config"], name)
