"""Exported models in Hugging Face's transformers: logits, generation, loss, saving, what is refused."""

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
from trainkit_gka.cli import UserError
from trainkit_gka.extras import MissingExtra

hf = importlib.import_module("nanochat_gka.hf")
transformers.utils.logging.disable_progress_bar()
load_model = transformers.AutoModelForCausalLM.from_pretrained

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
        run_folder = write_run(place / "run", model, tokenized / "tokenizer")
        export.main(export.ExportConfig(run=run_folder, out=place / "out"))
        return SimpleNamespace(folder=place / "out", ours=model, theirs=load_model(place / "out"))

    return lambda **fields: make(tuple(sorted(fields.items())))


@pytest.fixture(scope="module")
def encoder(models):
    return transformers.AutoTokenizer.from_pretrained(models(attention="gka").folder)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@torch.inference_mode()
def test_logits_and_text_are_ours_and_padded_rows_those_of_single_ones(variant, models, tokenizer, encoder):
    ours, model = models(**variant).ours, models(**variant).theirs
    ids = torch.randint(tokenizer.vocab_size, (2, 24))
    logits = ours(ids)
    assert torch.equal(model(ids).logits, logits) and torch.equal(model(ids, use_cache=False).logits, logits)
    assert torch.equal(model(ids, logits_to_keep=torch.tensor([3, 7])).logits, logits[:, [3, 7]])
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, logits[:, -2:], rtol=0, atol=1e-5)

    def generate(prompts, **way):
        batch = encoder(prompts, return_tensors="pt", padding=True)
        rows = model.generate(**batch, max_new_tokens=10, do_sample=False, **way)
        return encoder.batch_decode(rows[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)

    tokens = [piece.token for piece in Engine(ours, tokenizer).stream(["the row"], Sampling(1, 12, 0.0))]
    begin = encoder("the row", return_tensors="pt")["input_ids"]
    row = model.generate(begin, max_new_tokens=12, do_sample=False)[0, begin.shape[1] :]
    assert row[: len(tokens)].tolist() == tokens and len(tokens) > 1
    for way in WAYS:
        assert generate(PROMPTS, **way) == [generate([prompt], **way)[0] for prompt in PROMPTS]
    batch = encoder(PROMPTS, return_tensors="pt", padding=True)
    pad = batch["attention_mask"][0].argmax()
    short = model(batch["input_ids"][:1, pad:]).logits[0]
    torch.testing.assert_close(model(**batch).logits[0, pad:], short, rtol=0, atol=1e-5)
    assert pad > 0


def test_loss_and_gradients_are_ours(models, encoder):
    """Hugging Face shifts labels itself, ignores -100 and pads on either side; Trainer divides by its own count."""
    model = models(attention="GGGA")
    ours, theirs = copy.deepcopy(model.ours), copy.deepcopy(model.theirs).train()
    losses = {}
    for side in ("right", "left"):
        batch = encoder(PROMPTS[:2], return_tensors="pt", padding=True, padding_side=side)
        real = (batch["attention_mask"] == 1) & ((batch["input_ids"] != encoder.bos_token_id) | (side == "right"))
        labels = batch["input_ids"].masked_fill(~real, -100)
        losses[side] = theirs(**batch, labels=labels).loss
        if side == "right":
            ids, shifted = batch["input_ids"], torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
            counted = theirs(**batch, labels=labels, num_items_in_batch=100).loss
    wanted = ours(ids, shifted.masked_fill(shifted == -100, -1))
    assert torch.equal(losses["right"], wanted)
    torch.testing.assert_close(losses["left"], wanted)
    torch.testing.assert_close(counted, wanted * (shifted != -100).sum() / 100)
    losses["right"].backward()
    wanted.backward()
    for (name, weight), other in zip(ours.named_parameters(), theirs.gpt.parameters()):
        assert torch.equal(weight.grad, other.grad), name


REFUSED = [  # arguments of the model, given ids (1, 6), and the word of the error
    ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1]])}, "attention_mask .*pad on the left"),
    ({"attention_mask": torch.ones(2, 6)}, "attention_mask has 2 rows, input_ids 1"),
    ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}, "position_ids .*several documents"),
    ({"past_key_values": transformers.Cache(layers=[transformers.cache_utils.DynamicSlidingWindowLayer(8)])},
     "StaticCache .* got a cache with a DynamicSlidingWindowLayer"),
    ({"output_attentions": True}, r"output_attentions is not available: .*figures\.maps"),
    ({"input_ids": torch.zeros(1, 161, dtype=torch.long)}, "at most 160 tokens"),
    ({"input_ids": None}, "input_ids must be"),
]  # fmt: skip


def test_requests_that_the_model_cannot_answer_name_the_argument(models):
    model, ids = models(attention="gka").theirs, torch.zeros(1, 6, dtype=torch.long)
    right = {"attention_mask": (torch.arange(6) < 4)[None]}  # positions as generate() counts those of such a row
    padded = model(ids, **right, position_ids=torch.tensor([[0, 1, 2, 3, 1, 1]])).logits
    assert torch.equal(padded[:, :4], model(ids).logits[:, :4])
    small = transformers.StaticCache(config=model.config, max_cache_len=4)
    for arguments, message in [*REFUSED, ({"past_key_values": small}, "the cache holds 4 tokens a row, got 6")]:
        with pytest.raises(ValueError, match=message):
            model(**{"input_ids": ids, **arguments})
    for call, message in (
        (lambda: model.generate(ids, **right, max_new_tokens=3, eos_token_id=None), "padding_side='left'"),
        (lambda: model.resize_token_embeddings(400), "the vocabulary keeps its size"),
        (lambda: hf.GKAConfig(n_layer=2, attention="gka"), "attention, n_layer are settings of the model"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_saved_model_comes_back_whole_or_not_at_all(models, encoder, tmp_path):
    """And none from a pickle. transformers would report weights that are missing or not known, and go on."""
    model = copy.deepcopy(models(attention="gka", head_offsets="PNSS", value_embeds="every-second").theirs)
    with torch.no_grad():
        model.gpt.lm_head.weight.mul_(1.5)  # as if it had been trained further
    model.save_pretrained(tmp_path)
    encoder.save_pretrained(tmp_path)
    again, ids = load_model(tmp_path), torch.randint(70, (1, 20))
    assert torch.equal(again(ids).logits, model(ids).logits) and again.config.shape() == model.config.shape()
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)("a<|bos|>").input_ids == encoder("a<|bos|>").input_ids
    about = json.loads((tmp_path / "config.json").read_text())
    assert not {"sha256", "sigma", "checkpoint_sha256"} & set(about)  # they would be wrong
    with pytest.raises(UserError, match=r"was saved by transformers.*--hf-path of nanochat_gka.eval_core"):
        load(tmp_path)

    weights, name = model.state_dict(), "transformer.h.1.mlp.c_fc.weight"
    less = {key: value for key, value in weights.items() if key != f"gpt.{name}"}
    more = {**weights, "gpt.x": torch.zeros(1)}
    for changed, message in ((less, f"missing, first {name}"), (more, r"first gpt\.x")):
        model.save_pretrained(tmp_path, state_dict=changed)
        with pytest.raises(ValueError, match=message):
            load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**about, "model": {**about["model"], "rope_base": 100000}}))
    with pytest.raises(ValueError, match="settings that are not known here: rope_base"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(about))
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        load_model(tmp_path)


def test_the_cards_code_writes(models, capsys):
    card = (models(attention="gka", gka_values="unrotated", head_offsets="PS").folder / "README.md").read_text()
    for block in card.split("```python")[1:]:
        exec(compile(block.split("```")[0], "card", "exec"), {})
    assert "\nThe " in capsys.readouterr().out  # the engine prints a continuation, the pipeline the prompt too


def test_without_the_libraries_or_with_an_older_one_one_line_names_the_extra(monkeypatch, capsys):
    [oldest] = re.findall(r'"transformers>=([\d.]+)[,"]', (ROOT / "pyproject.toml").read_text())
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.57.1")
    monkeypatch.delitem(sys.modules, "nanochat_gka.hf")
    with pytest.raises(MissingExtra, match=f"transformers 4.57.1 is older than {oldest}"):
        importlib.import_module("nanochat_gka.hf")
    monkeypatch.setitem(sys.modules, "transformers", None)
    for needing in (lambda: importlib.import_module("nanochat_gka.hf"), lambda: load_hugging_face("gpt2", "cpu")):
        with pytest.raises(
            (MissingExtra, UserError), match=re.escape("transformers is not installed: run pip install")
        ):
            needing()
    monkeypatch.setitem(sys.modules, "lm_eval.api.registry", None)
    monkeypatch.delitem(sys.modules, "nanochat_gka.harness", raising=False)
    with pytest.raises(SystemExit):
        importlib.import_module("nanochat_gka.harness")
    assert 'lm_eval is not installed: run pip install "gka[lm-eval]"' in capsys.readouterr().err
