"""Train cells of the study that are not trained yet, some at a time, in the background of everything else.

A cell is a form of attention at one depth and number of training tokens, with one seed, at the learning rate that was
tuned for the form. A finished cell is one line in out/study/CORPUS.jsonl; runs/study/analyse.py reads it.

make study                                                  every form with two layers, three seeds
make study ARGS=--list                                      what is left of it, and how long it takes
make study ARGS="--cells preset longest"                    other named lists of cells
make study ARGS="--forms GKA 'GKA + offsets' --depths 4 --tokens 4194304 --seeds 0"
make study ARGS="--forms GKA --flags='--window-pattern SSSL'"
python -m runs.study.train --images hf:path/to/cifar10      vision transformers on CIFAR-10
"""

import hashlib
import json
import math
import os
import shlex
import shutil
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from deit_gka.data.sources import ImageSource, check_classes, decode, open_source
from deit_gka.model.registry import model_name
from nanochat_gka.data.loader import same_rows
from nanochat_gka.data.shards import MANIFEST
from nanochat_gka.model.accounting import flops_per_token, meta_model
from nanochat_gka.model.config import ModelFlags, settings_of_today
from nanochat_gka.training.optim import OptimConfig
from runs.jobs import Job, SideBySide
from trainkit_gka import signals
from trainkit_gka.cli import Bounds, UserError, run
from trainkit_gka.files import locked, read_json, write_json
from trainkit_gka.progress import clock_text, console, read_events, read_lines
from trainkit_gka.results import append_line, date_of, git_commit, read_results

# The forms, as flags of nanochat_gka.train, with the values that the first rows state (see
# `settings_of_today`).
# channel_rate and gate_rate multiply the learning rates of channel bandwidths and head gates.
OFFSETS, UNROTATED = dict(head_offsets="PS"), dict(gka_values="normalised")
EVERYWHERE = dict(**OFFSETS, offset_layers="all")  # softmax and VLT layers too
SOFTMAX, VLT = dict(attention="softmax"), dict(attention="vlt")
GKA, GKA_OFFSETS = dict(attention="gka"), dict(attention="gka", **OFFSETS, **UNROTATED)
HALF, EVERY, NONE = dict(value_embeds="all"), dict(value_embeds="every-layer"), dict(value_embeds="none")
HYBRID = dict(**EVERYWHERE, **UNROTATED)
CONTROL, PAPER, HALF_VE = "softmax + offsets", "GKA", "GKA + offsets + half VE"
PRESET, RIVAL = "GKA + offsets + half VE + channels + gates", "softmax + offsets + channels + gates"


def learned(channel_rate: float, gate_rate: float) -> dict[str, Any]:
    """Channel bandwidths and head gates, with the factors of their learning rates."""
    return dict(channel_bandwidths=True, head_gates=True, channel_rate=channel_rate, gate_rate=gate_rate)


FORMS: dict[str, dict[str, Any]] = {
    "softmax": SOFTMAX,
    CONTROL: {**SOFTMAX, **EVERYWHERE},
    "softmax + VE": {**SOFTMAX, **EVERY},
    PAPER: GKA,
    "GKA unrotated": {**GKA, **UNROTATED},
    "GKA + offsets": GKA_OFFSETS,
    "GKA + offsets + VE": {**GKA_OFFSETS, **EVERY},
    "VLT + offsets": {**VLT, **EVERYWHERE},
    "softmax without VE": {**SOFTMAX, **NONE},
    "softmax + offsets without VE": {**SOFTMAX, **EVERYWHERE, **NONE},
    "softmax + offsets + VE": {**SOFTMAX, **EVERYWHERE, **EVERY},
    "GKA + offsets rotated": {**GKA, **OFFSETS},
    HALF_VE: {**GKA_OFFSETS, **HALF},
    "VLT": VLT,
    "GGGA": dict(attention="GGGA", **UNROTATED),
    "GGGA + offsets": dict(attention="GGGA", **HYBRID),
    "GGGA + offsets without VE": dict(attention="GGGA", **HYBRID, **NONE),
    "GGGGGA + offsets": dict(attention="GGGGGA", **HYBRID),
    PRESET: {**GKA_OFFSETS, **HALF, **learned(4.0, 0.25)},
    RIVAL: {**SOFTMAX, **EVERYWHERE, **learned(1.0, 0.25)},
    "GGGA + offsets + channels + gates": dict(attention="GGGA", **HYBRID, **learned(1.0, 1.0)),
    "GKA + offsets + channels + gates": {**GKA_OFFSETS, **learned(1.0, 1.0)},
    "VLT + offsets + channels + gates": {**VLT, **EVERYWHERE, **learned(4.0, 0.25)},
    f"{HALF_VE} + channels": {**GKA_OFFSETS, **HALF, "channel_bandwidths": True, "channel_rate": 4.0},
    f"{PRESET}, heads of 128": {**GKA_OFFSETS, **HALF, **learned(4.0, 0.25), "head_dim": 128},
    f"{RIVAL}, heads of 128": {**SOFTMAX, **EVERYWHERE, **learned(1.0, 0.25), "head_dim": 128},
}
# Tuned learning rates, as multiples of nanochat's at 2,048 tokens a step: 1 but for these, and for these at 8 layers.
RATES = {"softmax + VE": 2.0}
RATES_AT_8 = {"softmax": 2.0, CONTROL: 2.0, "GKA + offsets": 0.5, "GGGA + offsets": 2.0, "GGGGGA + offsets": 0.5}
SEEDS = (0, 1, 2)
SHORT, LONG = (2**19, 2**20, 2**21), (2**20, 2**21, 2**22)
BUDGETS = {2: LONG, 4: LONG, 6: SHORT, 8: SHORT}  # training tokens at each depth
PLACES = [(depth, tokens) for depth, budgets in BUDGETS.items() for tokens in budgets]
REPEATED = ("softmax", CONTROL, PAPER, "GKA + offsets", "GGGA + offsets")
FIVE = (*REPEATED, HALF_VE, PRESET, RIVAL, "GGGA + offsets + channels + gates", f"{HALF_VE} + channels")
# Lists of cells: forms, then depths and tokens. All have three seeds.
CELLS: dict[str, tuple[Iterable[str], list[tuple[int, int]]]] = {
    "smallest": (FORMS, [(2, 2**20)]),
    "four-layers": (FORMS, [(4, 2**20)]),
    "longer": (("softmax", PAPER, "GKA unrotated", "GKA + offsets"), [(2, tokens) for tokens in LONG]),
    "sizes": ((*REPEATED, "VLT + offsets", "softmax without VE", "GGGGGA + offsets", HALF_VE), PLACES),
    "preset": ((PRESET, RIVAL), [place for place in PLACES if place[0] < 8]),
    "longest": (FIVE, [(4, 2**22)]),
}

HEAD_DIM = 64  # half of nanochat's, so that two layers have two heads
EVAL_TOKENS = 2**17  # of each split
EVALUATE_ALONG_FROM = 2**22  # tokens; shorter trainings are evaluated at their end alone
SAVE_EVERY = 2**18  # tokens
CURVE_POINTS = 64
COMPILED_FROM = 4  # layers; below, compiling costs more than it saves
BATCH_FACTOR = 16  # undoes the trainer's square root of 2,048 over 2^19 tokens a step
RATED = ("embedding_lr", "unembedding_lr", "matrix_lr", "scalar_lr", "sigma_lr")
# Flags at these values are left out of keys, so that a new flag of the trainer changes no key.
LEFT_OUT = {flag.name: flag.default for flag in fields(ModelFlags)} | {"attention": "softmax"}

# CIFAR-10: 8 epochs of 50,000 images, in bfloat16, without mixed images and RandAugment, which are for long trainings.
EPOCHS, IMAGE_BATCH, LR = 8, 128, 0.016
IMAGE_MODEL = ("patch_size=4", "embed_dim=96", "depth=6", "num_heads=4")
UNMIXED = ("--aa", "", "--reprob", 0, "--mixup", 0, "--cutmix", 0, "--repeated-aug", 1, "--drop-path", 0)
AVERAGED = ("--model-ema-decay", 0.998, "--warmup-epochs", 1)
CROPS = ("--hflip", 0.5, "--scale", 0.6, 1, "--crop-pct", 1, "--amp", "bfloat16")
RECIPE = ("--input-size", 32, *UNMIXED, *AVERAGED, *CROPS)
REPORTS = ("--num-workers", 0, "--log-every", 30, "--save-every", 150, "--eval-every", -1)
# attention, further --model-kwargs, epochs; every rate that was tuned is 1.
IMAGE_FORMS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "softmax": ("softmax", (), EPOCHS),
    "GKA": ("gka", (), EPOCHS),
    "VLT": ("vlt", (), EPOCHS),
    "GKA + LRUB": ("gka", ("spatial_offsets=LRUB",), EPOCHS),
    "softmax + LRUB": ("softmax", ("spatial_offsets=LRUB",), EPOCHS),
    "softmax, 6 epochs": ("softmax", (), 6),  # about the time of GKA's 8
    "GGGA": ("GGGA", (), EPOCHS),
    "GKA, norm without weight": ("gka", ("norm_weight=false",), EPOCHS),
    "GKA, norm without weight, channel bandwidths": ("gka", ("norm_weight=false", "channel_bandwidths=true"), EPOCHS),
}
IMAGE_SEEDS = (0, 1, 2, 3, 4)
HELD_OUT = 0.1  # of the training images, on which the rates were chosen; its count is part of the keys

MOST_STARTS = 3  # of a training that a signal ended, such as the system's when memory is short
RECORD = "results.jsonl"  # in a run's folder, written by the trainer


@dataclass(kw_only=True)
class TrainConfig:
    """Train cells of the study side by side, every form at its tuned learning rate, and record each.

    A finished cell is not trained again. SIGTERM or Ctrl-C lets the trainings save; the same command continues them.
    """

    data: Path = Path("out/packed/builtin-4096-512-whole")
    """Folder of packed rows (make study packs those of CORPUS)."""
    images: str = ""
    """CIFAR-10 in place of text: a folder named cifar10 with train/ and val/, or hf:FOLDER/cifar10 of parquet files."""
    cells: list[Literal[(*CELLS, "all")]] = field(default_factory=lambda: ["smallest"])
    """Lists of text cells."""
    forms: list[str] = field(default_factory=list)
    """Train these forms, at --depths, --tokens and --seeds, in place of --cells."""
    depths: list[int] = field(default_factory=lambda: [2])
    """Numbers of layers, with --forms."""
    tokens: list[int] = field(default_factory=lambda: [2**20])
    """Training tokens, with --forms."""
    seeds: list[int] = field(default_factory=list)
    """Seeds; 0, 1 and 2 for text and 0 to 4 for images unless given."""
    flags: str = ""
    """Further flags for the trainer, in one word; they are recorded in the row."""
    list: bool = False
    """Show what is left and how long it takes, and train nothing."""
    retry_failed: bool = False
    """Train cells again that failed."""
    runs: Path = Path("out/study")
    """Folder of the runs."""
    results: Path = Path("out/study")
    """Folder of the results, a file of JSON lines for each corpus (those of the pages are in runs/results/study)."""
    at_once: Annotated[int, Bounds(1)] = 2
    """Trainings side by side, which share the cores."""
    device_type: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to train on; auto takes CUDA if there is one."""


@dataclass(kw_only=True, eq=False)
class Training(Job):
    """A cell as a command, whose cost is in FLOPs of text or in images.

    row: what its row says of it, with the command that trains it again. metrics: of its row, from the trainer's record
    and the folder.
    """

    key: str
    row: dict[str, Any]
    metrics: Callable[[dict[str, Any], Path], dict[str, Any]]
    starts: int = 0


def training_of(
    config: TrainConfig, results: str, source: Path, words: list, keyed: dict[str, Any], cell: list,
    row: dict[str, Any], **about: Any,
) -> Training:  # fmt: skip
    """A training on `source`, rows or images. results: the name of the results file. words: flags of the trainer.

    keyed: everything that is computed; its hash is the key. cell: flags of this program that name the cell.
    """
    further = shlex.split(config.flags)
    keyed = {**keyed, "data": row["data"]}
    key = hashlib.sha256(json.dumps(keyed, sort_keys=True).encode()).hexdigest()[:16]
    folder = config.runs / results / key
    flags = ["--data", source, "--out", folder.parent, "--model-tag", key, "--results", folder / RECORD]
    flags += ["--device-type", config.device_type, *words, *further]
    cell += ["--forms", row["form"], "--seeds", row["trial"]["seed"], *([f"--flags={config.flags}"] if further else [])]
    command = shlex.join(["python", "-m", "runs.study.train", *map(str, cell)])
    row = {**row, "key": key, "command": command, "chosen": not further, "flags": further}
    return Training(key=key, folder=folder, flags=flags, row=row, **about)


# Text


def text_trainings(config: TrainConfig) -> tuple[str, list[Training]]:
    """The corpus's name, and the trainings that the flags ask for. Raises UserError."""
    if not (config.data / MANIFEST).exists():
        raise UserError(f"no packed rows in {config.data}: pack some with python -m nanochat_gka.pack")
    check_names("--forms", config.forms, FORMS)
    seeds = config.seeds or SEEDS
    if config.forms:
        places = [(depth, tokens) for depth in config.depths for tokens in config.tokens]
        lists = [(config.forms, places)]
    else:
        lists = list(CELLS.values()) if "all" in config.cells else [CELLS[name] for name in config.cells]
    manifest = read_json(config.data / MANIFEST, "manifest of packed rows")
    cells = [(f, *place, seed) for forms, places in lists for place in places for seed in seeds for f in forms]
    chosen = [cell for cell in dict.fromkeys(cells) if fits(cell[0], cell[1])]
    name = Path(manifest["corpus"]).name
    return name, [text_training(config, name, manifest, *cell) for cell in chosen]


def fits(form: str, depth: int) -> bool:
    """Whether a model of this depth has the whole of a hybrid's pattern of layers."""
    attention = FORMS[form]["attention"]
    return attention in ("softmax", "gka", "vlt") or len(attention) <= depth


def text_training(
    config: TrainConfig, name: str, manifest: dict[str, Any], form: str, depth: int, tokens: int, seed: int
) -> Training:
    """One cell of text. manifest: of the packed rows."""
    batch = 2048 if depth < 6 else 4096  # tokens a step
    rate = (RATES_AT_8 if depth == 8 else RATES).get(form, 1.0)
    trial = {"depth": depth, "window_pattern": "L", "rate": rate, "seed": seed, "tokens": tokens, "batch": batch}
    trial = {**trial, "dtype": "bfloat16", "head_dim": HEAD_DIM, **FORMS[form]}
    computed = computed_of(trial)
    steps = tokens // batch
    if not steps:
        raise UserError(f"--tokens {tokens}: a step with {depth} layers has {batch} tokens")
    words = ["--compile", "on" if depth >= COMPILED_FROM else "off", "--eval-tokens", EVAL_TOKENS, "--sample-every", -1]
    words += ["--eval-every", steps // 4 if tokens >= EVALUATE_ALONG_FROM else -1]
    words += ["--save-every", max(1, SAVE_EVERY // batch), "--keep", 1, "--log-every", max(1, steps // CURVE_POINTS)]
    today = settings_of_today(computed)
    for flag, value in today.items():
        word = f"--{flag.replace('_', '-')}"
        words += ([word] if value else []) if isinstance(value, bool) else [word, value]
    shape = {flag: value for flag, value in today.items() if flag in LEFT_OUT and flag != "aspect_ratio"}
    model = ModelFlags(**shape).shape(depth, manifest["sequence_len"], manifest["vocab_size"])
    keyed = {flag: value for flag, value in computed.items() if value != LEFT_OUT.get(flag)}
    keyed |= {"eval_tokens": EVAL_TOKENS}
    keyed |= {"flags": shlex.split(config.flags)} if config.flags else {}
    return training_of(
        config,
        name,
        config.data,
        words,
        keyed,
        ["--data", config.data, "--depths", depth, "--tokens", tokens],
        {"form": form, "trial": trial, "data": same_rows(manifest)},
        name=f"{form}, {depth} layers, {tokens:,} tokens, seed {seed}",
        module="nanochat_gka.train",
        steps=steps,
        cost=tokens * flops_per_token(meta_model(model)),
        finish_keys=("val_bpb", "train_bpb", "tokens_per_second", "sigma"),
        metrics=text_metrics,
    )


def computed_of(trial: dict[str, Any]) -> dict[str, Any]:
    """The trainer's settings that decide what is computed, by flag."""
    factors = dict.fromkeys(RATED, trial["rate"])
    if trial.get("channel_bandwidths"):
        factors["channel_lr"] = trial["rate"] * trial["channel_rate"]
    if trial.get("head_gates"):
        factors["gate_lr"] = trial["rate"] * trial["gate_rate"]
    defaults = OptimConfig()
    shape = {name: value for name, value in trial.items() if name in LEFT_OUT}
    length = {"num_iterations": trial["tokens"] // trial["batch"], "total_batch_size": trial["batch"]}
    rates = {name: round(getattr(defaults, name) * BATCH_FACTOR * factor, 9) for name, factor in factors.items()}
    return {**shape, "aspect_ratio": 64, **length, "seed": trial["seed"], "dtype": trial["dtype"], **rates}


def text_metrics(record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """With the curve, [tokens, running mean of the training loss in nats], and the evaluations, [tokens, train BPB,
    validation BPB].
    """
    log, batch = folder / "log.jsonl", record["config"]["total_batch_size"]
    losses = read_events(log, "train", "smooth_loss", "tokens_per_second")
    curve = [[one["step"] * batch, round(one["smooth_loss"], 5)] for one in losses]
    names = ("tokens", "train_bpb", "val_bpb")
    evaluations = [[one[name] for name in names] for one in read_events(log, "eval", *names)]
    return {**record["metrics"], "curve": curve, "evaluations": evaluations}


# Images


def image_trainings(config: TrainConfig) -> tuple[str, list[Training]]:
    """The name of the results file, and the trainings on CIFAR-10 that the flags ask for. Raises UserError."""
    check_names("--forms", config.forms, IMAGE_FORMS)
    folder, data = image_copies(config.images, config.runs / "images")
    seeds = config.seeds or IMAGE_SEEDS
    forms = config.forms or IMAGE_FORMS
    return "vision_cifar10", [image_training(config, folder, data, form, seed) for seed in seeds for form in forms]


def image_training(config: TrainConfig, folder: Path, data: dict[str, Any], form: str, seed: int) -> Training:
    """One cell of images. folder, data: as `image_copies` returns them."""
    attention, keywords, epochs = IMAGE_FORMS[form]
    model = ["--model", model_name("tiny", "gka"), "--attention", attention, "--model-kwargs", *IMAGE_MODEL, *keywords]
    length = ["--epochs", epochs, "--batch-size", IMAGE_BATCH, "--seed", seed, "--lr", LR]
    words = [str(word) for word in (*model, *length, *RECIPE)]
    options = dict(word.split("=") for word in keywords)
    trial = {"attention": attention, "spatial_offsets": options.get("spatial_offsets", ""), "rate": 1.0, "seed": seed}
    trial |= {"norm_weight": "norm_weight" not in options, "channel_bandwidths": "channel_bandwidths" in options}
    trial |= {"tuning": False, "epochs": 0 if epochs == EPOCHS else epochs}
    keyed = {"flags": words} | ({"further flags": shlex.split(config.flags)} if config.flags else {})
    return training_of(
        config,
        "vision_cifar10",
        folder,
        [*words, *REPORTS],
        keyed,
        ["--images", config.images],
        {"form": form, "trial": trial, "data": data},
        name=f"{form}, CIFAR-10, seed {seed}",
        module="deit_gka.train",
        steps=epochs * (data["train images"] // IMAGE_BATCH),
        cost=epochs * data["train images"],
        finish_keys=("top1", "ema_top1", "images_per_second", "sigma"),
        # In bfloat16 on a CPU softmax and VLT train twice as fast when they build their weights.
        environment={"TIMM_FUSED_ATTN": "0"} if attention in ("softmax", "vlt") else {},
        metrics=image_metrics,
    )


def image_metrics(record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """With the curve: the training loss of every epoch, mean of the logged updates."""
    losses: dict[int, list[float]] = {}
    for one in read_events(folder / "log.jsonl", "train", "epoch", "loss"):
        losses.setdefault(math.ceil(one["epoch"]), []).append(one["loss"])
    judged = {one["epoch"]: one["ema_top1"] for one in read_events(folder / "log.jsonl", "eval", "ema_top1")}
    curve = [{"epoch": e, "loss": statistics.mean(losses[e]), "ema_top1": judged.get(e)} for e in sorted(losses)]
    return {**record["metrics"], "curve": curve}


def image_copies(data: str, base: Path) -> tuple[Path, dict[str, Any]]:
    """A folder below `base` with the images as PNG files, written once, and what identifies the images.

    The trainer's order of images is that of file names, so that equal images give equal trainings however they are
    stored. Raises UserError for images that cannot be read or whose splits differ in their classes.
    """
    sources = {split: open_source(data, split) for split in ("train", "val")}
    if not all(isinstance(source, ImageSource) for source in sources.values()):
        raise UserError(f"--images {data} is a stream; give a folder")
    name = Path(data.partition(":")[2] or data).resolve().name
    if name != "cifar10":
        raise UserError(f"--images {data}: the recipe is for CIFAR-10, in a folder named cifar10")
    check_classes(sources["train"], sources["val"])
    digest = hashlib.sha256()  # of all images as they are stored, their classes and their order
    for split, source in sources.items():
        digest.update(repr((split, source.classes)).encode())
        for index in range(len(source)):
            stored, label, _ = source.read(index)
            content = stored if isinstance(stored, bytes) else stored.tobytes()
            digest.update(f"{label} {len(content)} ".encode() + content)
    identity = {"images": name, **{f"{split} images": len(source) for split, source in sources.items()}}
    identity |= {"held out": math.ceil(HELD_OUT * identity["train images"]), "sha256": digest.hexdigest()}
    folder = base / f"{name}-{digest.hexdigest()[:8]}"
    manifest = folder / "manifest.json"
    if not manifest.exists():
        console.print(f"making copies in {folder}", highlight=False)
        shutil.rmtree(folder, ignore_errors=True)
        for split, source in sources.items():
            for index in range(len(source)):
                stored, label, _ = source.read(index)
                path = folder / "compared" / split / str(source.classes[label]) / f"{index:06d}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                decode(stored).save(path)
        write_json(manifest, identity)
    return folder / "compared", identity


# Both


def check_names(flag: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raises UserError for a name that is not known."""
    if missing := [name for name in names if name not in known]:
        raise UserError(f"{flag} {missing[0]}: choose among {', '.join(known)}")


class Runner(SideBySide):
    """Trains what is left side by side. Every outcome becomes a row of `results`.

    Raises UserError if these have rows of other data, such as other rows of a text of the same name.
    """

    LINE_SECONDS = 600.0

    def __init__(self, config: TrainConfig, name: str, trainings: list[Training]):
        super().__init__(trainings, config.at_once)
        self.config, self.kind = config, "study-vision" if config.images else "study"
        self.results = config.results / f"{name}.jsonl"
        self.failed: set[str] = set()  # here; not tried again
        known = [row.get("data") for row in read_lines(self.results) if row.get("kind") == self.kind]
        if any(data != training.row["data"] for data in known for training in trainings[:1]):
            advice = "choose another folder with --results, or move the file"
            raise UserError(f"{self.results} has rows of other data, which do not compare with these: {advice}")

    def remaining(self) -> list[Training]:
        """What is neither finished nor failed."""
        kinds = [self.kind] if self.config.retry_failed else [self.kind, f"{self.kind}-failed"]
        over = {row.get("key") for row in read_lines(self.results) if row.get("kind") in kinds} | self.failed
        return [training for training in self.jobs if training.key not in over]

    def show(self) -> None:
        """Print every cell that is left, and the time of all by the median speed of the finished ones."""
        remaining, speeds = self.remaining(), []
        for metrics in (row["metrics"] for row in read_lines(self.results) if row.get("kind") == self.kind):
            if speed := metrics.get("images_per_second") or metrics.get("tokens_per_second"):
                speeds.append(speed * metrics.get("flops_per_token", 1))
        for training in remaining:
            console.print(f"{training.key}  {training.name}", highlight=False, markup=False)
        seconds = sum(training.cost for training in remaining) / statistics.median(speeds) if speeds else 0
        total = f", {clock_text(seconds)} of one training at a time" if speeds else ""
        console.print(f"{len(remaining)} of {len(self.jobs)} left{total}.", highlight=False)

    def may_start(self, training: Training) -> bool:
        """Whether no process trains it and there is something to train. One that only lacks its row gets it."""
        return not self._is_busy(training) and not self._collect(training)

    def ended(self, training: Training) -> None:
        """Record a training that has ended, unless a signal ended it or another process has its folder."""
        training.starts += 1
        code = training.process.returncode
        by_signal = code <= 0  # a trainer that is asked to stop saves and exits with 0
        if self._collect(training) or (by_signal and training.starts < MOST_STARTS) or self._is_busy(training):
            return
        reason = (training.printed() or ["nothing was printed"])[-1]
        outcome = {"exit_code": code, "reason": reason.removeprefix("error: "), "kind": f"{self.kind}-failed"}
        append_line(self.results, {**training.row, "date": date_of(), "commit": git_commit(), **outcome})
        self.failed.add(training.key)
        console.print(f"{training.name}: exit code {code}: {reason}", highlight=False, markup=False)

    def _collect(self, training: Training) -> bool:
        """Append the row of a training that is finished. Returns False if it is not."""
        records = read_results(training.folder / RECORD, *training.finish_keys)
        if not records:
            return False
        metrics = training.metrics(records[-1], training.folder)
        append_line(self.results, {**records[-1], **training.row, "metrics": metrics, "kind": self.kind})
        console.print(f"{training.name}: recorded in {self.results}", highlight=False, markup=False)
        return True

    def _is_busy(self, training: Training) -> bool:
        """Whether another process trains it: of another runner, or of one that was killed."""
        try:
            with locked(training.folder, "training in"):
                return False
        except UserError:
            return True


def main(config: TrainConfig) -> None:
    name, trainings = image_trainings(config) if config.images else text_trainings(config)
    runner = Runner(config, name, trainings)
    if config.list:
        runner.show()
        return
    os.nice(19)  # every other program goes first
    try:
        runner.run()
    except (KeyboardInterrupt, signals.Stopped):
        console.print("stopped; every training has saved. The same command continues.", highlight=False)
        sys.exit(130)
    remaining = len(runner.remaining())
    console.print(f"{len(trainings) - remaining} of {len(trainings)} cells are recorded.", highlight=False)


if __name__ == "__main__":
    run(main, TrainConfig)
