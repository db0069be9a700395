"""The benchmarks: fair turns, the gate before the clock, a reason for every row without a time, and tables that never mix hardware."""

import contextlib
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gka import testing
from gka.masking import Mask
from runs.bench import attention as bench_attention
from runs.bench import deit as bench_deit
from runs.bench import gpt as bench_gpt
from runs.bench import plots as bench_plots
from runs.bench import report as bench_report
from runs.bench import timing as bench
from runs.bench.operators import FORWARD, FULL, Case, gate, operators
from runs.bench.results import Comparison, Recorder, load, result_file, slug
from runs.bench.timing import Measurement, Plan, interleave
from trainkit import cli
from trainkit.progress import read_lines

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def line(candidate, role, median_ms, case="vit-ti", phase="forward", status="ok", group="g", quick=False, **metrics):
    """A line of a result file."""
    config = {"case": case, "phase": phase, "candidate": candidate, "role": role, "group": group, "quick": quick,
              "batch": 256, "tokens": 197, "heads": 3, "head_dim": 64, "causal": False, "window": None, "queries": 197}  # fmt: skip
    measured = Measurement(
        status=status,
        median_ms=median_ms,
        low_ms=median_ms,
        high_ms=median_ms,
        first_ms=1.0,
        peak_mib=10.0,
        graphed=True,
    )
    return {"kind": "bench_attention", "date": "2026-01-02 03:04", "commit": "abc", "hardware": "NVIDIA H200", "torch": "2", "config": config,
            "metrics": {**vars(measured), **metrics}}  # fmt: skip


# Turns and clocks


def test_candidates_take_turns_and_every_round_starts_with_another():
    seen = []
    calls = {name: lambda n, name=name: seen.append((name, n)) for name in "abc"}
    measured = interleave(calls, CPU, Plan(rounds=6, warmup=0, buffers=2))
    assert all(
        m.samples == 6 and m.status == "ok" and m.first_ms is not None and m.peak_mib is None and not m.graphed
        for m in measured.values()
    )
    rounds = [seen[-12 * 3 :][k : k + 6] for k in range(0, 36, 6)]
    assert ["".join(name for name, _ in turn) for turn in rounds] == ["aabbcc", "bbccaa", "ccaabb"] * 2
    assert all([n for _, n in turn] == [0, 1] * 3 for turn in rounds)


def test_median_and_spread_are_quantiles_of_one_call(monkeypatch):
    clock = iter(
        [7.0, *[8.0, 8.0], *[60.0] * 2, *range(10, 31)]
    )  # first call; calibration; warm-up; 21 samples, of 2 calls each

    def elapsed(work, device):
        work()
        return float(next(clock))

    monkeypatch.setattr(bench, "_elapsed_ms", elapsed)
    found = interleave({"a": lambda n: None}, CPU, Plan(rounds=21, warmup=2, buffers=2))["a"]
    assert (found.first_ms, found.low_ms, found.median_ms, found.high_ms, found.samples) == (7.0, 7.0, 10.0, 13.0, 21)


def test_short_calls_are_repeated_until_a_sample_is_long_enough(monkeypatch):
    calls = []

    def elapsed(work, device):  # every call takes a millisecond
        before = len(calls)
        work()
        return float(len(calls) - before)

    monkeypatch.setattr(bench, "_elapsed_ms", elapsed)
    found = interleave({"a": calls.append}, CPU, Plan(rounds=2, warmup=1, sample_ms=10))["a"]
    assert found.samples == 2 and found.median_ms == 1 and len(calls) >= 2 * 10


def test_the_first_call_is_measured_apart(monkeypatch):
    times = iter([100.0])
    monkeypatch.setattr(bench, "_elapsed_ms", lambda work, device: (work(), next(times, 1.0))[1])
    found = interleave({"a": lambda n: None}, CPU, Plan(rounds=3))["a"]
    assert found.first_ms == 100 > found.high_ms


def test_a_comparison_ends_when_its_time_is_up_but_not_before_three_rounds():
    assert (
        interleave({"a": lambda n: time.sleep(1e-3)}, CPU, Plan(rounds=1000, seconds=1e-4))["a"].samples
        == bench.MIN_ROUNDS
    )


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs /proc")
def test_a_busy_machine_shows():
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        found = interleave({"a": lambda n: time.sleep(0.05)}, CPU, Plan(rounds=20))["a"]
    finally:
        busy.kill()
        busy.wait()
    assert found.elsewhere > 0.3
    comparison = Comparison("a", "forward", [line("a", "ours", 1.0, elsewhere=found.elsewhere)])
    assert (
        "while 1 of these 1 were timed: measure again on a quiet machine" in bench_report.disturbance([comparison])[0]
    )
    assert not bench_report.disturbance(
        [Comparison("a", "forward", [line("a", "ours", 1.0, elsewhere=0.02), line("a", "ours", 1.0)])]
    )


def test_what_is_wrong_or_fails_is_not_timed_and_says_why():
    counts = dict.fromkeys(("right", "wrong", "unsupported", "unjudged", "breaks later"), 0)

    def calls(name):
        def call(n):
            counts[name] += 1
            if name == "unsupported":
                raise ValueError("no kernel\n   for this")
            if name == "breaks later" and counts[name] == 6:
                raise torch.OutOfMemoryError("out of memory")

        return call

    def cannot_judge():
        raise RuntimeError("no float64 here")

    gates = {"right": lambda: None, "wrong": lambda: "y is off by 1.0e-01", "unjudged": cannot_judge}
    measured = interleave({name: calls(name) for name in counts}, CPU, Plan(rounds=5, warmup=1), gates)
    assert {name: (m.status, m.reason) for name, m in measured.items()} == {
        "right": ("ok", ""), "wrong": ("wrong", "y is off by 1.0e-01"), "unsupported": ("failed", "no kernel for this"),
        "unjudged": ("failed", "no float64 here"), "breaks later": ("failed", "out of memory"),
    }  # fmt: skip
    assert (
        counts["wrong"] == counts["unjudged"] == 1
        and measured["wrong"].median_ms is None
        and measured["breaks later"].median_ms is None
    )
    assert measured["right"].samples == 5


def test_a_graph_that_cannot_be_captured_is_a_note_and_the_rest_replay(monkeypatch):
    """Without a GPU: torch's graphs are played by a stand-in that records the calls made inside, and replays by counting."""
    replayed, made = [], []

    class Graph:
        def replay(self):
            replayed.append(self)

    @contextlib.contextmanager
    def capture(graph, stream):
        try:
            yield
        except RuntimeError:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904 (what torch does)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    for name in ("current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: None)
    monkeypatch.setattr(bench, "_own_stream", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(bench, "_elapsed_ms", lambda work, device: work() or 1.0)
    monkeypatch.setattr(bench, "peak_mib", lambda work, device: 3.0)

    def stubborn(n):
        made.append(n)
        if len(made) == 1 + 2 + 2:  # first call, warm-up, and the second call of the capture
            raise RuntimeError("not while capturing")

    plan = Plan(rounds=4, warmup=2, buffers=2, graph=True)
    measured = interleave({"a": lambda n: None, "b": stubborn}, torch.device("cuda"), plan)
    assert measured["a"].graphed and not measured["a"].note and len(replayed) == 2 + 2 + 4
    assert (
        measured["b"].status == "ok"
        and not measured["b"].graphed
        and measured["b"].note == "timed without a CUDA graph: not while capturing"
    )
    assert {m.peak_mib for m in measured.values()} == {3.0} and {m.samples for m in measured.values()} == {4}


# Gates


CASES = ["2x19x2x16", "3x19x2x16c", "2x33x2x16cw7n", "2x19x2x16n", "2x20x2x16nd"]


@pytest.mark.parametrize("text", CASES)
def test_every_operator_of_a_cpu_passes_its_gate(text):
    case = Case.parse(text)
    for phase in (FORWARD,) if case.queries else (FORWARD, FULL):
        found = operators(case, CPU, torch.float32, phase)
        assert [operator.role for operator in found.values()].count("ours") == 1 and next(
            iter(found.values())
        ).role == "ours"
        for name, operator in found.items():
            if "triton" not in name:
                assert gate(operator, case, phase, CPU, torch.float32) is None, name


@pytest.mark.parametrize("family", ["gka", "softmax"])
def test_the_gate_stops_what_is_wrong(family):
    case = Case.parse("3x19x2x16c")
    found = operators(case, CPU, torch.float32, FULL)
    right = found["gka sdpa" if family == "gka" else "softmax sdpa"]

    def judge(change, phase=FULL):
        return gate(
            replace(right, function=lambda *tensors: change(right.function(*tensors), tensors)),
            case,
            phase,
            CPU,
            torch.float32,
        )

    assert judge(lambda y, tensors: y) is None
    assert "y is off by 1.0e-03" in judge(lambda y, tensors: 1.001 * y, FORWARD)
    assert "y is off by nan" in judge(lambda y, tensors: y * float("nan"), FORWARD)
    last = torch.zeros(3, 1, 1, 1)
    last[-1] = 1e-3
    assert "y is off" in judge(lambda y, tensors: y + last, FORWARD)
    second = 1 if family == "gka" else 2  # log_sigma, values
    assert ("dlog_sigma" if family == "gka" else "dv") in judge(
        lambda y, t: y + (t[second] - t[second].detach()).sum() * 0.01
    )


def test_the_gates_of_whole_models_stop_what_is_wrong():
    config = bench_gpt.GPTBenchConfig(depth=1, batch_size=2, sequence_len=16, vocab_size=64).fill("cpu")
    runtime = bench_gpt.setup("cpu")
    for kind in ("softmax", "gka"):
        gpt = bench_gpt.Candidate(kind, config, runtime)
        right = gpt.network
        for phase in (bench_gpt.TRAINING, bench_gpt.PREFILL):
            gpt.network = right
            assert gpt.gate(phase) is None
            gpt.network = lambda *arguments: 1.001 * right(*arguments)  # noqa: B023 (called at once)
            assert "is off by 1.0e-03" in gpt.gate(phase)
        if kind == "gka":  # attention matters in the timed model: another bandwidth is another gradient
            before = bench_gpt.gradient(gpt.model, lambda: gpt.model(gpt.ids, gpt.targets))  # noqa: B023
            with torch.no_grad():
                gpt.model.transformer.h[0].attn.log_sigma -= 1
            assert testing.error(bench_gpt.gradient(gpt.model, lambda: gpt.model(gpt.ids, gpt.targets)), before) > 0.01  # noqa: B023
    for phase in (bench_deit.INFERENCE, bench_deit.TRAINING):
        vit = bench_deit.Candidate("gka", "ti", phase, 3, bench_deit.DeitConfig(compile_mode="off").fill("cpu"), CPU)
        assert vit.gate() is None
        scale = vit.network
        vit.network = lambda images: 1.01 * scale(images)  # noqa: B023
        assert "is off by" in vit.gate()


# Results, ratios, tables


def test_the_ratio_is_of_the_faster_baseline_that_is_right():
    lines = [line("gka triton", "ours", 1.0, peak_mib=5.0), line("softmax flash", "baseline", 2.0), line("softmax cudnn", "baseline", 1.5),
             line("softmax fa3", "baseline", 0.1, status="wrong"), line("softmax flex", "other", 0.5), line("gka flex", "variant", 0.2),
             line("gka eager", "eager", 9.0)]  # fmt: skip
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
    names = [
        "NVIDIA H200",
        "NVIDIA H100 80GB HBM3",
        "Intel(R) Xeon(R) Processor, 2 threads",
        "Intel(R) Xeon(R) Processor, 16 threads",
    ]
    assert [slug(name) for name in names] == [
        "nvidia-h200",
        "nvidia-h100-80gb-hbm3",
        "intel-xeon-processor-2-threads",
        "intel-xeon-processor-16-threads",
    ]
    for name in names[:2]:
        monkeypatch.setattr("runs.bench.results.describe_hardware", lambda device, name=name: name)
        monkeypatch.setattr("trainkit.results.describe_hardware", lambda device, name=name: name)
        recorder = Recorder(bench.BenchConfig(results=tmp_path), "attention", CPU)
        recorder.record(
            "vit-ti",
            "forward",
            {"a": Measurement("failed", "why")},
            {"a": "ours"},
            {"batch": 1},
            lambda name, m: {"more": 2},
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "bench_attention_nvidia-h100-80gb-hbm3.jsonl",
        "bench_attention_nvidia-h200.jsonl",
    ]
    (record,) = read_lines(result_file(tmp_path, "attention", "NVIDIA H200"))
    assert (
        record["hardware"] == "NVIDIA H200"
        and record["config"]["batch"] == 1
        and record["commit"]
        and record["command"]
    )
    assert (record["metrics"]["status"], record["metrics"]["reason"], record["metrics"]["more"]) == ("failed", "why", 2)


def write(folder, *lines):
    result_file(folder, "attention", "NVIDIA H200").write_text("".join(json.dumps(each) + "\n" for each in lines))


def test_the_newest_comparison_counts_and_quick_ones_only_when_asked(tmp_path):
    old = [line("gka triton", "ours", 1.0, group="1"), line("softmax flash", "baseline", 9.0, group="1")]
    new = [line("gka triton", "ours", 1.0, group="2"), line("softmax cudnn", "baseline", 3.0, group="2")]
    quick = [
        line("gka triton", "ours", 1.0, group="3", quick=True),
        line("softmax cudnn", "baseline", 2.0, group="3", quick=True),
    ]
    write(tmp_path, *old, *new, *quick)
    assert load(tmp_path, "attention", "NVIDIA H200")["vit-ti", "forward"].ratio() == 3.0
    assert load(tmp_path, "attention", "nvidia-h200", quick=True)["vit-ti", "forward"].ratio() == 2.0
    assert load(tmp_path, "attention", "NVIDIA H100") == {}


def test_the_report_prints_tables_reasons_and_targets_of_a_file(tmp_path, capsys):
    write(tmp_path, line("gka triton", "ours", 1.0), line("softmax flash", "baseline", 1.6), line("gka eager", "eager", 4.0),
          line("softmax fa3", "baseline", None, status="failed", reason="flash_attn_interface is not installed"),
          line("gka triton", "ours", 1.0, phase=FULL, group="h"), line("softmax flash", "baseline", 1.6, phase=FULL, group="h"),
          line("gka eager", "eager", 4.0, phase=FULL, group="h"))  # fmt: skip
    bench_report.main(bench_report.ReportConfig(results=tmp_path, hardware="NVIDIA H200", out=tmp_path / "out"))
    said = capsys.readouterr().out
    assert re.search(r"vit-ti forward +│ +1.6 \(flash\) │ +1 \(triton\) │ +1.60x │ +1.00x │ +4.00x", said)
    assert "softmax fa3 failed: flash_attn_interface is not installed (vit-ti forward)" in said
    assert "Measured 2026-01-02 at commit abc on NVIDIA H200, torch 2." in said
    for target, verdict in (("DeiT-Ti, forward ", "pass"), ("DeiT-Ti, forward+backward ", "miss"), ("DeiT-Ti, against eager GKA ", "miss"),
                            ("d20 training step ", "not measured")):  # fmt: skip
        assert re.search(rf"{re.escape(target)}.*│ +{verdict} ", said), target
    page = (tmp_path / "out/bench_nvidia-h200.md").read_text()
    assert "| softmax fa3 | baseline |" in page and "failed: flash_attn_interface is not installed" in page
    assert (tmp_path / "out/roofline_nvidia-h200.png").stat().st_size > 1000


def test_targets_of_a_cpu_are_its_own():
    def group(case, phase, ours, baseline, **metrics):
        speeds = {"items_per_second": 1 / baseline}, {"items_per_second": 1 / ours}
        lines = [
            line("softmax", "baseline", baseline, case, phase, **speeds[0], **metrics),
            line("gka", "ours", ours, case, phase, **speeds[1]),
        ]
        return {(case, phase): Comparison(case, phase, lines)}

    deit = group("deit-ti-b8", "inference", 1.0, 1.1) | group("deit-ti-b16", "inference", 0.5, 1.0)
    gpt = group("d4", "training", 1.0, 1.13, flops_per_token=120.0)
    gpt["d4", "training"].lines[1]["metrics"]["flops_per_token"] = 100.0
    found = bench_report.targets({"attention": {}, "deit": deit, "gpt": gpt}, cuda=False)
    assert [(target.verdict, round(target.measured, 2)) for target in found] == [("pass", 2.0), ("miss", 1.13)]
    assert found[1].wanted == pytest.approx(0.95 * 1.2)
    assert {
        target.verdict for target in bench_report.targets({"attention": {}, "deit": {}, "gpt": {}}, cuda=False)
    } == {"not measured"}
    memory = bench_report.Target("memory", 0.85, 0.8, at_most=True)
    assert memory.verdict == "pass" and replace(memory, measured=0.9).verdict == "miss"


def test_the_roofline_is_the_arithmetic_of_the_shapes():
    """Microseconds worked out by hand for DeiT-Ti's operator on an H200: 7.63 GFLOP, 39 MB for GKA and 78 MB for softmax; five products backward."""
    peaks, config = bench_plots.peaks_of("NVIDIA H200"), line("a", "ours", 1.0)["config"]
    assert (
        bench_plots.peaks_of("nvidia-h100-80gb-hbm3").bytes < peaks.bytes
        and bench_plots.peaks_of("NVIDIA A100") is None
    )
    bounds = [
        1e3 * bench_plots.bound_ms(config, phase, family, peaks)
        for phase in (FORWARD, FULL)
        for family in ("softmax", "gka")
    ]
    assert bounds == pytest.approx([18.0, 9.7, 18.0 + 63.1, 9.7 + 24.1], rel=0.01)
    for causal, window in ((True, None), (True, 7), (False, 7), (False, None)):
        want = Mask(causal, window).dense(40, 40, CPU).sum().item()
        assert bench_plots.pairs({**config, "tokens": 40, "queries": 40, "causal": causal, "window": window}) == want
    decode = {**config, "queries": 1, "tokens": 8192}
    assert bench_plots.bound_ms(decode, FORWARD, "softmax", peaks) == pytest.approx(
        2 * bench_plots.bound_ms(decode, FORWARD, "gka", peaks)
    )


# The commands


def test_the_benchmarks_run_end_to_end(tmp_path, capsys):
    common = ["--device-type", "cpu", "--results", str(tmp_path), "--rounds", "2", "--seconds", "1"]
    cli.run(
        bench_attention.main,
        bench_attention.AttentionConfig,
        [*common, "--shapes", "2x9x1x16", "1x12x1x16cw4n", "1x12x1x16nd", "--skip", "eager"],
    )
    cli.run(
        bench_deit.main,
        bench_deit.DeitConfig,
        [*common, "--batch-sizes", "1", "--train-batch-sizes", "1", "--compile-mode", "off"],
    )
    cli.run(
        bench_gpt.main,
        bench_gpt.GPTBenchConfig,
        [*common, "--depth", "1", "--batch-size", "2", "--sequence-len", "16", "--vocab-size", "64"],
    )
    files = {path.name.split("_")[1]: read_lines(path) for path in tmp_path.iterdir()}
    assert {what: len(lines) for what, lines in files.items()} == {
        "attention": 3 + 3 + 5 + 5 + 5,
        "deit": 4,
        "gpt": 2 + 2 + 4 + 4,
    }
    for lines in files.values():
        for each in lines:
            metrics, config = each["metrics"], each["config"]
            assert metrics["status"] == "ok" or "triton" in config["candidate"], (
                each
            )  # where there is no interpreter it says why
            assert bool(metrics["reason"]) == (metrics["median_ms"] is None) == (metrics["status"] != "ok")
    assert {each["config"]["case"] for each in files["gpt"]} == {"d1-b2-t16-v64"}
    assert all(each["metrics"]["items_per_second"] > 0 for each in files["gpt"])
    capsys.readouterr()
    cli.run(
        bench_report.main,
        bench_report.ReportConfig,
        ["--device-type", "cpu", "--results", str(tmp_path), "--out", str(tmp_path / "out")],
    )
    said = capsys.readouterr().out
    for words in (
        "2x9x1x16 forward ",
        "deit-ti-b1 inference",
        "d1-b2-t16-v64 training",
        "DeiT-Ti forward",
        "1 not measured",
    ):
        assert words in said


@pytest.mark.parametrize(
    "main, config, flags, words",
    [
        (
            bench_attention.main,
            bench_attention.AttentionConfig,
            ["--shapes", "2x17x2"],
            "--shapes: expected BxTxHxD such as 16x2048x10x128",
        ),
        (
            bench_attention.main,
            bench_attention.AttentionConfig,
            ["--only", "swep"],
            "--only swep: no such case; there are vit-ti, lm-full,",
        ),
        (
            bench_attention.main,
            bench_attention.AttentionConfig,
            ["--rounds", "-1"],
            "--rounds must not be negative, got -1",
        ),
        (
            bench_deit.main,
            bench_deit.DeitConfig,
            ["--batch-sizes", "8", "0"],
            "--batch-sizes must be at least 1, got 0",
        ),
        (bench_deit.main, bench_deit.DeitConfig, ["--impl", "cuda"], "--impl: impl must be one of auto, reference,"),
        (
            bench_gpt.main,
            bench_gpt.GPTBenchConfig,
            ["--depth", "-1"],
            "--depth must be at least 1, or 0 for the device's own, got -1",
        ),
        (
            bench_gpt.main,
            bench_gpt.GPTBenchConfig,
            ["--window-pattern", "X"],
            "window_pattern must be made of the letters S, L, got 'X'",
        ),
        (
            bench_report.main,
            bench_report.ReportConfig,
            ["--hardware", "NVIDIA H300"],
            "has no benchmark of NVIDIA H300",
        ),
    ],
)
def test_a_mistake_is_one_line(main, config, flags, words, tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        cli.run(main, config, ["--device-type", "cpu", "--results", str(tmp_path), *flags])
    said = capsys.readouterr().err
    assert left.value.code == 2 and said.startswith("error: ") and words in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_command_leaves_with_2_for_a_mistake(tmp_path):
    done = subprocess.run([sys.executable, "-m", "runs.bench.attention", "--results", tmp_path, "--device-type", "cpu", "--shapes", "1x0x1x16"],
                          cwd=ROOT, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 2 and done.stderr.strip().splitlines()[-1].startswith("error: --shapes: expected BxTxHxD")


@pytest.mark.gpu
def test_the_operator_benchmark_on_cuda(tmp_path):
    shapes = ["8x197x3x64", "2x512x4x128cn", "2x512x4x128cw256n", "4x1024x4x128nd"]
    cli.run(
        bench_attention.main,
        bench_attention.AttentionConfig,
        ["--device-type", "cuda", "--quick", "--results", str(tmp_path), "--shapes", *shapes],
    )
    (path,) = tmp_path.iterdir()
    groups = {}
    for each in read_lines(path):
        groups.setdefault((each["config"]["case"], each["config"]["phase"]), []).append(each)
    assert len(groups) == 7
    for key, lines in groups.items():
        right = [each for each in lines if each["metrics"]["status"] == "ok"]
        assert {"ours", "baseline"} <= {each["config"]["role"] for each in right}, (
            key,
            [each["metrics"]["reason"] for each in lines],
        )
        assert not [each["metrics"]["reason"] for each in lines if each["metrics"]["status"] == "wrong"], key
        assert all(each["metrics"]["graphed"] and each["metrics"]["peak_mib"] > 0 for each in right), (
            key,
            [each["metrics"]["note"] for each in right],
        )
