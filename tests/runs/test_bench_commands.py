"""The benchmarks as commands: end to end on tiny shapes, and mistakes as one line."""

import re

import pytest
import torch

from gka.impl.cpu import build
from runs.bench import attention, deit, gpt, report, tune
from trainkit_gka import cli
from trainkit_gka.progress import read_lines

THREADS = torch.get_num_threads()
COMMANDS = {
    attention: attention.AttentionConfig,
    deit: deit.DeitConfig,
    gpt: gpt.GPTBenchConfig,
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
    assert {name: len(lines) for name, lines in files.items()} == {
        "attention": 2 * (4 + 6) + 2 * (4 + 6) + 3 + 5,  # bfloat16 has softmax in float32 too
        "deit": 2 * (3 + 5),
        "gpt": 2 * (5 + 7) + (2 + 3) + (4 + 4),
    }
    absent = ("gka cpu",) if build.obstacle() else ()
    for lines in files.values():
        for each in lines:
            metrics, config = each["metrics"], each["config"]
            # Where there is no compiler, it says why.
            assert metrics["status"] == "ok" or config["candidate"].startswith(absent), each
            assert bool(metrics["reason"]) == (metrics["median_ms"] is None) == (metrics["status"] != "ok")
            assert config["case"].endswith("-bf16") == (config["dtype"] == "bfloat16")
    cases = [f"{shape}{dtype}" for shape in shapes for dtype in ("", "-bf16")]
    assert sorted({each["config"]["case"] for each in files["gpt"]}) == sorted(cases)
    assert all(each["metrics"]["items_per_second"] > 0 for each in files["gpt"])
    flops = {each["config"]["role"]: each["metrics"]["flops_per_image"] for each in files["deit"]}
    assert round(flops["baseline"] / flops["ours"], 2) == 1.26  # table 3 of the paper: 2.51 and 1.98 GFLOPs
    capsys.readouterr()
    run(report, "--device-type", "cpu", "--results", tmp_path)
    output = capsys.readouterr().out
    for words in ("2 × 9 × 1 × 16", "DeiT-Ti, 1 image", "GPT of depth 1, 2 × 16 tokens"):
        assert words in output


def test_every_number_of_threads_has_a_file_and_is_reported(tmp_path, capsys):
    timed = "--shapes 1x8x1x16 --skip triton --dtypes float32 --threads 1 3 --rounds 1 --seconds 1"
    run(attention, "--device-type", "cpu", "--results", tmp_path, *timed.split())
    assert torch.get_num_threads() == THREADS
    assert sorted(path.stem.split("-", 1)[1][-9:] for path in tmp_path.iterdir()) == ["-1-thread", "3-threads"]
    capsys.readouterr()
    run(report, "--device-type", "cpu", "--results", tmp_path)
    assert "1 / 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    "module, flags, words",
    [
        (attention, ["--shapes", "2x17x2"], "--shapes: expected BxTxHxD such as 16x2048x10x128"),
        (attention, ["--shapes", "1x9x1x16ndk"], "--shapes: dk needs heads of even size"),
        (attention, ["--only", "swep"], "--only swep: no such case; there are vit-ti,"),
        (attention, ["--threads", "0"], "--threads must be at least 1, got 0"),
        (deit, ["--shapes", "deit-l-b8"], "--shapes: expected deit-SIZE-bBATCH"),
        (gpt, ["--shapes", "d4", "d0"], "--shapes: expected dDEPTH.* got 'd0'"),
        (gpt, ["--shapes", "d4-X"], "--shapes: .* got 'd4-X'"),
        (report, ["--hardware", "NVIDIA H300"], "has no benchmark of NVIDIA H300"),
        (tune, ["--only", "backward"], "--only backward: no such workload"),
        (tune, ["--candidates", "12x3"], "12x3 is not rows x columns x warps x stages"),
        (tune, [], "tuning needs a CUDA device"),
        (deit, ["--compile", "on"], "--compile on: torch.compile fails here"),
        (gpt, ["--compile", "on"], "--compile on: torch.compile fails here"),
    ],
)
@pytest.mark.usefixtures("no_compiler")
def test_a_mistake_is_one_line_before_anything_is_measured(module, flags, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    places = [] if module is tune else ["--device-type", "cpu", "--results", tmp_path]
    with pytest.raises(SystemExit) as stopped:
        run(module, *places, *flags)
    output = capsys.readouterr().err
    assert stopped.value.code == 2 and output.startswith("error: ") and output.count("\n") == 1
    assert re.search(words, output) and not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_the_operator_benchmark_on_cuda(tmp_path):
    shapes = ["8x197x3x64", "2x512x4x128cn", "2x512x4x128cw256n", "4x1024x4x128nd"]
    run(attention, "--device-type", "cuda", "--quick", "--results", tmp_path, "--shapes", *shapes)
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
