"""The benchmarks as commands: end to end on tiny shapes, and mistakes as one line."""

import subprocess
import sys
from pathlib import Path

import pytest

from gka.impl.cpu import build
from runs.bench import attention, deit, gpt, operator_error, report
from trainkit import cli
from trainkit.progress import read_lines

ROOT = Path(__file__).resolve().parents[2]


def test_the_benchmarks_run_end_to_end(tmp_path, capsys):
    common = ["--device-type", "cpu", "--results", str(tmp_path), "--rounds", "2", "--seconds", "1"]
    cli.run(
        attention.main,
        attention.AttentionConfig,
        [*common, "--shapes", "2x9x1x16", "1x12x1x16cw4n", "1x12x1x16nd", "--skip", "eager"],
    )
    cli.run(
        deit.main,
        deit.DeitConfig,
        [*common, "--batch-sizes", "1", "--train-batch-sizes", "1", "--compile-mode", "off"],
    )
    cli.run(
        gpt.main,
        gpt.GPTBenchConfig,
        [*common, "--depth", "1", "--batch-size", "2", "--sequence-len", "16", "--vocab-size", "64"],
    )
    files = {path.name.split("_")[1]: read_lines(path) for path in tmp_path.iterdir()}
    assert {what: len(lines) for what, lines in files.items()} == {
        "attention": 4 + 4 + 7 + 7 + 7,
        "deit": 2 * 3,
        "gpt": 2 + 2 + 4 + 4,
    }
    absent = ("gka triton", "gka cpu") if build.obstacle() else ("gka triton",)
    for lines in files.values():
        for each in lines:
            metrics, config = each["metrics"], each["config"]
            # Where there is no interpreter, or no compiler, it says why.
            assert metrics["status"] == "ok" or config["candidate"].startswith(absent), each
            assert bool(metrics["reason"]) == (metrics["median_ms"] is None) == (metrics["status"] != "ok")
    assert {each["config"]["case"] for each in files["gpt"]} == {"d1-b2-t16-v64"}
    assert all(each["metrics"]["items_per_second"] > 0 for each in files["gpt"])
    capsys.readouterr()
    cli.run(
        report.main,
        report.ReportConfig,
        ["--device-type", "cpu", "--results", str(tmp_path), "--out", str(tmp_path / "out")],
    )
    said = capsys.readouterr().out
    for words in (
        "2x9x1x16 forward ",
        "deit-ti-b1 inference",
        "d1-b2-t16-v64 training",
        "DeiT-Ti forward",
        " not measured",
    ):
        assert words in said


@pytest.mark.parametrize(
    "main, config, flags, words",
    [
        (
            attention.main,
            attention.AttentionConfig,
            ["--shapes", "2x17x2"],
            "--shapes: expected BxTxHxD such as 16x2048x10x128",
        ),
        (
            attention.main,
            attention.AttentionConfig,
            ["--only", "swep"],
            "--only swep: no such case; there are vit-ti, lm-full,",
        ),
        (
            attention.main,
            attention.AttentionConfig,
            ["--rounds", "-1"],
            "--rounds must be at least 0, got -1",
        ),
        (
            deit.main,
            deit.DeitConfig,
            ["--batch-sizes", "8", "0"],
            "--batch-sizes must be at least 1, got 0",
        ),
        (deit.main, deit.DeitConfig, ["--impl", "cuda"], "--impl: impl must be one of auto, reference,"),
        (
            gpt.main,
            gpt.GPTBenchConfig,
            ["--depth", "-1"],
            "--depth must be at least 1, or 0 for the device's own, got -1",
        ),
        (
            gpt.main,
            gpt.GPTBenchConfig,
            ["--window-pattern", "X"],
            "window_pattern must be made of the letters S, L, got 'X'",
        ),
        (
            report.main,
            report.ReportConfig,
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
    flags = ["--results", tmp_path, "--device-type", "cpu", "--shapes", "1x0x1x16"]
    command = [sys.executable, "-m", "runs.bench.attention", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.strip().splitlines()[-1].startswith("error: --shapes: expected BxTxHxD")


@pytest.mark.parametrize("flag", ["--help", "--rseults"])
def test_operator_error_measures_nothing_if_asked_for_help_or_misspelt(flag, tmp_path):
    results = tmp_path / "errors.jsonl"
    results.write_text("measured before\n")
    with pytest.raises(SystemExit):
        cli.run(operator_error.main, operator_error.OperatorErrorConfig, ["--results", str(results), flag])
    assert results.read_text() == "measured before\n"


@pytest.mark.gpu
def test_the_operator_benchmark_on_cuda(tmp_path):
    shapes = ["8x197x3x64", "2x512x4x128cn", "2x512x4x128cw256n", "4x1024x4x128nd"]
    cli.run(
        attention.main,
        attention.AttentionConfig,
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


def test_help_measures_nothing():
    results = operator_error.RESULTS.read_bytes()
    words = [sys.executable, "-m", "runs.bench.operator_error", "--help"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("usage: python -m runs.bench.operator_error")
    assert operator_error.RESULTS.read_bytes() == results


def test_the_demos_help_names_its_command():
    done = subprocess.run([sys.executable, "-m", "runs.demo", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("usage: python -m runs.demo [")
