"""Figures of language models: the command's files and mistakes, W of every kind and its check, numbers read off it."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from PIL import Image

import tiny
from gka import gaussian_weights
from nanochat_gka.draw import DrawConfig, main
from nanochat_gka.figures.families import FAMILIES
from nanochat_gka.figures.heads import MEASURES
from nanochat_gka.figures.maps import extract
from nanochat_gka.figures.rows import choose
from nanochat_gka.figures.subjects import TextSubject, read_history, subjects_of
from nanochat_gka.model.checkpoints import export, load
from tiny_gpt import SHAPE, VARIANTS, awake, write_run

TEXT = "the kernel mixes $5 and $6"
FORMS = {
    "gka": dict(attention="gka"),
    "softmax": dict(attention="softmax"),
    "offsets": dict(attention="GA", head_offsets="PSN", gka_values="unrotated", n_layer=3, channel_bandwidths=True),
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
    FAMILIES["sigma"](subjects_of([runs["gka"], runs["offsets"], seed], "the kernel"), tmp_path)
    panels = [axis for axis in figures["sigma.png"].axes if axis.get_visible()]
    head = panels[1].lines[0]
    assert head.get_xdata().tolist() == [0, 0.01, 0.02] and head.get_ydata().tolist() == [5, 8, 11]  # of two seeds
    assert {5, 7, 9, 13} <= set(panels[1].collections[0].get_paths()[0].vertices[:, 1])  # their band


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


def test_mistakes_are_one_line(runs, tmp_path, tokenized):
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
        assert message in tiny.refused(main, DrawConfig, *flags)


# The numbers in the figures


TOKENS = 21  # more than both windows of SHAPE, 8 and 16
IDS = torch.arange(TOKENS) * 7 % SHAPE.vocab_size


def tiny_model(**form):
    model = awake(dataclasses.replace(SHAPE, **form))
    with torch.no_grad():
        for layer in model.attentions:
            if layer.kind.has_bandwidth:
                layer.log_sigma += torch.linspace(-1, 0.5, len(layer.log_sigma))
    return model


def later(tensor, delays):
    """Of (T, H, ...): the entries of every head so many tokens later."""
    tokens = (torch.arange(TOKENS)[:, None] - delays).clamp(min=0)
    return tensor[tokens, torch.arange(len(delays))]


@pytest.mark.parametrize("form", VARIANTS, ids=str)
def test_weights_follow_from_the_equations(form):
    """GKA's from features, bandwidths, window and offsets alone. Those of other kinds give the output (`error`)."""
    model = tiny_model(**form)
    i, j = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)
    for number, layer in enumerate(layers := extract(model, IDS)):
        assert layer.error < 1e-5 and layer.kind == model.config.layer_attention(number)
        assert layer.window == (16 if number in (1, 3) or number == len(layers) - 1 else 8)
        assert not layer.weights[:, ~((j <= i) & (j >= i - layer.window))].any()
        torch.testing.assert_close(layer.weights.sum(-1), torch.ones(4, TOKENS))
        one_hot = torch.eye(TOKENS)[:, None].expand(TOKENS, 4, TOKENS)  # the token of every slot's value
        reads = torch.einsum("hij,jht->hit", layer.weights, later(one_hot, layer.value_offsets))
        torch.testing.assert_close(layer.reads, reads)
        if layer.kind == "gka":
            sigma, keys = layer.sigma.log(), later(layer.features, layer.key_offsets)[None]
            [expected] = gaussian_weights(layer.features[None], sigma, keys=keys, causal=True, window=layer.window)
            torch.testing.assert_close(layer.weights, expected, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(layer.sigma, model.attentions[number].log_sigma.exp().detach())
            assert layer.initial_sigma == pytest.approx(2.0 if model.config.head_offsets else 4.0)
        else:
            assert layer.sigma is layer.features is layer.initial_sigma is None


def test_the_default_projection_of_untrained_models_proves_the_weights_too():
    """W_O starts at 0: the mixed heads are compared, before it."""
    model = tiny_model(attention="GA")
    for layer in model.attentions:
        torch.nn.init.zeros_(layer.c_proj.weight)
    assert all(0 < layer.error < 1e-5 for layer in extract(model, IDS))
    model.attentions[1].attend = lambda rotary, queries, stored: torch.zeros_like(queries)
    with tiny.one_line_error("layer 2 does not give the model's output"):
        extract(model, IDS)


WEIGHTS = torch.tensor([[1, 0, 0], [0.25, 0.75, 0], [0.2, 0.3, 0.5]])
BY_HAND = {
    "effective tokens": (0.25**-0.25 * 0.75**-0.75 + 0.2**-0.2 * 0.3**-0.3 * 0.5**-0.5) / 2,
    "weight of itself": (0.75 + 0.5) / 2,
    "weight of the token before": (0.25 + 0.3) / 2,
    "weight of the first token": (0.25 + 0.2) / 2,
    "mean distance (tokens)": (0.25 + 2 * 0.2 + 0.3) / 2,
}


def test_measures_against_values_by_hand():
    measured = {name: measure(WEIGHTS.expand(2, 4, 3, 3)) for name, measure in MEASURES.items()}
    torch.testing.assert_close(measured, {name: torch.full((2, 4), value) for name, value in BY_HAND.items()})


def test_bandwidths_are_compared_with_the_features_distances():
    model = tiny_model(attention="GA")
    subject = TextSubject("tiny", "tiny", model.config, "", [""] * TOKENS, extract(model, IDS), {})
    medians, sigmas = subject.median_distances, subject.sigmas
    assert np.isnan(medians[[1, 3]]).all() and np.isnan(sigmas[[1, 3]]).all()
    features = subject.layers[2].features[:, 1]
    pairs = [float((features[i] - features[j]).norm()) for i in range(TOKENS) for j in range(i)]
    assert medians[2, 1] == pytest.approx(sorted(pairs)[104])  # of 210, torch takes the lower one in the middle
    np.testing.assert_allclose(sigmas[2], subject.layers[2].sigma)


def test_queries_are_chosen_among_repeated_words():
    words = ["<|bos|>", "the", " list", " of", " the", " list", ",", " of", "."]
    assert choose(words) == [4, 5, 7] and choose(list("abcdef")) == [2, 3, 5] and choose(["a"]) == [0]
