"""The command that draws language models: its files, their numbers, and the mistakes it names."""

import dataclasses
import json

import pytest
from matplotlib.figure import Figure
from PIL import Image

import tiny
from nanochat_gka.draw import DrawConfig, main
from nanochat_gka.figures.families import FAMILIES
from nanochat_gka.figures.subjects import read_history, subjects_of
from nanochat_gka.model.checkpoints import export, load
from tiny_gpt import SHAPE, awake, write_run

TEXT = "the kernel mixes $5 and $6"
FORMS = {
    "gka": dict(attention="gka"),
    "softmax": dict(attention="softmax"),
    "offsets": dict(attention="GA", head_offsets="PSN", gka_values="normalised", n_layer=3, channel_bandwidths=True),
}
# The models that a family has numbers of; all where none are named.
HAVING = {"sigma": {"gka", "offsets"}, "distances": {"gka", "offsets"}, "channels": {"offsets"}}


def write_log(folder, *sigmas, layers=(0, 1, 2, 3)):
    """A training log with an evaluation for every σ, which all heads have, among lines of other programs."""
    events = [
        {"event": "eval", "step": 10 * place, "tokens": 10_000 * place,
         "sigma": {f"layer_{layer}": [sigma + layer] * 4 for layer in layers}}
        for place, sigma in enumerate(sigmas)
    ]  # fmt: skip
    lines = [*tiny.NOT_OF_THIS_RUN, *map(json.dumps, events), '{"event": "eval", "step": 3, "sigma": 5, "tokens": 9}']
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def runs(tokenized, tokenizer, tmp_path_factory):
    """Run folders by name; the two with bandwidths have logs."""
    shape, folder = dataclasses.replace(SHAPE, vocab_size=tokenizer.vocab_size), tmp_path_factory.mktemp("runs")
    made = {
        name: write_run(folder / name, awake(dataclasses.replace(shape, **form)), tokenized / "tokenizer")
        for name, form in FORMS.items()
    }
    write_log(made["gka"], 4, 6, 8)
    write_log(made["offsets"], 4, 2, layers=(0, 2))
    return made


@pytest.fixture
def figures(monkeypatch):
    """File name -> the figure that would be written there; nothing is rendered."""
    written = {}
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **options: written.update({path.name: self}))
    return written


def draw(*flags):
    assert tiny.exit_code(main, DrawConfig, *flags) == 0


def test_every_family_is_written_as_png_and_pdf(runs, tmp_path):
    draw("--run", runs["offsets"], "--text", "the kernel", "--out", tmp_path)
    files = {path.name for path in (tmp_path / "offsets").iterdir()}
    assert files == {f"{family}.{form}" for family in FAMILIES for form in ("png", "pdf")}
    for family in FAMILIES:
        assert min(Image.open(tmp_path / "offsets" / f"{family}.png").size) > 300
        assert (tmp_path / "offsets" / f"{family}.pdf").read_bytes().startswith(b"%PDF")


def test_every_figure_has_the_numbers_of_every_model(runs, figures, tmp_path):
    subjects = subjects_of(list(runs.values()), TEXT)
    for name, family in FAMILIES.items():
        (figure,) = family(subjects, tmp_path)
        assert figure.path == tmp_path / f"{name}.png"
        assert not any(text.get_parse_math() for text in figures[f"{name}.png"].texts)  # the text has two $
        assert figure.rows and len({tuple(row) for row in figure.rows}) == 1 and "NaN" not in json.dumps(figure.rows)
        assert {row["model"] for row in figure.rows} == HAVING.get(name, set(FORMS))


def test_bandwidths_over_training_are_those_of_the_logs(runs, figures, tmp_path, tokenized):
    log, shape = runs["gka"] / "log.jsonl", load(runs["gka"]).model.config
    history = {tokens: sigma[1] for tokens, sigma in read_history(log, shape).items()}
    assert history == {0: [5] * 4, 10_000: [7] * 4, 20_000: [9] * 4}
    assert not read_history(log, dataclasses.replace(shape, n_head=2, n_kv_head=2))
    seed = write_run(tmp_path / "seed", load(runs["gka"]).model, tokenized / "tokenizer")
    write_log(seed, 4, 8, 12)
    (figure,) = FAMILIES["sigma"](subjects_of([runs["gka"], runs["offsets"], seed], "the kernel"), tmp_path)
    panels = [axis for axis in figures["sigma.png"].axes if axis.get_visible()]
    head = panels[1].lines[0]
    assert head.get_xdata().tolist() == [0, 0.01, 0.02] and head.get_ydata().tolist() == [5, 8, 11]  # of two seeds
    assert {5, 7, 9, 13} <= set(panels[1].collections[0].get_paths()[0].vertices[:, 1])  # their band
    # From 8² / 16 in the first layer of one run to 15² / 16 in the last one of the other; (11 / 9)² and (12 / 8)².
    assert all(number in figure.caption for number in ("4.00 to 14.06 times", "+49% to +125%"))


def test_rows_are_of_the_chosen_tokens_layers_and_beginning_of_the_text(runs, figures, tmp_path):
    (subject,) = subjects_of([runs["gka"]], TEXT)
    (figure,) = FAMILIES["rows"]([subject], tmp_path, queries=[3], layers=[2], tokens=6)
    for head, row in enumerate(figure.rows):
        weights = subject.layers[2].weights[head, 3]
        assert row["largest weight"] == float(weights.max()) and row["token"] == subject.words[3].strip()
        assert row["on"] == subject.words[int(weights.argmax())].strip()
    flags = ["--family", "rows", "--layer", 3, 1, "--tokens", 6, "--query", "kernel", "mixes"]
    draw("--run", runs["gka"], "--text", TEXT, *flags, "--out", tmp_path)
    axes = [axis for axis in figures["rows.png"].axes if axis.get_title(loc="left")]
    assert [axis.get_title(loc="left") for axis in axes] == ['row of "kernel"', 'row of "mixes"']
    labels = [text.get_text() for text in axes[0].texts if text.get_text().startswith("layer ")]
    assert labels == [f"layer {layer} head {head}" for layer in (3, 1) for head in (1, 2, 3, 4)]


def test_families_that_a_model_has_nothing_for_are_left_out(runs, figures, tmp_path, capsys):
    """A bandwidth, one for every channel, or a log of them."""
    export(load(runs["gka"]), tmp_path / "exported")
    families = ["--family", "rows", "sigma", "distances", "channels"]
    for run_folder, drawn in ((runs["softmax"], {"rows"}), (tmp_path / "exported", {"rows", "distances"})):
        figures.clear()
        draw("--run", run_folder, "--text", TEXT, "--out", tmp_path, *families)
        assert {name.partition(".")[0] for name in figures} == drawn
        assert capsys.readouterr().out.count("not drawn") == 4 - len(drawn)


def test_mistakes_are_one_line(runs, tmp_path, capsys, tokenized):
    gka, (latin, empty) = ["--run", runs["gka"]], (tmp_path / name for name in ("latin.txt", "empty.txt"))
    latin.write_bytes("für".encode("latin-1"))
    empty.write_text(" \n")
    data = json.loads((tokenized / "tokenizer" / "tokenizer.json").read_text())
    data["special_tokens"][-1] = "<|another|>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    twin = write_run(tmp_path / "twin", load(runs["gka"]).model, tmp_path)
    for flags, message in (
        (["--demo", tmp_path], "give --run"),
        ([*gka, "--text", "a", "--text-file", empty], "either --text or --text-file"),
        ([*gka, "--text-file", empty], "the text is empty"),
        ([*gka, "--text-file", latin], "latin.txt is not UTF-8"),
        ([*gka, "--text", "kernel " * 200], "1 to 160 tokens"),
        ([*gka, "--text", "the kernel mixes", "--query", "cat"], '--query "cat"'),
        ([*gka, "--twin", runs["gka"], "--text", "the"], "is given twice"),
        ([*gka, "--twin", twin, "--text", "the"], f"{twin} has another tokenizer"),
        ([*gka, "--text", "the", "--layer", 5], "--layer is at most 4, got 5"),
    ):
        assert tiny.exit_code(main, DrawConfig, *flags) == 2
        error = capsys.readouterr().err
        assert message in error and error.startswith("error: ") and error.count("\n") == 1
