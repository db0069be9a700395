"""Approximations of GKA: exact where they must be, blind to the future, and counted where they go wrong."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from figure_runs import vision_run
from gka import gaussian_attention, testing
from nanochat_gka.model.attention import GKAAttention
from runs.neighbours.approximations import __main__ as command
from runs.neighbours.approximations import measure, picture, sources
from runs.neighbours.approximations.case import Case, random_case
from runs.neighbours.approximations.forms import FORMS, Sums, directions, kernel, nearest_keys
from runs.neighbours.approximations.layer import Approximation
from runs.neighbours.approximations.measure import Truth
from runs.tables import approximations as tables
from shown import shown
from tiny_gpt import SHAPE, awake, write_run
from trainkit_gka.cli import UserError

N, D = 1100, 4  # five blocks, the last one not full
MADE_OF_FEATURES = [name for name, form in FORMS.items() if form.features]
MASKS = pytest.mark.parametrize("causal", [False, True])


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def small_case(causal, tokens=N, foreign=True):
    """Foreign keys and values, two heads, a narrow and a broad one; the bank is another draw."""
    x, keys, values = (normal(2, tokens, D, seed=seed) for seed in range(3))
    keys, values = (keys, values) if foreign else (x, x)
    return Case(x, keys, values, torch.tensor([1.0, 2.5]), causal, normal(2, 300, D, seed=3))


@MASKS
@pytest.mark.parametrize("foreign", [False, True])
def test_the_oracle_and_the_fused_operator_agree(causal, foreign):
    truth = Truth(small_case(causal, 70, foreign), most=9)
    assert truth.places[-1] == 69 and len(truth.places) == 9
    assert truth.errors(truth.case.fused())["worst_head"] < 1e-5


@MASKS
@pytest.mark.parametrize("name", ["Nyström, uniform", "clusters", "nearest keys", "window + clusters"])
def test_as_many_landmarks_or_keys_as_tokens_are_exact(name, causal):
    case = small_case(causal, 600)
    case = replace(case, bank=case.keys)
    y = FORMS[name](case, 600, 0).output
    rows = torch.arange(0, 600, 12)
    assert testing.error(FORMS["nearest keys"](case, 9, 0, rows).output, nearest_keys(case, 9).output[:, rows]) < 1e-12
    tolerance = 1e-3 if "Nyström" in name else 1e-9  # of its ridge
    assert testing.error(y, case.oracle(torch.arange(600))) < tolerance


@MASKS
@pytest.mark.parametrize("name", MADE_OF_FEATURES)
def test_sums_by_blocks_are_those_of_the_whole_matrix(name, causal):
    case, form = small_case(causal), FORMS[name]
    features = form.features(case, 16, 0)
    weights = features.of_queries(case.queries) @ features.through_middle(features.of_keys(case.keys).mT)
    if form.near:
        block = torch.arange(N) // 256
        near = (block[:, None] - block).abs() <= 1
        weights = torch.where(near, kernel(case.queries, case.keys, case.sigma), weights)
    weights = weights.tril() if causal else weights
    sums = form(case, 16, 0)
    assert testing.error(sums.weighted, weights @ case.values) < 1e-9
    assert testing.error(sums.rows, weights.sum(-1)) < 1e-9


@pytest.mark.parametrize("name", ["positive", "positive, orthogonal", "trigonometric", "trigonometric, orthogonal"])
def test_random_features_are_unbiased(name):
    """The mean of many estimates of K, each up to a factor of the row and one of all keys, is K."""
    case = replace(small_case(False, 12), sigma=torch.tensor([2.0, 3.0]))
    exact, size = kernel(case.queries, case.keys, case.sigma), 2**16
    features = FORMS[name].features(case, size, 0)
    estimate = features.of_queries(case.queries) @ features.of_keys(case.keys).mT
    assert testing.error(estimate / estimate.sum(-1, keepdim=True), exact / exact.sum(-1, keepdim=True)) < 0.03
    few, many = (Truth(case).judge(FORMS[name](case, n, 0))["error"] for n in (64, size))
    assert many < few / 5


def test_orthogonal_directions_are_orthogonal_and_as_long_as_others():
    case = replace(random_case(8, False, 0), queries=torch.empty(3, 8, 64, dtype=torch.float64))
    w = directions(case, 256, 0, orthogonal=True)  # (3, 64, 256)
    products = w[..., :64].mT @ w[..., :64]
    assert (products - torch.diag_embed(products.diagonal(dim1=1, dim2=2))).abs().max() < 1e-9
    assert w.square().sum(1).mean() == pytest.approx(64, rel=0.05)  # the mean of chi^2 with 64 degrees
    other = directions(case, 256, 1, orthogonal=True)
    assert not torch.allclose(w, other)


@pytest.mark.parametrize("name", FORMS)
def test_causal_forms_do_not_see_the_future(name):
    """Bit by bit: what comes later must not even change the rounding."""
    case, cut = small_case(True, 600, foreign=False), 300
    x = case.keys.clone()
    x[:, cut:] = 3 * normal(2, 600 - cut, D, seed=9)
    other = replace(case, queries=x, keys=x, values=x)
    before, after = (FORMS[name](each, 16, 0).output for each in (case, other))
    assert torch.equal(before[:, :cut], after[:, :cut])
    assert not torch.allclose(before[:, cut:], after[:, cut:])


def test_negative_and_undefined_rows_are_counted():
    sums = Sums(torch.ones(1, 4, 2), torch.tensor([[1.0, -2.0, 0.0, float("nan")]]))
    assert sums.negative_rows == 1 and sums.undefined_rows == 2
    narrow = replace(random_case(64, False, 0), sigma=torch.full((3,), 2.0))
    judged = {name: Truth(narrow).judge(FORMS[name](narrow, 8, 0)) for name in ("trigonometric", "positive")}
    assert judged["trigonometric"]["negative"] > 10 and judged["positive"]["negative"] == 0
    far = replace(narrow, sigma=torch.full((3,), 0.1))
    judged["far"] = Truth(far).judge(FORMS["clusters"](far, 8, 0))
    assert judged["far"]["undefined"] > 10 and 0.5 < judged["far"]["error"] <= 1.5


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tokenized):
    """Folders of a language run with offsets and of a vision run."""
    folder = tmp_path_factory.mktemp("runs")
    config = replace(SHAPE, vocab_size=300, attention="gka", head_offsets="PS", gka_values="normalised")
    write_run(folder / "language", awake(config), tokenized / "tokenizer")
    vision_run(folder / "vision", widen=0.5)
    return folder


def test_cases_of_runs_are_what_their_layers_mix(trained, monkeypatch):
    monkeypatch.setattr(sources, "read_texts", lambda: ["A class is a class, and a function is a function. " * 50])
    mixed, attend = [], GKAAttention.attend
    monkeypatch.setattr(GKAAttention, "attend", lambda *given: mixed.append(attend(*given)) or mixed[-1])
    case = sources.case_of(str(trained / "language"), 100)
    assert case.causal and case.queries.shape == case.bank.shape == (16, 100, 16)
    assert case.keys is not case.queries and case.values is not case.keys
    images = sources.case_of(str(trained / "vision"), 40)
    assert images.queries.shape == (4, 40, 8) and images.keys is images.queries and len(set(images.sigma.tolist())) > 1
    layers = 16 // mixed[0].shape[2]
    first = torch.cat([y[0, :4] for y in mixed[:layers]], dim=1).transpose(0, 1)  # of the first text; 4: in all windows
    assert testing.error(case.fused()[:, :4], first.double()) < 1e-5
    with pytest.raises(UserError, match="make demo trains models"):
        sources.case_of(str(trained), 40)


@pytest.mark.slow
def test_the_command_measures_once_and_its_rows_become_tables_and_a_picture(trained, tmp_path, capsys):
    file = tmp_path / "results.jsonl"
    chosen = ["clusters", "window", "mean", "trigonometric"]
    config = command.ApproximationsConfig(
        parts=["errors", "time"], run=[trained / "vision"], forms=chosen, lengths=[80], sizes=[8, 64, 256], seeds=2,
        rounds=1, warmup=0, results=file,
    )  # fmt: skip
    command.main(config)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 3 * (1 + 2 * 2 * 2 + 2) + 2 + 2 * 2 + 2
    assert all(row["commit"] and row["hardware"] and row["config"]["case"] for row in rows)
    command.main(config)
    assert len(file.read_text().splitlines()) == len(rows)
    command.main(replace(config, parts=["time"], sizes=[8, 16]))
    assert len(file.read_text().splitlines()) == len(rows) + 2 + 2  # exact attention again, in the same turns
    figure = picture.draw(file, tmp_path, tokens=80)
    assert figure.path.stat().st_size > 10_000 and {row["form"] for row in figure.rows} == {*chosen} - {"mean"}
    error = measure.errors(file).set_index(["source", "form", "size"]).error["vision", "clusters", 64]
    wanted = dict(part="error", source="vision", tokens=80, form="clusters", size=64)
    seeds = [row["metrics"]["error"] for row in rows if wanted.items() <= row["config"]["case"].items()]
    assert error == pytest.approx(sum(seeds) / 2) and len(seeds) == 2 and f"{error:.2g}" in shown(tables.errors(file))
    with pytest.raises(UserError, match="the forms are positive"):
        command.main(replace(config, forms=["none"]))


# An approximation in the place of a layer's operator


def layer_case(tokens, same=False):
    """Features of three sequences, which may be one, and bandwidths of two heads."""
    x = normal(3, tokens, 2, D, seed=1)
    return x[:1].repeat(3, 1, 1, 1) if same else x, torch.tensor([0.2, 0.5], dtype=torch.float64)


@MASKS
@pytest.mark.parametrize("landmarks", [0, 5])
def test_a_layer_whose_window_holds_all_is_exact(landmarks, causal):
    x, log_sigma = layer_case(21)
    y = Approximation(2, D, 21, landmarks).double()(x, x, x, log_sigma, causal)
    assert testing.error(y, gaussian_attention(x, log_sigma, causal=causal, eps=0.0)) < 1e-9


@MASKS
def test_a_layer_with_landmarks_at_all_tokens_is_exact_beyond_the_window(causal):
    x, log_sigma = layer_case(20, same=True)
    approximation, window = Approximation(2, D, 4, 20).double(), Approximation(2, D, 4, 0).double()
    approximation.landmarks.data = x[0].transpose(0, 1).clone()
    exact = gaussian_attention(x, log_sigma, causal=causal, eps=0.0)
    assert testing.error(approximation(x, x, x, log_sigma, causal), exact) < 1e-3  # of the ridge
    assert testing.error(window(x, x, x, log_sigma, causal), exact) > 0.03


def test_landmarks_of_a_layer_learn_and_tell_nothing_of_the_future():
    x, log_sigma = layer_case(24)
    approximation, changed = Approximation(2, D, 4, 8).double(), x.clone()
    changed[:, 20:] = normal(3, 4, 2, D, seed=2)
    y, later = (approximation(features, features, features, log_sigma, True) for features in (x, changed))
    assert torch.equal(y[:, :20], later[:, :20]) and not torch.allclose(y[:, 20:], later[:, 20:])
    y.square().sum().backward()
    assert approximation.landmarks.grad.abs().max() > 0


def test_the_example_of_the_page_runs(capsys):
    page = Path(command.__file__).with_name("README.md").read_text()
    torch.manual_seed(0)
    exec(compile(page.split("```python")[1].split("```")[0], "example", "exec"), {})
    off = int(capsys.readouterr().out.split("off by ")[1].split("%")[0])
    assert 0 < off < 10  # the window alone is off by 26
