"""The tables of speed: softmax attention's fastest beside GKA, of the operator and of whole models.

A row has the numbers of threads side by side; each ratio is of one comparison, which was timed in turns.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gka.kinds import KINDS
from runs.bench.onnx import OPENVINO
from runs.bench.results import Comparison
from runs.bench.targets import flops_ratio, on_cpu
from runs.sections.sources import benchmarks, measured, table
from trainkit_gka.results import is_processor

SOFTMAX, GKA = KINDS["softmax"].label, KINDS["gka"].label
PHASES = {"forward+backward": "forward + backward"}
SIZES = {"ti": "Ti", "s": "S", "b": "B"}
OFFSETS, DENSE = "gka-offsets", "softmax dense mask"
Compared = dict[tuple[str, str], Comparison]
# Of one machine: (case, phase) -> number of threads (0 for a GPU) -> comparison.
ByThreads = dict[tuple[str, str], dict[int, Comparison]]


def operator() -> str:
    """The bare operator; sweeps over sizes are left to the files."""
    headings = ["", "phase", "dtype", "threads", f"{SOFTMAX}, ms", f"{GKA}, ms", "speed-up", "target"]
    parts = []
    for machine, cases in machines("attention").items():
        promised = on_cpu({}) if is_processor(machine) else {}
        rows = []
        for (case, phase), by_threads in cases.items():
            if case.startswith("sweep"):
                continue
            rows += row(operator_label(case, by_threads), phase, by_threads, promised.get((case, phase)))
            dense = {threads: lines_of(each, "gka", DENSE) for threads, each in by_threads.items()}
            rows += row("the same against a dense mask", phase, dense, None) if named(dense, DENSE) else []
        parts += [part(headings, rows, cases)] if rows else []
    return "\n\n".join(parts)


def models() -> str:
    """Vision transformers and language models, a training step or a forward pass; decoding has a table of its own."""
    headings = ["", "phase", "dtype", "threads", f"{SOFTMAX}, ms", f"{GKA}, ms", "speed-up", "both compiled"]
    headings += ["FLOPs ratio", "target"]
    parts = []
    deit, gpt = machines("deit"), machines("gpt")
    for machine in dict.fromkeys([*deit, *gpt]):
        cases = dict(sorted(deit.get(machine, {}).items(), key=size_and_batch)) | gpt.get(machine, {})
        rows = []
        for (case, phase), by_threads in cases.items():
            if phase.startswith("decode"):
                continue
            newest = list(by_threads.values())[-1]
            ratio = flops_ratio(newest)
            target = on_cpu({(case, phase): newest}).get((case, phase)) if is_processor(machine) else None
            shown = f"{ratio:.2f}x" if ratio else ""
            rows += row(model_label(newest), phase, by_threads, target, both_compiled(by_threads), shown)
            offsets = {threads: with_offsets(each) for threads, each in by_threads.items()}
            rows += row("the same with head offsets (ours)", phase, offsets, target, "", shown)
        parts += [part(headings, rows, cases)] if rows else []
    return "\n\n".join(parts)


def training() -> str:
    """Tokens per second of GPT training on CPUs, by dtype, eager and compiled, and what the fastest way gains."""
    forms = {"softmax": SOFTMAX, "gka": GKA, OFFSETS: f"{GKA}, head offsets (ours)"}
    ways = ("float32", "float32, compiled", "bfloat16", "bfloat16, compiled")
    parts = []
    for machine, cases in machines("gpt").items():
        rows, shown = [], {}
        for (case, phase), by_threads in sorted(cases.items()):
            if phase != "training" or case.endswith("-bf16") or not is_processor(machine):
                continue
            for threads, single in by_threads.items():
                half = cases.get((f"{case}-bf16", phase), {}).get(threads)
                speeds = tokens_per_second(single) | (tokens_per_second(half) if half else {})
                for kind, form in forms.items():
                    if any(cells := [speeds.get((kind, way)) for way in ways]):
                        gain = f"{max(filter(None, cells)) / cells[0]:.2f}x" if cells[0] else ""
                        said = [f"{speed:,.0f}" if speed else "" for speed in cells]
                        rows.append([f"{model_label(single)}, {form}", str(threads), *said, gain])
                shown[case, phase, threads] = {0: single, 1: half or single}
        parts += [part(["", "threads", *ways, "gain"], rows, shown, left=1)] if rows else []
    return "\n\n".join(parts)


def tokens_per_second(comparison: Comparison) -> dict[tuple[str, str], float | None]:
    """(kind, way) -> speed of each candidate in the comparison's own dtype."""
    found = {}
    for each in comparison.lines:
        name, _, other_dtype = each["config"]["candidate"].partition(", ")
        kind, _, eager = name.partition(" ")
        compiled = each["config"]["compile"] == "on" and not eager
        if not other_dtype:
            way = each["config"]["dtype"] + (", compiled" if compiled else "")
            found[kind, way] = each["metrics"]["items_per_second"]
    return found


def onnx() -> str:
    """Vision transformers as ONNX; the threads are the runtime's own."""
    headings = ["", "phase", "dtype", "threads", f"{SOFTMAX}, ms", f"{GKA}, ms", "speed-up", "target"]
    promised = on_cpu({})
    parts = []
    for compared in benchmarks("onnx").values():
        cases: ByThreads = {}
        targets = {}
        for key, comparison in sorted(compared.items(), key=lambda item: threads_of(item[1])):
            elsewhere = ", in OpenVINO" if comparison.case.startswith(OPENVINO) else ""
            label = model_label(comparison) + elsewhere, comparison.phase
            cases.setdefault(label, {})[threads_of(comparison)] = comparison
            targets[label] = promised.get(key)
        rows = [
            each
            for (name, phase), by_threads in cases.items()
            for each in row(name, phase.partition(" ")[0], by_threads, targets[name, phase])
        ]
        parts += [part(headings, rows, cases)]
    return "\n\n".join(parts) or "Not run yet: `python -m runs.bench.onnx`."


def threads_of(comparison: Comparison) -> int:
    return comparison.lines[0]["config"]["threads"]


def machines(name: str) -> dict[str, ByThreads]:
    """Machine (the slug of its file with every number of threads as "n-threads") -> what it measured."""
    found: dict[str, ByThreads] = {}
    for hardware, compared in benchmarks(name).items():
        threads = re.search(r"-(\d+)-threads?$", hardware)
        machine = re.sub(r"-\d+-threads?$", "-0-threads", hardware)
        for key, comparison in compared.items():
            found.setdefault(machine, {}).setdefault(key, {})[int(threads[1]) if threads else 0] = comparison
    return {
        machine: {key: dict(sorted(by_threads.items())) for key, by_threads in cases.items()}
        for machine, cases in found.items()
    }


def row(label: str, phase: str, by_threads: dict[int, Comparison | None], target: float | None, *more: str):
    """The row of one case and phase, in a list; no row if a side was never right."""
    by_threads = {threads: each for threads, each in by_threads.items() if each and each.ratio()}
    if not by_threads:
        return []
    dtype = next(iter(by_threads.values())).lines[0]["config"]["dtype"]
    cells = []
    for role in ("baseline", "ours"):
        side = [each.fastest(role) for each in by_threads.values()]
        cells.append(in_words([milliseconds(line) for line in side], [which(line) for line in side]))
    speeds = " / ".join(f"{each.ratio():.2f}x" for each in by_threads.values())
    threads = " / ".join(str(threads) for threads in by_threads if threads)
    wanted = f"≥ {target:.2f}x" if target else ""
    return [[label, PHASES.get(phase, phase), dtype, threads, *cells, speeds, *more, wanted]]


def size_and_batch(case: tuple[tuple[str, str], dict[int, Comparison]]) -> tuple[int, bool, int]:
    """Small models come first, inference before training."""
    comparison = next(iter(case[1].values()))
    config = comparison.lines[0]["config"]
    return list(SIZES).index(config["size"]), comparison.phase == "training", config["batch"]


def both_compiled(by_threads: dict[int, Comparison]) -> str:
    """The speed-ups without eager candidates; empty where none was timed."""
    ratios = []
    for each in by_threads.values():
        compiled = [line for line in each.lines if " eager" not in line["config"]["candidate"]]
        ratios.append(replace(each, lines=compiled).ratio() if len(compiled) < len(each.lines) else None)
    return " / ".join(f"{ratio:.2f}x" for ratio in ratios if ratio)


def milliseconds(line: dict) -> str:
    time = line["metrics"]["median_ms"]
    return f"{time:.3g}" if time < 1000 else f"{time:,.0f}"


def in_words(times: list[str], kinds: list[str]) -> str:
    """Times with what they are of, which is said once if it is one."""
    if len(set(kinds)) == 1:
        return " / ".join(times) + (f" ({kinds[0]})" if kinds[0] else "")
    return " / ".join(f"{time} ({kind})" if kind else time for time, kind in zip(times, kinds, strict=True))


def which(line: dict) -> str:
    """What of a candidate's name tells it from the others of its side; the kernel of ours is one on a CPU."""
    config = line["config"]
    name, _, dtype = config["candidate"].partition(", ")
    if name.startswith("gka"):
        return "eager" if name.endswith(" eager") else ""
    words = [name.removeprefix("softmax").strip(" -")]
    if config.get("window") is not None and words == ["sdpa"]:
        words = ["dense mask"]  # what older lines call it
    words = [word for word in words if word not in ("", "sdpa")]
    if config["dtype"] == "bfloat16" and is_processor(line["hardware"]):
        words.append(dtype or "bfloat16")
    return ", ".join(words)


def lines_of(comparison: Comparison, *beginnings: str) -> Comparison:
    """The comparison with the lines of these candidates alone."""
    return replace(
        comparison, lines=[line for line in comparison.lines if line["config"]["candidate"].startswith(beginnings)]
    )


def named(by_threads: dict[int, Comparison], beginning: str) -> bool:
    return any(lines_of(each, beginning).lines for each in by_threads.values())


def with_offsets(comparison: Comparison) -> Comparison | None:
    """The comparison with head offsets as our side, if they were timed."""
    offsets = lines_of(comparison, OFFSETS).lines
    if not offsets:
        return None
    ours = [{**line, "config": {**line["config"], "role": "ours"}} for line in offsets]
    return replace(comparison, lines=[*lines_of(comparison, "softmax").lines, *ours])


def operator_label(case: str, by_threads: dict[int, Comparison]) -> str:
    """A case of the operator in words, with batch × tokens × heads × channels."""
    config = next(iter(by_threads.values())).lines[0]["config"]
    shape = " × ".join(str(config[key]) for key in ("batch", "tokens", "heads", "head_dim"))
    if config["queries"] < config["tokens"]:
        return f"decoding, cache {shape}" + (", keys derived from it" if config.get("derived") else "")
    if config["causal"]:
        return f"causal, {shape}" + (f", window {config['window']}" if config["window"] is not None else "")
    size = SIZES.get(case.split("-")[1]) if case.startswith("vit-") else None
    return (f"ViT-{size}, " if size else "") + shape


def model_label(comparison: Comparison) -> str:
    """A case of the models in words."""
    config = comparison.lines[0]["config"]
    if "size" in config:
        images = "image" if config["batch"] == 1 else "images"
        return f"DeiT-{SIZES[config['size']]}, {config['batch']} {images}"
    return f"GPT of depth {config['depth']}, {config['batch']} × {config['sequence_len']} tokens"


def part(headings: list[str], rows: list[list[str]], cases: Mapping[Any, dict[int, Comparison]], left: int = 4) -> str:
    """A table with where it comes from: a line for each date, commit and kind of file."""
    compared = [comparison for by_threads in cases.values() for comparison in by_threads.values()]
    sources = dict.fromkeys(source(comparison.lines[0]) for comparison in compared)
    return "\n".join([table(headings, rows, left=left), *sources])


def source(line: dict) -> str:
    hardware = re.sub(r", \d+ threads?$", "", line["hardware"])
    return measured({**line, "hardware": hardware}, f"{line['kind']}_*.jsonl")
