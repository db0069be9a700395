"""The live views in a real browser: rows of W against the operator, mouse, keyboard, speed."""

import base64
import dataclasses
import json
import math
import re

import numpy as np
import pytest
import torch

import tiny_vision
import tiny_vit
from browser import watched
from deit_gka.figures.subjects import Drawn, subjects_of
from gka import gaussian_weights
from nanochat_gka.figures.maps import extract
from runs.report import attention, build, live, page
from tiny_gpt import SHAPE, awake
from trainkit_gka.cli import UserError

DESK = {"width": 1200, "height": 900}
NUM_WORDS = 14
EPS = 1e-6  # what the operator adds to the sum of a row


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A page with images and a text, of models that nobody trained; the text's has head offsets and a window."""
    vit = tiny_vit.small(img_size=(24, 32), patch_size=8, depth=3, attention="GAG")
    images = {"one": tiny_vision.photo(1), "two": tiny_vision.photo(2)}
    image = live.image_view(subjects_of(Drawn("vit", "vit, not trained", vit, dict(crop_pct=1.0)), images))
    gpt = awake(dataclasses.replace(SHAPE, attention="GGA", head_offsets="PNSP", gka_values="normalised", n_layer=3))
    ids, words = torch.arange(NUM_WORDS) % 5, [f" w{token}" for token in range(NUM_WORDS)]
    text = live.text_view("gpt", "gpt, not trained", words, extract(gpt, ids))
    path = tmp_path_factory.mktemp("small") / "page.html"
    path.write_text(page.render([build.live([image, text], "")], "", ""))
    return path


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A page with the live view of DeiT-Ti alone, which nobody trained, and its subject."""
    folder = tmp_path_factory.mktemp("large")
    tiny_vision.photo(1, size=(280, 224)).save(folder / "stripes.png")
    [subject], _ = attention.subjects([], [folder / "stripes.png"])
    path = folder / "page.html"
    path.write_text(page.render([build.live([live.image_view([subject])], build.RANDOM)], "", ""))
    return path, subject


@pytest.fixture
def opened(browser, small):
    """The page on a desk; what went wrong on it must be nothing in the end."""
    with watched(browser, viewport=DESK) as (tab, problems, requests):
        tab.goto(small.as_uri())
        yield tab
        assert not problems and requests == [small.as_uri()]


def stored(path, name):
    """The data of a live view, and its features as the page has them, (layers, N, H, D) in float64."""
    start = f'data-view="{name}".*?<script type="application/json">'
    found = re.search(start + "(.*?)</script>", path.read_text(), re.DOTALL)
    data = json.loads(found[1])
    halves = np.frombuffer(base64.b64decode(data["items"][0]["features"]), "<f2")
    shape = (len(data["layers"]), data["tokens"], data["heads"], data["dim"])
    return data, torch.from_numpy(halves.astype(np.float64)).view(shape)


def operator(data, features, layer, factor=1.0, eps=0.0):
    """W of a layer by the operator in float64, (H, N, N)."""
    about = data["layers"][layer]
    x, slots = features[layer], torch.arange(data["tokens"])
    keys = [x[(slots - offset).clamp(min=0), head] for head, offset in enumerate(about["keyOffsets"])]
    log_sigma = torch.tensor(about["sigma"], dtype=torch.float64).log() + math.log(factor)
    keys = torch.stack(keys, 1)[None] if any(about["keyOffsets"]) else None
    return gaussian_weights(x[None], log_sigma, keys=keys, causal=about["causal"], window=about["window"], eps=eps)[0]


def rows_of(tab, name, layer, factor=1.0):
    """W of a layer as the page computes it, (H, N, N)."""
    code = """([name, layer, factor]) => {
        const { view, decoded } = liveViews[name];
        const features = (decoded[0] ??= decodeHalves(view.items[0].features));
        const tokens = [...Array(view.tokens).keys()];
        return view.layers[layer].sigma.map((sigma, head) =>
            tokens.map((query) => [...kernelRow(view, features, layer, head, query, sigma * factor)]));
    }"""
    return torch.tensor(tab.evaluate(code, [name, layer, factor]), dtype=torch.float64)


def rounding(data, features, layer, factor):
    """How far two float64 computations of a row may be apart, relatively: sums of D squares and N kernels."""
    sigma = min(data["layers"][layer]["sigma"]) * factor
    squared = torch.cdist(*[features[layer].transpose(0, 1)] * 2).square().amax()
    return 4 * torch.finfo(torch.float64).eps * (data["tokens"] + (data["dim"] + 8) * (1 + float(squared) / sigma**2))


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, 0.25, 8.0])
def test_rows_in_the_page_are_the_operators(opened, small, factor):
    """The text has head offsets and a window; all rows of all heads are compared."""
    for name in ("image", "text-gpt"):
        data, features = stored(small, name)
        for layer in range(len(data["layers"])):
            ours, reference = rows_of(opened, name, layer, factor), operator(data, features, layer, factor)
            budget = rounding(data, features, layer, factor)
            assert budget < 1e-9 and ((ours - reference).abs() <= budget * reference).all()
            as_trained = operator(data, features, layer, factor, EPS)
            assert ((ours - as_trained).abs() <= (EPS + budget) * reference).all()
            assert torch.equal(ours == 0, reference == 0) or factor < 1
    layers = data["layers"]
    assert any(any(layer["keyOffsets"]) for layer in layers) and any(any(layer["valueOffsets"]) for layer in layers)
    assert any(layer["window"] < data["tokens"] - 1 for layer in layers) and all(layer["causal"] for layer in layers)


def test_half_precision_changes_rows_by_no_more_than_its_bound(large):
    path, subject = large
    data, features = stored(path, "image")
    for number in (0, 5, 11):
        layer = subject.layers[number]
        exact, sigma = layer.features.double(), layer.sigma.double()
        rounded, full = operator(data, features, number), layer_weights(exact, sigma)
        for head in range(data["heads"]):
            bound = live.row_bound(exact[:, head], exact[:, head], sigma[head])
            assert 0 < bound.max() < 0.05
            assert ((rounded[head] - full[head]).abs() <= bound * full[head] + 1e-15).all()
            assert (rounded[head] - full[head]).abs().max() > 0


def layer_weights(features, sigma):
    return gaussian_weights(features[None], sigma.log(), eps=0.0)[0]


def test_features_beyond_half_precision_are_refused():
    with pytest.raises(UserError, match="beyond half precision"):
        live.halves([torch.full((2, 1, 2), 7e4)])


@pytest.mark.slow
def test_clicking_a_patch_and_dragging_sigma_show_the_row_of_that_patch_and_sigma(opened, small):
    data, features = stored(small, "image")
    view = opened.locator("[data-view=image]")
    before = view.locator("dl").inner_text()
    box = view.locator("canvas").bounding_box()
    place = (1, 0)  # row and column of the patch
    x, y = ((place[1] + 0.5) / data["columns"] * box["width"], (place[0] + 0.5) / data["rows"] * box["height"])
    view.locator("canvas").click(position={"x": x, "y": y})
    assert f"patch in row {place[0] + 1}, column {place[1] + 1}" in view.locator("dl").inner_text() != before
    view.get_by_label("Head").select_option("head 2")
    slider = view.locator("input[type=range]").bounding_box()
    opened.mouse.move(slider["x"] + slider["width"] / 2, slider["y"] + slider["height"] / 2)
    opened.mouse.down()
    opened.mouse.move(slider["x"] + 0.8 * slider["width"], slider["y"] + slider["height"] / 2, steps=4)
    opened.mouse.up()
    assert "the model's: " in view.locator("[data-control=sigma]").inner_text()
    code = "(({ row, sigma, learned }) => ({ row: [...row], sigma, learned }))(liveViews.image.current())"
    shown = opened.evaluate(code)
    factor = shown["sigma"] / shown["learned"]
    assert 2 < factor < 8
    query = data["prefix"] + place[0] * data["columns"] + place[1]
    reference = operator(data, features, 0, factor)[1, query]
    assert (torch.tensor(shown["row"], dtype=torch.float64) - reference).abs().max() < 1e-9
    numbers = dict(zip(*(view.locator(tag).all_inner_texts() for tag in ("dt", "dd"))))
    effective = float(torch.special.entr(reference).sum().exp())
    assert numbers["weight of itself"] == f"{float(reference[query]):#.3g}"
    assert numbers["effective tokens"] == f"{effective:#.3g} of {data['tokens']}"
    view.get_by_role("button", name="σ of the model").click()
    assert "(the model's)" in view.locator("[data-control=sigma]").inner_text()


@pytest.mark.slow
def test_the_mean_distance_is_that_of_the_figures(opened, small):
    """In pixels among the patches, as the figures' mean attended distance."""
    data, features = stored(small, "image")
    patches = operator(data, features, 0)[0][1:, 1:]
    grid = torch.cartesian_prod(torch.arange(data["rows"]), torch.arange(data["columns"])) * torch.tensor(data["patch"])
    distances = torch.cdist(grid.double(), grid.double())
    expected = ((patches * distances).sum(-1) / patches.sum(-1)).tolist()
    code = """() => {
        const { view } = liveViews.image;
        const features = decodeHalves(view.items[0].features);
        return Array.from({ length: view.tokens - 1 }, (_, patch) =>
            patchDistance(view, kernelRow(view, features, 0, 0, patch + 1, view.layers[0].sigma[0]), patch + 1));
    }"""
    assert opened.evaluate(code) == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_the_keyboard_moves_patch_and_token(opened):
    opened.focus("canvas")
    for key in ("ArrowUp", "ArrowUp", "ArrowLeft", "ArrowLeft"):
        opened.keyboard.press(key)
    assert "row 1, column 1" in opened.inner_text("[data-view=image] dl")
    text = opened.locator("[data-view^=text]")
    text.locator("span[tabindex='0']").focus()
    opened.keyboard.press("Home")
    opened.keyboard.press("ArrowRight")
    assert "token 2 of" in text.locator("dl").inner_text()


@pytest.mark.slow
def test_pointing_at_a_token_colours_what_it_reads(opened, small):
    """Values that come late are read from tokens before."""
    name, tokens, said = "text-gpt", 1, "values come a token late"
    data, features = stored(small, name)
    view = opened.locator(f"[data-view={name}]")
    layer = next(place for place, layer in enumerate(data["layers"]) if tokens in layer["valueOffsets"])
    head, query = data["layers"][layer]["valueOffsets"].index(tokens), data["tokens"] - 3
    view.get_by_label("Layer").select_option(str(layer))
    view.get_by_label("Head").select_option(str(head))
    view.locator("[data-control=text] span").nth(query).hover()
    row = operator(data, features, layer)[head, query]
    read = torch.cat([row[: tokens + 1].sum()[None], row[tokens + 1 :], torch.zeros(tokens)])
    spans = view.locator("[data-control=text] span")
    weights = spans.evaluate_all("all => all.map((span) => span.style.getPropertyValue('--weight'))")
    assert weights == [f"{round(100 * float(weight / read.max()))}%" for weight in read]
    later = view.locator("[data-control=text] span.later").count()
    told = view.locator("dl").inner_text()
    assert later == 2 and f"token {query + 1} of {data['tokens']}" in told and said in told
