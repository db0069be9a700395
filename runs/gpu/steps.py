"""The steps of `python -m runs.gpu`, in order of worth: commands with an estimate of their seconds."""

import hashlib
import json
import shlex
from dataclasses import dataclass
from pathlib import Path

ROWS = "rows"
TIMED = ("torch", "numpy", "psutil", "tyro", "rich")
# The packages that a module needs, and whether it needs packed rows; those that are not here need TIMED.
NEEDS = {
    "nanochat_gka.train": (*TIMED, "safetensors", "tiktoken", "yaml", ROWS),
    "pytest": (*TIMED, "pytest", "hypothesis", "timm", "tiktoken", "rustbpe", "safetensors", "yaml", "pyarrow"),
    "runs.bench.deit": (*TIMED, "timm", "torchvision", "safetensors"),
}


@dataclass
class Step:
    """Commands that run at once: words after `python -m`.

    seconds: estimated. least: above 0 the commands save when a signal stops them and continue in the next call; then
    the step starts if so many seconds are left.
    """

    name: str
    seconds: float
    commands: list[list[str]]
    least: float = 0.0

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.commands).encode()).hexdigest()[:12]


def step(name: str, seconds: float, command: str) -> Step:
    return Step(name, seconds, [shlex.split(command)])


# The tests that no GPU has run, by words of their names.
NEW = "optional_path or full_of_nan or long_cache or cuda_graphs or recompile or packed"
KERNELS = " ".join(f"tests/gka/test_{name}.py" for name in ("triton_gpu", "triton_accuracy", "triton_op", "memory"))
TRAINERS = "tests/nanochat/test_train.py tests/deit/test_train.py tests/runs/test_bench_commands.py"
TEST = "pytest -p no:cacheprovider"
OPERATOR, GPT, VIT = "runs.bench.attention", "runs.bench.gpt", "runs.bench.deit"
ADDED = "--head-offsets PS --channel-bandwidths --head-gates --gate-lr 0.005"
FORMS = {
    "softmax": "--attention softmax",
    "softmax-all": f"--attention softmax --offset-layers all {ADDED}",
    "preset": f"--attention gka --gka-values unrotated --value-embeds every-second --channel-lr 0.08 {ADDED}",
    "paper": "--attention gka",
}
TRAINING = "--window-pattern L --sample-every -1 --save-every -1 --keep 1 --no-verify-data"


def trainings(name: str, seconds: float, flags: str, least: float, forms: list[str]) -> Step:
    """Trainings of the forms at once."""
    commands = [f"nanochat_gka.train --model-tag {name}-{form} {FORMS[form]} {flags}" for form in forms]
    return Step(name, seconds, list(map(shlex.split, commands)), least)


def vit(size: str, seconds: float) -> Step:
    cases = f"'deit-{size}-b128 training' 'deit-{size}-b256 inference'"
    return step(f"deit-{size}", seconds, f"{VIT} --only {cases} --compile blocks --skip unfused --seconds 4")


def all_steps() -> list[Step]:
    """Everything, most worth first, for calls of ten minutes.

    Seconds are estimates for an H200 or H100, where few of these have run: a process takes about 8 until it computes,
    a block, an optimiser and a loss about 8 each to compile.
    """
    alone = "--skip flex eager efficient sdpa --seconds 1"
    windows = alone.replace("flex", "'gka flex'")  # softmax attention's is the fastest with windows
    depths = "--compile blocks --seconds 6 --skip offsets softmax-preset"
    windowed = f"{depths} cudnn"  # which would serve one layer of four
    steps_of_131072 = "--num-iterations 200 --total-batch-size 131072 --device-batch-size 32"
    quality = f"{TRAINING} {steps_of_131072} --log-every 20 --eval-every 100 --eval-tokens 1300000"
    preset = "16x2048x10x128cw1024nvk 16x2048x10x128cnvk"
    # sdpa with general and with constant norms, in widths of 72 and 136
    fallback = "--shapes 64x1024x6x64 64x1024x6x64n 16x2048x10x128c 16x2048x10x128cn"
    whole, forms = "--skip softmax unfused --seconds 4", list(FORMS)
    return [
        # The first call. Are the kernels right that no GPU has run, and faster than those in whose place they would be?
        step("tests-new", 60, f"{TEST} tests/gka/test_triton_gpu.py -m gpu -k '{NEW}'"),
        step("operator-full", 35, f"{OPERATOR} --only sweep-1024 sweep-4096 {alone} --switch triangular"),
        step("operator-causal", 30, f"{OPERATOR} --only lm-full {alone} --switch cudnn"),
        step("operator-vit", 30, f"{OPERATOR} --only vit {alone} --switch short"),
        # Whole models, where their time goes, and whether compiling by blocks costs speed.
        step("gpt-d12-L", 80, f"{GPT} --shapes d12-L --only 'd12-L training' {depths}"),
        step("gpt-parts", 100, "runs.bench.parts --shapes d12-L --compile blocks --seconds 4"),
        vit("ti", 36),
        step("deit-ti-whole", 130, f"{VIT} --only 'deit-ti-b128 training' --compile on {whole}"),
        vit("s", 40),
        # The second call.
        step("tests-training", 40, f"{TEST} tests/gka/test_triton_training.py -m gpu"),
        step("operator-preset", 50, f"{OPERATOR} --shapes {preset} {windows} --switch cudnn"),
        trainings("d12", 240, f"--depth 12 {quality}", 90, forms),
        step("gpt-d20", 100, f"{GPT} --only 'd20 training' {windowed}"),
        vit("b", 48),
        step("gpt-d20-L", 90, f"{GPT} --shapes d20-L --only 'd20-L training' {depths}"),
        # What is left.
        step("operator-fallback", 35, f"{OPERATOR} {fallback} --skip triton flex eager efficient --seconds 1"),
        step("operator-windows", 30, f"{OPERATOR} --only lm-window {windows}"),
        step("operator-256", 15, f"{OPERATOR} --only sweep-256 {alone}"),
        step("gpt-d12", 90, f"{GPT} --shapes d12 --only 'd12 training' {windowed}"),
        step("operator-padded", 25, f"{OPERATOR} --only padded {alone}"),
        step("operator-decoding", 30, f"{OPERATOR} --only decode-b1-2048 decode-b32-2048 {alone}"),
        step("tests-kernels", 150, f"{TEST} {KERNELS} -m 'not slow' -k 'not ({NEW})'"),
        step("tests-trainers", 120, f"{TEST} {TRAINERS} -m gpu"),
        *(trainings(f"d8-seed-{n}", 140, f"--depth 8 --seed {n} {quality}", 80, forms) for n in range(3)),
        *(
            step(f"deit-{size}-table-4", seconds, f"{VIT} --only deit-{size} --compile blocks --seconds 3")
            for size, seconds in {"ti": 144, "s": 160, "b": 192}.items()
        ),
    ]


def miniature(length: int) -> list[Step]:
    """One small step of each kind, for a CPU. length: of a row."""
    few = "--dtypes float32 --threads 1 --rounds 1 --seconds 0.1"
    short = f"--num-iterations 2 --total-batch-size {4 * length} --eval-every -1 --eval-tokens {2 * length}"
    tiny = f"{TRAINING} {short} --depth 1 --head-dim 32 --aspect-ratio 32 --compile off"
    shape = "d1-b1-t16-v64-L"
    return [
        step("tests-new", 20, f"{TEST} tests/gka/test_triton_training.py -k 'vit and 6'"),
        step("deit-ti", 20, f"{VIT} --shapes deit-ti-b1 --only 'deit-ti-b1 training' {few} --compile off"),
        step("gpt-d1-L", 15, f"{GPT} --shapes {shape} --only '{shape} training' {few} --compile off"),
        step("gpt-parts", 20, f"runs.bench.parts --shapes {shape} {few} --compile off"),
        step("operator-preset", 15, f"{OPERATOR} --shapes 1x12x1x16cw4nvk {few} --skip eager"),
        trainings("d1", 30, tiny, 5, ["softmax", "preset"]),
    ]


def places_of(module: str, device: str, folder: Path, results: Path, rows: Path | None) -> list[str]:
    """The flags that say where a command computes, reads and writes."""
    if module == "pytest":
        return []
    words = ["--data", rows, "--out", folder / "runs"] if module == "nanochat_gka.train" else []
    results = results / "gpu_quality.jsonl" if words else results
    return [str(word) for word in (*words, "--device-type", device, "--results", results)]
