"""One HTML page of what was trained: runs, the paper's tables beside ours, curves, attention pictures, provenance.

    make report                        (python -m runs.report)
    make report RUN=out/runs/d20-gka   of one run

The page needs no network, no server and no script: a browser opens the file, and pictures are inside it.
"""

import base64
import io
import itertools
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import jinja2
from markupsafe import Markup, escape
from PIL import Image

from deit_gka.figures import families as vision_families
from deit_gka.figures.subjects import images_for, of_run, photographs
from deit_gka.figures.subjects import subjects_of as vision_subjects
from gka.kinds import KINDS
from nanochat_gka.draw import TEXT
from nanochat_gka.figures import families as language_families
from nanochat_gka.figures.subjects import subjects_of as language_subjects
from nanochat_gka.training.bits_per_byte import remark, remarks
from runs.demo.language import COLUMNS as LANGUAGE_COLUMNS
from runs.demo.vision import COLUMNS as VISION_COLUMNS
from runs.looks import LOOKS, Look
from runs.table import Row, Table, styled
from runs.tables import BUILDERS
from trainkit_gka import cli
from trainkit_gka.cli import UserError
from trainkit_gka.command import command_line
from trainkit_gka.files import atomic, check_named
from trainkit_gka.loop import finish_record
from trainkit_gka.plots import GREY, Figure, shades, subplots
from trainkit_gka.progress import LOG, console, read_events
from trainkit_gka.results import git_commit, hardware_of, read_results

TEMPLATE = Path(__file__).with_name("report.html")
RESULT_FILES = ("results.jsonl", "demo/train.jsonl", "demo/train_deit.jsonl")  # in BASE
# The families of figures on the page, and of how many images or models; `make figures` draws all of them.
VISION_FAMILIES = {"rollout": 2, "sigma": 4, "cls_maps": 1, "patch_to_patch": 1, "distance": 4, "matrices": 1}
LANGUAGE_FAMILIES = {"rows": 1, "matrices": 1, "heads": 4, "distances": 4}
BESIDE_TWINS = ("rollout", "distance")  # vision families that show softmax and VLT too
NUM_MODELS, NUM_TWINS = 4, 2  # language models, and vision models without bandwidths
CHART, CHART_DPI = (6.4, 4.0), 110  # inches
PICTURE_WIDTH, WEBP_QUALITY = 1800, 82  # pixels
LINES, OTHER_FORMS = ("-", "--", ":", "-."), Look(GREY)
PROGRESS = {False: "training tokens, millions", True: "epochs"}
# Columns of finish records, by whether the run is of vision.
NUMBERS = {False: LANGUAGE_COLUMNS, True: VISION_COLUMNS}
FACTS = ("date", "hardware", "processes", "torch", "commit")


@dataclass
class ReportConfig:
    """Write one HTML page, without network or server, of what was trained."""

    base: Path = Path("out")
    """Folder of all outputs: the runs are those in BASE/runs and BASE/demo/runs."""
    run: tuple[Path, ...] = ()
    """Folders of runs to report, language and vision. Without any: all in BASE."""
    image: tuple[Path, ...] = ()
    """Image files for the attention pictures. Without any: held-out images that the vision run was trained for, or the
    two photographs that come with scikit-learn."""
    text: str = TEXT
    """The text that language models read in the pictures."""


@dataclass(frozen=True)
class TrainedRun:
    """A run's folder, the settings it started with, its log, and its line of a result file (empty if there is none)."""

    folder: Path
    config: dict[str, Any]
    events: list[dict[str, Any]]
    finish: dict[str, Any]
    result: dict[str, Any]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def is_vision(self) -> bool:
        return "model" in self.config

    @property
    def family(self) -> str:
        """The name without the seed."""
        return re.sub(r"-seed\d+$", "", self.name)

    @property
    def form(self) -> str:
        """The name of its attention in charts."""
        model, attention = self.config.get("model", ""), self.config.get("attention", "")
        kind = KINDS.get(attention or next((name for name in KINDS if f"_{name}_" in model), "softmax"))
        return (kind.label if kind else attention) + " + offsets" * bool(self.config.get("head_offsets"))

    @property
    def has_sigma(self) -> bool:
        return any(event.get("sigma") for event in self.events)

    def points(self, event: str, key: str) -> list[tuple[float, Any]]:
        """(millions of tokens or epochs, value) of every record of `event` that has a value of `key`."""
        records = [e for e in self.events if e["event"] == event and e.get(key) is not None]
        if not self.is_vision:
            return [(e["step"] * self.config["total_batch_size"] / 1e6, e[key]) for e in records]
        steps = [(e["step"], e["epoch"]) for e in self.events if e.get("epoch") and e["step"]]
        epochs = steps[-1][1] / steps[-1][0] if steps else 1.0
        return [(round(e["step"] * epochs, 6), e[key]) for e in records]


@dataclass(frozen=True)
class Section:
    """A part of the page. missing: why something is absent, and the command that makes it. folded: closed tables."""

    name: str
    title: str
    introduction: str
    missing: str = ""
    tables: Sequence[Table] = ()
    folded: Sequence[Table] = ()
    pictures: Sequence[Figure] = ()
    commands: Sequence[str] = field(default_factory=list)


def find_runs(chosen: Sequence[Path], base: Path) -> list[TrainedRun]:
    """The chosen runs, or else all in BASE/runs and BASE/demo/runs. Raises UserError for a folder that is not a run."""
    logs = [log for place in ("runs", "demo/runs") for log in sorted(base.glob(f"{place}/*/{LOG}"))]
    lines = [line for name in RESULT_FILES for line in read_results(base / name, "parameters")]
    results = {line["config"].get("model_tag"): line for line in lines}
    runs = []
    for folder in chosen or [log.parent for log in logs]:
        if not (folder / LOG).exists():
            raise UserError(f"{folder} is not a run: it has no {LOG}; give a folder that a trainer made")
        events = read_events(folder / LOG)
        starts = [event for event in events if event["event"] == "start" and isinstance(event.get("config"), dict)]
        if starts:
            finish, result = finish_record(folder, ("parameters",)) or {}, results.get(folder.resolve().name, {})
            runs.append(TrainedRun(folder, starts[-1]["config"], events, finish, result))
        elif chosen:
            raise UserError(f"{folder / LOG} does not say how the run was started; it is damaged or of another program")
    return runs


def number(value: object) -> str:
    """A number as a cell: whole ones in full, others with four digits."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return "" if value is None else str(value)


# Training


@dataclass(frozen=True)
class Line:
    """A line of a chart. band: for every point the lowest and highest of the values that y is the mean of."""

    label: str
    points: list[tuple[float, float]]
    look: Look
    band: list[tuple[float, float]] = field(default_factory=list)


def chart(folder: Path, title: str, caption: str, x: str, y: str, lines: list[Line]) -> list[Figure]:
    """A chart of lines over x, with its points as rows; none without lines."""
    if not lines:
        return []
    figure, axis = subplots(figsize=CHART)
    figure.set_layout_engine("constrained")
    for line in lines:
        marker = line.look.marker if len(line.points) < 20 else None
        axis.plot(*zip(*line.points), **line.look(line.label, marker=marker, markersize=3.5))
        if line.band:
            axis.fill_between([at for at, _ in line.points], *zip(*line.band), color=line.look.colour, alpha=0.15)
    axis.set(xlabel=x, ylabel=y)
    axis.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=2, fontsize=8, frameon=False)
    path = folder / f"{title}.png"
    figure.savefig(path, dpi=CHART_DPI)
    columns = {line.label: dict(line.points) for line in lines}
    places = sorted(set().union(*columns.values()))
    rows = [{x: at, **{label: column.get(at) for label, column in columns.items()}} for at in places]
    return [Figure(path, title, caption, rows)]


def learning_curves(runs: list[TrainedRun], event: str, key: str) -> list[Line]:
    """A line for every run in the colour of its form; runs of one form differ in the line."""
    lines: list[Line] = []
    for run in runs:
        points = [(at, value) for at, value in run.points(event, key) if isinstance(value, (int, float))]
        if points:
            same = sum(line.label.startswith(f"{run.form}, ") for line in lines)
            look = replace(LOOKS.get(run.form, OTHER_FORMS), line=LINES[same % len(LINES)])
            lines.append(Line(f"{run.form}, {run.name}", points, look))
    return lines


def bandwidth_curves(run: TrainedRun) -> list[Line]:
    """σ over training: a line for each layer, mean and range of its heads."""
    layers: dict[str, list[tuple[float, list[float]]]] = {}
    for at, sigma in run.points("eval", "sigma"):
        for layer, heads in sigma.items() if isinstance(sigma, dict) else ():
            layers.setdefault(layer, []).append((at, heads))
    lines = []
    for colour, (layer, points) in zip(shades(len(layers)), layers.items()):
        means = [(at, fmean(heads)) for at, heads in points]
        band = [(min(heads), max(heads)) for _, heads in points]
        lines.append(Line(f"layer {int(layer.rpartition('_')[2]) + 1}", means, Look(colour), band))
    return lines


def curves(runs: list[TrainedRun], folder: Path) -> list[Figure]:
    """The charts of the training section. folder: for the pictures."""
    last = {run.name: one for run in runs if not run.is_vision for one in run.events if one["event"] == "eval"}
    held_out = "Text that was not trained on. Bits per byte do not depend on the tokenizer; lower is better."
    loss = "Cross-entropy of the last batch, label smoothing and augmentation of the recipe included."
    top1 = "Accuracy of the averaged weights on images that were not trained on."
    held_out = " ".join([held_out, *remarks(last)])
    charts = [
        ("Language, training loss", "The smoothed loss of the log.", "nats per token", "train", "smooth_loss", False),
        ("Language, validation", held_out, "bits per byte", "eval", "val_bpb", False),
        ("Vision, training loss", loss, "cross-entropy, nats", "train", "loss", True),
        ("Vision, validation", top1, "top-1, %", "eval", "ema_top1", True),
    ]
    figures = []
    for title, caption, y, event, key, vision in charts:
        lines = learning_curves([run for run in runs if run.is_vision == vision], event, key)
        figures += chart(folder, title, caption, PROGRESS[vision], y, lines)
    caption = "Mean σ of a layer's heads; the band is from the lowest to the highest head."
    for run in runs:
        title, x = f"σ over training, {run.name}", PROGRESS[run.is_vision]
        figures += chart(folder, title, caption, x, "σ", bandwidth_curves(run))
    return figures


def run_tables(runs: list[TrainedRun]) -> list[Table]:
    """The numbers that runs ended with: a table for the language models and one for the vision models."""
    tables = []
    for vision, columns in NUMBERS.items():
        rows = []
        for run in (run for run in runs if run.is_vision == vision):
            about = "; ".join(filter(None, [run.name, remark(run.finish), *run.finish.get("warnings", [])]))
            rows.append([about, run.form, *(cell(run.finish, key, digits) for key, (_, digits) in columns.items())])
        headings = ["run", "attention", *(heading for heading, _ in columns.values())]
        title = f"{'Vision' if vision else 'Language'} models, as their logs end"
        tables += [Table.of(headings, rows, title=title, words=2)] if rows else []
    return tables


def cell(finish: dict[str, Any], key: str, digits: str) -> str:
    value = finish.get(key)
    return "not finished" if not finish else "–" if value is None else digits.format(value)


# Attention


def vision_pictures(runs: list[TrainedRun], images: Sequence[Path], folder: Path) -> tuple[list[Figure], str]:
    """Of the first vision run that can be drawn, one with bandwidths if there is one, beside its twins without.

    Returns why there are none, as a second value.
    """
    files = photographs(images) if images else {}

    def load(run: TrainedRun, first: TrainedRun | None) -> list[Any]:
        if first and run.has_sigma:
            return []
        model = of_run(run.folder)
        files.update({} if files else images_for(model, network=False))
        return vision_subjects(model, files)

    vision = sorted((run for run in runs if run.is_vision), key=lambda run: not run.has_sigma)
    subjects, reason = together(vision, load, 1 + NUM_TWINS)
    names = list(dict.fromkeys(subject.image for subject in subjects))
    figures = []
    for family, count in VISION_FAMILIES.items():
        models = {s.about for s in subjects[: None if family in BESIDE_TWINS else 1]}
        chosen = [s for s in subjects if s.about in models and s.image in names[:count]]
        figures += drawn(vision_families, family, chosen, folder)
    return figures, reason


def language_pictures(runs: list[TrainedRun], text: str, folder: Path) -> tuple[list[Figure], str]:
    """Of the first models that read the text with one tokenizer, the paper's form first; and why there are none."""
    if not text.strip():
        raise UserError("the text is empty; give some words with --text")

    def load(run: TrainedRun, first: TrainedRun | None) -> list[Any]:
        return language_subjects([run.folder] if first is None else [first.folder, run.folder], text)[-1:]

    language = [run for run in runs if not run.is_vision]
    language.sort(key=lambda run: (not run.has_sigma, bool(run.config.get("head_offsets"))))
    subjects, reason = together(language, load, NUM_MODELS)
    families = LANGUAGE_FAMILIES.items()
    figures = [drawn(language_families, family, subjects[:count], folder) for family, count in families]
    return [*itertools.chain(*figures)], reason


def together(
    runs: list[TrainedRun], load: Callable[[TrainedRun, TrainedRun | None], list[Any]], most: int
) -> tuple[list[Any], str]:
    """The subjects of the first `most` families that can be loaded beside the first of them; why there is none.

    load: raises UserError, as for another tokenizer or input size, and without a checkpoint.
    """
    loaded, subjects, reason = {}, [], ""
    for run in runs:
        if run.family in loaded or len(loaded) == most:
            continue
        try:
            more = load(run, next(iter(loaded.values()), None))
        except UserError as error:
            reason = reason or f"{run.name} is not drawn: {error}."
        else:
            subjects += more
            loaded |= {run.family: run} if more else {}
    return subjects, "" if subjects else reason


def drawn(module: Any, family: str, subjects: list[Any], folder: Path) -> list[Figure]:
    """One of a trainer's families of figures, if it can be drawn of these subjects. module: has FAMILIES, why_not."""
    if not subjects or module.why_not(family, subjects):
        return []
    place = folder / module.__name__ / family
    place.mkdir(parents=True)
    return module.FAMILIES[family](subjects, place)


def address_of(path: Path) -> str:
    """An image as an address that needs no network: WebP in base64."""
    buffer = io.BytesIO()
    with Image.open(path) as image:
        small = image.convert("RGB")
        if small.width > PICTURE_WIDTH:
            small = small.resize((PICTURE_WIDTH, round(small.height * PICTURE_WIDTH / small.width)), Image.LANCZOS)
        small.save(buffer, "WEBP", quality=WEBP_QUALITY)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


# The page


def provenance(runs: list[TrainedRun]) -> Section:
    """Where the runs were trained and with which commands, as their lines of a result file say."""
    rows: list[Row] = []
    for run in runs:
        facts = {**run.result, "date": str(run.result.get("date", ""))[:10]}
        facts["hardware"] = hardware_of(run.result) if "hardware" in run.result else None
        rows.append([run.name, *(number(facts.get(fact)) or "not recorded" for fact in FACTS)])
    tables = [Table.of(["run", *FACTS], rows, title="The runs of this page", words=len(FACTS) + 1)] if rows else []
    commands = list(dict.fromkeys(run.result["command"] for run in runs if run.result.get("command")))
    words = "Hardware, versions, commits and commands, from the runs' lines of the result files."
    return Section("ran", "Provenance", words, tables=tables, commands=commands)


def sections(config: ReportConfig, folder: Path) -> list[Section]:
    """The page. folder: for its pictures."""
    runs = find_runs(config.run, config.base)
    console.print("report: attention pictures", highlight=False)
    vision, no_vision = vision_pictures(runs, config.image, folder)
    language, no_language = language_pictures(runs, config.text, folder)
    missing = "" if runs else 'No run was found. "make demo" trains small models in minutes.'
    unseen = " ".join(filter(None, [no_vision, no_language])) if runs else missing
    console.print("report: curves and tables", highlight=False)
    paper = [builder(config.base).table() for builder in BUILDERS.values()]
    return [
        Section("runs", "Runs", "The models of this page.", missing, tables=run_tables(runs)),
        Section("paper", "The paper's tables beside ours", "The paper's figures are in italics. Ours are exact counts, "
                "and finished runs of exactly the paper's configuration.", folded=paper),
        Section("training", "Training", "From the runs' logs. A colour is a form of attention; its models and seeds "
                "differ in the line.", missing, pictures=curves(runs, folder)),
        Section("attention", "Attention", "The paper's figures of the vision models, then of the language models. "
                "Every W was computed again and gives its model's output.", unseen, pictures=[*vision, *language]),
        provenance(runs),
    ]  # fmt: skip


def inline(text: str) -> Markup:
    """A cell or title with `code`, *italics* and **bold** as elements; everything else is escaped."""
    marks = {"code": "<code>%s</code>", "bold": "<b>%s</b>", "italics": "<i>%s</i>"}
    return Markup(styled(text, lambda words: str(escape(words)), marks))


def numbers(figure: Figure) -> Table:
    """What a figure draws, as a table."""
    return Table.of(figure.rows[0], [[number(value) for value in row.values()] for row in figure.rows])


def page_template() -> jinja2.Template:
    """The page, in which everything that is not `Markup` is escaped."""
    about = dict(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment = jinja2.Environment(autoescape=True, **about)
    environment.filters |= {"inline": inline, "address": address_of, "numbers": numbers}
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))


def main(config: ReportConfig) -> None:
    started = time.perf_counter()
    out = config.base / "report.html"
    if not config.run:
        check_named(config.base, ReportConfig.base, "the outputs of runs")
    with tempfile.TemporaryDirectory() as folder:
        parts = sections(config, Path(folder))
        content = page_template().render(sections=parts, commit=git_commit(), command=command_line())
    with atomic(out) as temporary:
        temporary.write_text(content, encoding="utf-8")
    console.print(f"{out}: {out.stat().st_size / 1e6:.1f} MB, in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    cli.run(main, ReportConfig)
