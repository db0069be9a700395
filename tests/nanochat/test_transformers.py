"""Exported models in Hugging Face's transformers: logits, generation, loss, training, placement."""

import copy
import dataclasses
import importlib
import json
import re
import sys
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import transformers

from nanochat_gka import export
from nanochat_gka.core_metric.huggingface import load_hugging_face
from nanochat_gka.generation.engine import Engine
from nanochat_gka.generation.sampling import Sampling
from nanochat_gka.model.checkpoints import load
from sources import ROOT
from tiny_gpt import SHAPE, VARIANTS, awake, write_run
from trainkit_gka.cli import UserError, run
from trainkit_gka.extras import MissingExtra

hf = importlib.import_module("nanochat_gka.hf")
transformers.utils.logging.disable_progress_bar()

PROMPTS = ["the", "a kernel token row mixes every head learns", "past values come"]
WAYS = [{"num_beams": 3}, {"cache_implementation": "static"}, {"use_cache": False}]


@pytest.fixture(scope="module")
def models(tokenized, tokenizer, tmp_path_factory):
    """A function: some fields of a shape to the exported folder of such a model, ours, and what transformers loads."""
    root = tmp_path_factory.mktemp("exports")

    @cache
    def make(fields):
        model = awake(dataclasses.replace(SHAPE, vocab_size=tokenizer.vocab_size, **dict(fields))).eval()
        place = root / str(len(list(root.iterdir())))
        trained = write_run(place / "run", model, tokenized / "tokenizer")
        run(export.main, export.ExportConfig, ["--run", str(trained), "--out", str(place / "out")])
        theirs = transformers.AutoModelForCausalLM.from_pretrained(place / "out")
        return SimpleNamespace(folder=place / "out", ours=model, theirs=theirs)

    return lambda **fields: make(tuple(sorted(fields.items())))


@pytest.fixture(scope="module")
def encoder(models):
    return transformers.AutoTokenizer.from_pretrained(models(attention="gka").folder)


def generate(model, batch, **options):
    """The new tokens of every row."""
    with torch.inference_mode():
        rows = model.generate(**batch, **{"max_new_tokens": 10, "do_sample": False, **options})
    return rows[:, batch["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_logits_are_ours_to_the_bit(variant, models, tokenizer):
    model = models(**variant)
    assert isinstance(model.theirs, hf.GKAForCausalLM) and not model.theirs.training
    ids = torch.randint(tokenizer.vocab_size, (2, 24))
    with torch.inference_mode():
        wanted = model.ours(ids)
        for use_cache in (True, False):
            assert torch.equal(model.theirs(ids, use_cache=use_cache).logits, wanted)
        kept = model.theirs(ids, logits_to_keep=2).logits
        torch.testing.assert_close(kept, wanted[:, -2:], rtol=0, atol=1e-5)
        chosen = model.theirs(ids, logits_to_keep=torch.tensor([3, 7])).logits
    assert kept.shape[1] == 2 and torch.equal(chosen, wanted[:, [3, 7]])


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_greedy_text_is_the_engines_and_padded_rows_continue_as_single_ones(variant, models, tokenizer, encoder):
    ours, model = models(**variant).ours, models(**variant).theirs
    wanted = [piece.token for piece in Engine(ours, tokenizer).stream(["the row"], Sampling(1, 12, 0.0))]
    written = generate(model, encoder("the row", return_tensors="pt"), max_new_tokens=12)
    assert written[0][: len(wanted)] == wanted and len(wanted) > 1
    batch = encoder(PROMPTS, return_tensors="pt", padding=True)
    assert (batch["attention_mask"] == 0).any()
    for way in WAYS:
        together = generate(model, batch, **way)
        for row, prompt in zip(together, PROMPTS):
            [alone] = generate(model, encoder(prompt, return_tensors="pt"), **way)
            assert encoder.decode(row, skip_special_tokens=True) == encoder.decode(alone, skip_special_tokens=True)
    short = batch["attention_mask"][0].argmax()
    with torch.inference_mode():
        padded = model(**batch).logits[0, short:]
        torch.testing.assert_close(padded, model(batch["input_ids"][:1, short:]).logits[0], rtol=0, atol=1e-5)


def test_loss_and_gradients_are_ours(models, encoder):
    """Hugging Face shifts labels itself, ignores -100 and pads on either side; Trainer divides by its own count."""
    model = models(attention="GGGA")
    ours, theirs = copy.deepcopy(model.ours), copy.deepcopy(model.theirs).train()
    batch = encoder(PROMPTS[:2], return_tensors="pt", padding=True, padding_side="right")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    loss = theirs(**batch, labels=labels).loss
    wanted = ours(batch["input_ids"], shifted.masked_fill(shifted == -100, -1))
    assert torch.equal(loss, wanted)
    loss.backward()
    wanted.backward()
    for (name, weight), other in zip(ours.named_parameters(), theirs.gpt.parameters()):
        assert torch.equal(weight.grad, other.grad), name
    counted = theirs(**batch, labels=labels, num_items_in_batch=100).loss
    torch.testing.assert_close(counted, loss * (shifted != -100).sum() / 100)
    left = encoder(PROMPTS[:2], return_tensors="pt", padding=True)
    unpredicted = (left["attention_mask"] == 0) | (left["input_ids"] == encoder.bos_token_id)
    labels = left["input_ids"].masked_fill(unpredicted, -100)
    torch.testing.assert_close(theirs(**left, labels=labels).loss, loss)


def test_what_the_model_cannot_do_is_said(models):
    model, ids = models(attention="gka").theirs, torch.zeros(1, 6, dtype=torch.long)
    counted = torch.tensor([[0, 1, 2, 3, 1, 1]])  # as generate() counts a row that is padded on the right
    right = model(ids, attention_mask=(torch.arange(6) < 4)[None], position_ids=counted).logits
    assert torch.equal(right[:, :4], model(ids).logits[:, :4])
    sliding_layer = transformers.cache_utils.DynamicSlidingWindowLayer
    hole = torch.tensor([[1, 1, 0, 1, 1, 1]])
    small = transformers.StaticCache(config=model.config, max_cache_len=4)
    sliding = transformers.Cache(layers=[sliding_layer(8) for _ in range(4)])
    mistakes = [
        ({"attention_mask": hole}, "must not hide tokens between others: pad on the left"),
        ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}, "several documents are not supported"),
        ({"past_key_values": small}, "the cache holds 4 tokens a row, got 6"),
        ({"past_key_values": sliding}, "StaticCache .* got a cache with a DynamicSlidingWindowLayer"),
        ({"output_attentions": True}, r"output_attentions is not available: .*figures\.maps computes them"),
        ({"input_ids": torch.zeros(1, 161, dtype=torch.long)}, "at most 160 tokens"),
    ]
    for arguments, message in mistakes:
        with pytest.raises(ValueError, match=message):
            model(**{"input_ids": ids, **arguments})
    with pytest.raises(ValueError, match=r"pad on the left \(padding_side='left'\)"):
        model.generate(ids, attention_mask=(torch.arange(6) < 4)[None], max_new_tokens=3, eos_token_id=None)
    with pytest.raises(ValueError, match="the vocabulary keeps its size"):
        model.resize_token_embeddings(400)


def test_saved_model_comes_back_and_claims_nothing_false(models, encoder, tmp_path):
    model = copy.deepcopy(models(attention="gka", head_offsets="PNSS", value_embeds="all").theirs)
    with torch.no_grad():
        model.gpt.lm_head.weight.mul_(1.5)  # as if it had been trained further
    model.save_pretrained(tmp_path)
    encoder.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.randint(70, (1, 20))
    assert torch.equal(again(ids).logits, model(ids).logits) and again.config.shape() == model.config.shape()
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)("a<|bos|>").input_ids == encoder("a<|bos|>").input_ids
    assert not {"sha256", "sigma", "checkpoint_sha256"} & set(json.loads((tmp_path / "config.json").read_text()))
    with pytest.raises(UserError, match=r"was saved by transformers.*--hf-path of nanochat_gka.eval_core score it"):
        load(tmp_path)


def test_only_whole_models_of_known_parts_are_loaded(models, tmp_path):
    """And none from a pickle. transformers would report what is missing or not known, and go on."""
    model = models(attention="gka").theirs
    weights, name = model.state_dict(), "transformer.h.1.mlp.c_fc.weight"
    less = {key: value for key, value in weights.items() if key != f"gpt.{name}"}
    load_model = transformers.AutoModelForCausalLM.from_pretrained

    model.config.save_pretrained(tmp_path)
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        load_model(tmp_path)
    more = {**weights, "gpt.x": torch.zeros(1)}
    for changed, message in ((less, f"missing, first {name}"), (more, r"first gpt\.x")):
        model.save_pretrained(tmp_path, state_dict=changed)
        with pytest.raises(ValueError, match=message):
            load_model(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**about, "model": {**about["model"], "rope_base": 100000}}))
    with pytest.raises(ValueError, match="settings that are not known here: rope_base"):
        load_model(tmp_path)
    with pytest.raises(ValueError, match=r"attention, n_layer are settings of the model: give them in model="):
        hf.GKAConfig(n_layer=2, attention="gka")


def test_pipeline_and_the_cards_code_write(models, tokenizer, capsys):
    model = models(attention="gka", gka_values="normalised", head_offsets="PS")
    pipeline = transformers.pipeline("text-generation", model=str(model.folder))
    texts = pipeline(PROMPTS, max_new_tokens=8, do_sample=False, batch_size=3, return_full_text=False)
    wanted = Engine(model.ours, tokenizer).complete(PROMPTS, Sampling(max_tokens=8, temperature=0))
    assert [text["generated_text"] for [text] in texts] == [text for [text] in wanted]
    card = (model.folder / "README.md").read_text()
    for block in card.split("```python")[1:]:
        exec(compile(block.split("```")[0], "card", "exec"), {})
    assert "\nThe " in capsys.readouterr().out  # the engine prints a continuation, the pipeline the prompt too


def test_without_the_libraries_or_with_an_older_one_one_line_names_the_extra(monkeypatch, capsys):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.57.1")
    monkeypatch.delitem(sys.modules, "nanochat_gka.hf")
    [oldest] = re.findall(r'"transformers>=([\d.]+)[,"]', (ROOT / "pyproject.toml").read_text())
    with pytest.raises(MissingExtra, match=f"transformers 4.57.1 is older than {oldest}"):
        importlib.import_module("nanochat_gka.hf")
    monkeypatch.setitem(sys.modules, "transformers", None)
    missing = re.escape('transformers is not installed: run pip install "gka[hf]"')
    with pytest.raises(MissingExtra, match=missing):
        importlib.import_module("nanochat_gka.hf")
    with pytest.raises(UserError, match=missing):
        load_hugging_face("gpt2", torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "lm_eval.api.registry", None)
    monkeypatch.delitem(sys.modules, "nanochat_gka.harness", raising=False)
    with pytest.raises(SystemExit):
        importlib.import_module("nanochat_gka.harness")
    assert 'lm_eval is not installed: run pip install "gka[lm-eval]"' in capsys.readouterr().err
