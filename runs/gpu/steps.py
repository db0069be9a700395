"""The steps of `python -m runs.gpu`, in order of worth: commands with an estimate of their seconds."""

import hashlib
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Step:
    """Commands that run at once: words after `python -m`.

    seconds: estimated. needs: packages, and "rows" for packed rows. saves: whether the commands continue where a signal
    stopped them; then the step starts if `least` seconds are left.
    """

    name: str
    commands: list[list[str]]
    seconds: float
    needs: tuple[str, ...]
    saves: bool = False
    least: float = 0.0

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.commands).encode()).hexdigest()[:12]


TIMED = ("torch", "numpy", "psutil", "tyro", "rich")
TRAINED = (*TIMED, "safetensors", "tiktoken", "yaml", "rows")
TESTED = (*TIMED, "pytest", "hypothesis", "timm", "tiktoken", "rustbpe", "safetensors", "yaml", "pyarrow")
# The tests that no GPU has run, by words of their names.
NEW = "optional_path or full_of_nan or long_cache or cuda_graphs or recompile or packed"
KERNELS = " ".join(f"tests/gka/test_{name}.py" for name in ("triton_gpu", "triton_accuracy", "triton_op", "memory"))
TRAINERS = "tests/nanochat/test_train.py tests/deit/test_train.py tests/runs/test_bench_commands.py"
ADDED = "--head-offsets PS --channel-bandwidths --head-gates --gate-lr 0.005"
FORMS = {
    "softmax": "--attention softmax",
    "softmax-all": f"--attention softmax --offset-layers all {ADDED}",
    "preset": f"--attention gka --gka-values unrotated --value-embeds every-second --channel-lr 0.08 {ADDED}",
    "paper": "--attention gka",
}
TRAINING = "--window-pattern L --sample-every -1 --save-every -1 --keep 1 --no-verify-data"


def tests(name: str, seconds: float, words: str, expression: str) -> Step:
    """Tests, one after the other. expression: of pytest's -k; empty = all."""
    chosen = ["-k", expression] if expression else []
    return Step(name, [["pytest", "-p", "no:cacheprovider", *shlex.split(words), *chosen]], seconds, TESTED)


def bench(which: str, name: str, seconds: float, cases: list[str], flags: str) -> Step:
    """A benchmark. cases: its own or shapes, with phases or without."""
    shapes = [case.split()[0] for case in cases if re.match(r"deit-|d?\d", case)]
    words = [*(["--shapes", *dict.fromkeys(shapes)] if shapes else []), "--only", *cases, *shlex.split(flags)]
    needs = (*TIMED, *(("timm", "torchvision", "safetensors") if which == "deit" else ()))
    return Step(name, [[f"runs.bench.{which}", *words]], seconds, needs)


def deit(suffix: str, seconds: float, cases: list[str], flags: str) -> list[Step]:
    """A step for each size; a larger one takes longer."""
    sizes = {"ti": 0.9 * seconds, "s": seconds, "b": 1.2 * seconds}
    return [
        bench("deit", f"deit-{s}{suffix}", t, [f"deit-{s}-{case}" for case in cases], flags) for s, t in sizes.items()
    ]


def trainings(name: str, seconds: float, forms: list[str], flags: str, least: float) -> Step:
    """Trainings of the forms at once."""
    commands = [["nanochat_gka.train", "--model-tag", f"{name}-{f}", *f"{FORMS[f]} {flags}".split()] for f in forms]
    return Step(name, commands, seconds, TRAINED, saves=True, least=least)


def all_steps() -> list[Step]:
    """Everything, most worth first, for calls of ten minutes.

    Seconds are estimates for an H200 or H100, where few of these have run: a process takes about 8 until it computes,
    a block, an optimiser and a loss about 8 each to compile.
    """
    alone = "--skip flex eager efficient sdpa general --seconds 1"
    windows = alone.replace("flex", "'gka flex'")  # softmax attention's is the fastest with windows
    depths = "--compile blocks --seconds 6 --skip offsets softmax-preset"
    windowed = f"{depths} cudnn"  # which would serve one layer of four
    steps_of_131072 = "--num-iterations 200 --total-batch-size 131072 --device-batch-size 32"
    quality = f"{TRAINING} {steps_of_131072} --log-every 20 --eval-every 100 --eval-tokens 1300000"
    preset = ["16x2048x10x128cw1024nvk", "16x2048x10x128cnvk"]
    # sdpa with general and with constant norms, in widths of 72 and 136
    fallback = ["64x1024x6x64", "64x1024x6x64n", "16x2048x10x128c", "16x2048x10x128cn"]
    table_4 = ["b64 training", "b128 training", *(f"b{batch} inference" for batch in (32, 64, 128, 256, 512))]
    ti, s, b = deit("", 40, ["b128 training", "b256 inference"], "--compile blocks --skip unfused --seconds 4")
    return [
        # The first call. Are the kernels right that no GPU has run, and faster than those in whose place they would be?
        tests("tests-new", 60, "tests/gka/test_triton_gpu.py -m gpu", NEW),
        bench("attention", "operator-full", 35, ["sweep-1024", "sweep-4096"], f"{alone} --switch triangular"),
        bench("attention", "operator-causal", 30, ["lm-full"], f"{alone} --switch cudnn"),
        bench("attention", "operator-vit", 30, ["vit"], f"{alone} --switch short"),
        # Whole models, where their time goes, and whether compiling by blocks costs speed.
        bench("gpt", "gpt-d12-L", 80, ["d12-L training"], depths),
        bench("parts", "gpt-parts", 100, ["d12-L training"], "--compile blocks --seconds 4"),
        ti,
        bench(
            "deit", "deit-ti-whole", 130, ["deit-ti-b128 training"], "--compile on --skip softmax unfused --seconds 4"
        ),
        s,
        # The second call.
        tests("tests-training", 40, "tests/gka/test_triton_training.py -m gpu", ""),
        bench("attention", "operator-preset", 50, preset, f"{windows} --switch cudnn"),
        trainings("d12", 240, list(FORMS), f"--depth 12 {quality}", 90),
        bench("gpt", "gpt-d20", 100, ["d20 training"], windowed),
        b,
        bench("gpt", "gpt-d20-L", 90, ["d20-L training"], depths),
        # What is left.
        bench("attention", "operator-fallback", 35, fallback, "--skip triton flex eager efficient --seconds 1"),
        bench("attention", "operator-windows", 30, ["lm-window"], windows),
        bench("attention", "operator-256", 15, ["sweep-256"], alone),
        bench("gpt", "gpt-d12", 90, ["d12 training"], windowed),
        bench("attention", "operator-padded", 25, ["padded"], alone),
        bench("attention", "operator-decoding", 30, ["decode-b1-2048", "decode-b32-2048"], alone),
        tests("tests-kernels", 150, f"{KERNELS} -m 'not slow'", f"not ({NEW})"),
        tests("tests-trainers", 120, f"{TRAINERS} -m gpu", ""),
        *(trainings(f"d8-seed-{n}", 140, list(FORMS), f"--depth 8 --seed {n} {quality}", 80) for n in range(3)),
        *deit("-table-4", 160, table_4, "--compile blocks --seconds 3"),
    ]


def miniature(length: int) -> list[Step]:
    """One small step of each kind, for a CPU. length: of a row."""
    few = "--dtypes float32 --threads 1 --rounds 1 --seconds 0.1"
    short = f"--num-iterations 2 --total-batch-size {4 * length} --eval-every -1 --eval-tokens {2 * length}"
    tiny = f"{TRAINING} {short} --depth 1 --head-dim 32 --aspect-ratio 32 --compile off"
    return [
        tests("tests-new", 20, "tests/gka/test_triton_training.py", "vit and 6"),
        bench("deit", "deit-ti", 20, ["deit-ti-b1 training"], f"{few} --compile off"),
        bench("gpt", "gpt-d1-L", 15, ["d1-b1-t16-v64-L training"], f"{few} --compile off"),
        bench("parts", "gpt-parts", 20, ["d1-b1-t16-v64-L training"], f"{few} --compile off"),
        bench("attention", "operator-preset", 15, ["1x12x1x16cw4nvk"], f"{few} --skip eager"),
        trainings("d1", 30, ["softmax", "preset"], tiny, 5),
    ]


def places_of(module: str, device: str, folder: Path, results: Path, rows: Path | None) -> list[str]:
    """The flags that say where a command computes, reads and writes."""
    if module == "pytest":
        return []
    words = ["--data", rows, "--out", folder / "runs"] if module == "nanochat_gka.train" else []
    results = results / "gpu_quality.jsonl" if words else results
    return [str(word) for word in (*words, "--device-type", device, "--results", results)]
