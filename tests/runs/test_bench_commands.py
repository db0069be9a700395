"""The benchmarks as commands: end to end on tiny shapes, and mistakes as one line."""

import pytest
import torch

from gka.impl.cpu import build
from runs.bench import attention, deit, gpt, report
from trainkit_gka import cli
from trainkit_gka.progress import read_lines

OWN = torch.get_num_threads()


@pytest.mark.slow
def test_the_benchmarks_run_end_to_end(tmp_path, capsys):
    common = ["--device-type", "cpu", "--results", str(tmp_path), "--rounds", "2", "--seconds", "1"]
    shapes = ["2x9x1x16", "1x12x1x16cw4n", "1x12x2x16ndk"]
    cli.run(attention.main, attention.AttentionConfig, [*common, "--shapes", *shapes, "--skip", "eager", "general"])
    tiny = ["--batch-sizes", "1", "--train-batch-sizes", "1", "--compile-mode", "off", "--sizes", "ti"]
    cli.run(deit.main, deit.DeitConfig, [*common, *tiny])
    tiny = ["--depth", "1", "2", "--batch-size", "2", "--sequence-len", "16", "--vocab-size", "64", "--compile", "off"]
    cli.run(gpt.main, gpt.GPTBenchConfig, [*common, *tiny])
    files = {path.name.split("_")[1]: read_lines(path) for path in sorted(tmp_path.glob("*-1-thread.jsonl"))}
    files |= {path.name.split("_")[1]: read_lines(path) for path in tmp_path.glob(f"*-{OWN}-thread*.jsonl")}
    assert {what: len(lines) for what, lines in files.items()} == {
        "attention": 2 * (4 + 6) + 2 * (4 + 6) + 3 + 5,  # bfloat16 has softmax in float32 too
        "deit": 2 * (3 + 5),
        "gpt": 2 * (5 + 7) + (2 + 3) + (4 + 4),  # d2 is trained alone
    }
    absent = ("gka cpu",) if build.obstacle() else ()
    for lines in files.values():
        for each in lines:
            metrics, config = each["metrics"], each["config"]
            # Where there is no compiler, it says why.
            assert metrics["status"] == "ok" or config["candidate"].startswith(absent), each
            assert bool(metrics["reason"]) == (metrics["median_ms"] is None) == (metrics["status"] != "ok")
            assert config["case"].endswith("-bf16") == (config["dtype"] == "bfloat16")
    cases = [f"d{depth}-b2-t16-v64{dtype}" for depth in (1, 2) for dtype in ("", "-bf16")]
    assert sorted({each["config"]["case"] for each in files["gpt"]}) == sorted(cases)
    assert all(each["metrics"]["items_per_second"] > 0 for each in files["gpt"])
    flops = {each["config"]["role"]: each["metrics"]["flops_per_image"] for each in files["deit"]}
    assert round(flops["baseline"] / flops["ours"], 2) == 1.26  # table 3 of the paper: 2.51 and 1.98 GFLOPs
    capsys.readouterr()
    flags = ["--device-type", "cpu", "--results", str(tmp_path), "--out", str(tmp_path / "out")]
    cli.run(report.main, report.BenchReportConfig, flags)
    output = capsys.readouterr().out
    for words in ("2 × 9 × 1 × 16", "DeiT-Ti, 1 image", "GPT of depth 1, 2 × 16 tokens"):
        assert words in output


def test_every_number_of_threads_has_a_file_and_is_reported(tmp_path, capsys):
    flags = ["--device-type", "cpu", "--results", str(tmp_path)]
    timed = "--shapes 1x8x1x16 --skip triton --dtypes float32 --threads 1 3 --rounds 1 --seconds 1"
    before = torch.get_num_threads()
    cli.run(attention.main, attention.AttentionConfig, [*flags, *timed.split()])
    assert torch.get_num_threads() == before
    names = sorted(path.stem.rpartition("-")[0][-1] + path.stem.rpartition("-")[2] for path in tmp_path.iterdir())
    assert names == ["1thread", "3threads"]
    capsys.readouterr()
    cli.run(report.main, report.BenchReportConfig, [*flags, "--out", str(tmp_path / "out")])
    assert "1 / 3" in capsys.readouterr().out
    assert len(list((tmp_path / "out").glob("bench_*.md"))) == 1


CONFIGS = {
    attention: attention.AttentionConfig,
    deit: deit.DeitConfig,
    gpt: gpt.GPTBenchConfig,
    report: report.BenchReportConfig,
}


def refused(module, flags, folder, capsys):
    """What a command says of its flags, in one line, before it measures anything."""
    with pytest.raises(SystemExit) as stopped:
        cli.run(module.main, CONFIGS[module], ["--device-type", "cpu", "--results", str(folder), *flags])
    output = capsys.readouterr().err
    assert stopped.value.code == 2 and output.startswith("error: ") and output.count("\n") == 1
    assert not list(folder.iterdir())
    return output


@pytest.mark.parametrize(
    "module, flags, words",
    [
        (attention, ["--shapes", "2x17x2"], "--shapes: expected BxTxHxD such as 16x2048x10x128"),
        (attention, ["--shapes", "1x9x1x16ndk"], "--shapes: dk needs heads of even size"),
        (attention, ["--only", "swep"], "--only swep: no such case; there are vit-ti,"),
        (attention, ["--threads", "0"], "--threads must be at least 1, got 0"),
        (deit, ["--impl", "cuda"], "--impl: impl must be one of auto, reference,"),
        (gpt, ["--depth", "4", "0"], "--depth must be at least 1, got 0"),
        (gpt, ["--window-pattern", "X"], "window_pattern must be made of the letters S, L, got 'X'"),
        (report, ["--hardware", "NVIDIA H300"], "has no benchmark of NVIDIA H300"),
    ],
)
def test_a_mistake_is_one_line(module, flags, words, tmp_path, capsys):
    assert words in refused(module, flags, tmp_path, capsys)


@pytest.mark.parametrize("module, flags", [(deit, ["--compile-mode", "default"]), (gpt, ["--compile", "on"])])
def test_a_benchmark_that_cannot_compile_is_one_line(no_compiler, module, flags, tmp_path, capsys):
    assert f"{' '.join(flags)}: torch.compile fails here" in refused(module, flags, tmp_path, capsys)


@pytest.mark.gpu
def test_the_operator_benchmark_on_cuda(tmp_path):
    shapes = ["8x197x3x64", "2x512x4x128cn", "2x512x4x128cw256n", "4x1024x4x128nd"]
    flags = ["--device-type", "cuda", "--quick", "--results", str(tmp_path), "--shapes", *shapes]
    cli.run(attention.main, attention.AttentionConfig, flags)
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
