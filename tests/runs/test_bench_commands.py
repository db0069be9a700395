"""The benchmarks as commands: end to end on tiny shapes, and mistakes as one line; tuning of tiles."""

import re

import pytest
import torch

from gka.impl.cpu import build
from gka.impl.triton import configs
from gka.impl.triton.configs import Config
from operator_cases import DEVICE
from runs.bench import attention, deit, gpt, parts, report, tune
from runs.bench.timing import Plan
from runs.bench.tune import Workload
from trainkit_gka import cli
from trainkit_gka.progress import read_lines

THREADS = torch.get_num_threads()
COMMANDS = {
    attention: attention.AttentionConfig,
    deit: deit.DeitConfig,
    gpt: gpt.GPTBenchConfig,
    parts: parts.PartsConfig,
    report: report.BenchReportConfig,
    tune: tune.TuneConfig,
}


def run(module, *flags):
    cli.run(module.main, COMMANDS[module], [str(flag) for flag in flags])


@pytest.mark.slow
def test_the_benchmarks_run_end_to_end(tmp_path, capsys):
    common = ["--device-type", "cpu", "--results", tmp_path, "--rounds", 2, "--seconds", 1]
    run(attention, *common, "--shapes", "2x9x1x16", "1x12x1x16cw4n", "1x12x2x16ndk", "--skip", "eager", "general")
    run(deit, *common, "--compile", "off", "--shapes", "deit-ti-b1")
    shapes = ["d1-b2-t16-v64", "d2-b2-t16-v64"]
    run(gpt, *common, "--compile", "off", "--shapes", *shapes, "--only", shapes[0], f"{shapes[1]} training")
    files = {path.name.split("_")[1]: read_lines(path) for path in sorted(tmp_path.glob("*-1-thread.jsonl"))}
    files |= {path.name.split("_")[1]: read_lines(path) for path in tmp_path.glob(f"*-{THREADS}-thread*.jsonl")}
    absent = ("gka cpu",) if build.obstacle() else ()
    for lines in files.values():
        for each in lines:
            metrics, config = each["metrics"], each["config"]
            # Where there is no compiler, it says why.
            assert metrics["status"] == "ok" or config["candidate"].startswith(absent), each
    assert all(each["metrics"]["items_per_second"] > 0 for each in files["gpt"])
    flops = {each["config"]["role"]: each["metrics"]["flops_per_image"] for each in files["deit"]}
    assert round(flops["baseline"] / flops["ours"], 2) == 1.26  # table 3 of the paper: 2.51 and 1.98 GFLOPs
    capsys.readouterr()
    run(report, "--device-type", "cpu", "--results", tmp_path)
    output = capsys.readouterr().out
    for words in ("2 × 9 × 1 × 16", "DeiT-Ti, 1 image", "GPT of depth 1, 2 × 16 tokens"):
        assert words in output


@pytest.mark.parametrize(
    "module, flags, words",
    [
        (attention, ["--shapes", "2x17x2"], "--shapes: expected BxTxHxD such as 16x2048x10x128"),
        (attention, ["--only", "swep"], "--only swep: no such case; there are vit-ti,"),
        (attention, ["--threads", "0"], "--threads must be at least 1, got 0"),
        (attention, ["--switch", "short"], "--switch needs a CUDA device"),
        (report, ["--hardware", "NVIDIA H300"], "has no benchmark of NVIDIA H300"),
        (deit, ["--compile", "on"], "--compile on: torch.compile fails here"),
        (gpt, ["--compile", "on"], "--compile on: torch.compile fails here"),
    ],
)
@pytest.mark.usefixtures("no_compiler")
def test_a_mistake_is_one_line_before_anything_is_measured(module, flags, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        run(module, "--device-type", "cpu", "--results", tmp_path, *flags)
    output = capsys.readouterr().err
    assert stopped.value.code == 2 and output.startswith("error: ") and output.count("\n") == 1
    assert re.search(words, output) and not list(tmp_path.iterdir())


def test_the_parts_of_a_step_are_counted_and_every_number_of_threads_has_a_file(tmp_path, capsys):
    timed = "--shapes d2-b1-t16-v64-SL --dtypes float32 --threads 1 3 --rounds 2 --seconds 1 --compile off"
    run(parts, "--device-type", "cpu", "--results", tmp_path, *timed.split())
    path, of_three = sorted(tmp_path.iterdir())
    assert (path.stem[-9:], of_three.stem[-10:]) == ("-1-thread", "-3-threads")
    assert torch.get_num_threads() == THREADS
    lines = {(each["config"]["phase"], each["config"]["candidate"]): each["metrics"] for each in read_lines(path)}
    assert all(metrics["status"] == "ok" and metrics["median_ms"] > 0 for metrics in lines.values())
    calls = {name: [lines[name, kind]["calls"] for kind in parts.ROLES] for name, _ in lines}
    expected = {"step": [1, 1], "optimiser": [1, 1], "projections": [8, 2], "rotary positions": [4, 2], "MLPs": [2, 2]}
    expected |= {"norms": [6, 6], "attention to 8": [1, 1], "attention to 16": [1, 1]}
    assert {name: calls[name] for name in expected} == expected
    assert "remainder" in capsys.readouterr().out


@pytest.mark.parametrize("path", configs.PATHS)
def test_a_path_is_switched_for_the_length_of_a_call(path):
    device = torch.device(DEVICE)
    taken = configs.table_of(device).takes(path)
    name, switch = attention.switched(path, device)
    assert switch(lambda: configs.table_of(device).takes(path))() == (not taken) == ("without" not in name)
    assert configs.table_of(device).takes(path) == taken


# Tuning: every candidate is held to the error budget with its own tiles, then timed in turns

SMALL = [Workload(kernel, "1x20x2x32cw8nv") for kernel in ("forward", "queries", "keys")]
SMALL += [Workload("symmetric", "1x20x2x32"), Workload("decode", "1x20x2x32cnd")]


def entry(kernel):
    """The configuration of the moment."""
    return configs.table_of(torch.device(DEVICE)).entries[kernel, 32, 4]


@pytest.mark.parametrize("workload", SMALL, ids=lambda workload: workload.kernel)
def test_candidates_are_judged_and_timed_with_their_own_tiles(workload, monkeypatch):
    good, wrong, impossible = Config(16, 32, 4, 1), Config(16, 16, 4, 1), Config(48, 16, 4, 1)
    shipped, operator, tiles = entry(workload.kernel), tune.gaussian_attention, []

    def attend(*tensors, **options):
        tiles.append(entry(workload.kernel))
        return operator(*tensors, **options) * (1.01 if tiles[-1] == wrong else 1.0)

    monkeypatch.setattr(tune, "gaussian_attention", attend)
    plan = Plan(rounds=2, warmup=0)
    measured = tune.tune(workload, [wrong, impossible, good, shipped], torch.float32, torch.device(DEVICE), plan)
    assert {config: one.status for config, one in measured.items()} == {
        shipped: "ok", good: "ok", wrong: "wrong", impossible: "failed"
    }  # fmt: skip
    assert "off by 1.0e-02 of its norm" in measured[wrong].reason and "power of 2" in measured[impossible].reason
    times = [one.median_ms for one in measured.values()]
    assert times[:2] == sorted(times[:2]) and times[2:] == [None, None]
    assert tiles[-4:] == [shipped, good, good, shipped]  # two rounds, in turns
    assert entry(workload.kernel) == shipped


@pytest.mark.gpu
def test_the_command_times_a_candidate_on_the_gpu(monkeypatch, capsys):
    monkeypatch.setattr(tune, "grid", lambda kernel: [Config(16, 64, 4, 2)])
    run(tune, "--only", "decode-d64")
    assert capsys.readouterr().out.count(" ms\n") == 2


@pytest.mark.gpu
def test_the_operator_benchmark_on_cuda(tmp_path):
    shapes = ["8x197x3x64", "2x512x4x128cn", "2x512x4x128cw256n", "4x1024x4x128nd"]
    flags = ["--shapes", *shapes, "--switch", "short"]
    run(attention, "--device-type", "cuda", "--quick", "--results", tmp_path, *flags)
    (path,) = tmp_path.iterdir()
    groups = {}
    for each in read_lines(path):
        groups.setdefault((each["config"]["case"], each["config"]["phase"]), []).append(each)
    assert len(groups) == 7
    for key, lines in groups.items():
        reasons = [each["metrics"]["reason"] for each in lines]
        right = [each for each in lines if each["metrics"]["status"] == "ok"]
        assert {"ours", "baseline"} <= {each["config"]["role"] for each in right}, (key, reasons)
        assert not [each for each in lines if each["metrics"]["status"] == "wrong"], (key, reasons)
        assert all(each["metrics"]["graphed"] and each["metrics"]["peak_mib"] > 0 for each in right), (key, right)
