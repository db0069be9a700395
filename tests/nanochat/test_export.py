"""Models that leave as folders: export, card, loading back, damage, the commands that load a model, and ONNX."""

import dataclasses
import importlib.util
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import tiny
from nanochat_gka import evaluate, export
from nanochat_gka.data.tokenizer import EXPORTED_NAME, Tokenizer
from nanochat_gka.generation.engine import Engine
from nanochat_gka.generation.sampling import SAMPLE_PROMPTS, Sampling
from nanochat_gka.hf import GKAForCausalLM
from nanochat_gka.model import checkpoints
from nanochat_gka.model import onnx as language
from nanochat_gka.model.checkpoints import load
from tiny_gpt import SHAPE, awake, write_run
from trainkit_gka import onnx
from trainkit_gka.cli import UserError, run


def exported(trained, out, *more):
    run(export.main, export.ExportConfig, ["--run", str(trained[0]), "--out", str(out), *more])
    return out


def test_a_checkpoint_that_a_training_deletes_while_it_is_loaded(trained, tmp_path, monkeypatch):
    """The newest one takes its place."""
    (old,) = (shutil.copytree(trained[0], tmp_path / "run") / "checkpoints").iterdir()
    tokenizer = checkpoints._tokenizer

    def delete(folder, model):
        monkeypatch.undo()
        shutil.copytree(old, old.with_name("step_00000008"))
        shutil.rmtree(old)
        return tokenizer(folder, model)

    monkeypatch.setattr(checkpoints, "_tokenizer", delete)
    assert load(tmp_path / "run").step == 8


def test_an_exported_folder_holds_and_describes_the_model(trained, packed, tokenizer, tmp_path, capsys):
    out, ids = exported(trained, tmp_path / "out"), torch.randint(70, (2, 16))
    for loaded in (load(out), load(trained[0])):
        assert torch.equal(loaded.model(ids), trained[1](ids)) and not loaded.model.training
        assert loaded.model.config == trained[1].config and loaded.tokenizer.sha256 == tokenizer.sha256
    ours = {"model.safetensors", "config.json", "checksums.json", "gka_tokenizer.json", "README.md"}
    theirs = {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert {path.name for path in out.iterdir()} == ours | theirs
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1
    about = json.loads((out / "config.json").read_text())
    assert about["attention"] == ["gka", "gka", "softmax"] and set(about["sigma"]) == {"0", "1"}
    torch.testing.assert_close(torch.tensor(about["sigma"]["1"]), trained[1].bandwidths()[1])
    assert (about["step"], about["training"]["tokens"], about["training"]["commit"]) == (7, 7000, "abc1234")
    assert about["parameters"] == sum(t.numel() for t in load_file(out / "model.safetensors").values())
    card = (out / "README.md").read_text()
    assert all(fact in card for fact in ("not the paper's form", "head offsets PS", "7,000 (7 of 7 steps)", "abc1234"))
    for name in ("model.onnx", "notes.txt"):
        (out / name).write_text("of an earlier day")
    assert exported(trained, out) == out  # again, the same model
    assert not (out / "model.onnx").exists() and (out / "notes.txt").exists()
    other = awake(dataclasses.replace(SHAPE, vocab_size=tokenizer.vocab_size))
    with pytest.raises(SystemExit):  # does not replace another model
        exported((write_run(tmp_path / "other", other, packed / "tokenizer"), other), out)
    assert "holds another model" in capsys.readouterr().err and load(out).name == "tiny-run"
    (out / "checksums.json").unlink()  # as in exports of before it was written
    assert load(out).name == "tiny-run"


NOT_OURS = "not of a model that this project exported"
CONFIGS = {
    "name": ({"name": 1}, NOT_OURS),
    "no checksums": ({"sha256": {}}, NOT_OURS),
    "llama": ({"model_type": "llama"}, NOT_OURS),
    "vision": ({"architecture": "deit_tiny_gka_patch16_224"}, "is an exported vision model"),
    "later settings": ({"model": {"smear": True}}, "settings that are not known here: smear"),
    "flipped": (None, "model.safetensors is missing or damaged"),
    "another length": ({"model": {"sequence_len": 74}}, "config.json is missing or damaged"),
}


@pytest.mark.parametrize("changes, message", CONFIGS.values(), ids=CONFIGS)
def test_foreign_and_damaged_folders_are_refused(changes, message, trained, tmp_path):
    out = exported(trained, tmp_path / "out")
    if changes is None:
        content = (out / "model.safetensors").read_bytes()
        (out / "model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        config = json.loads((out / "config.json").read_text())
        changed = {**config, **changes, "model": config["model"] | changes.get("model", {})}
        (out / "config.json").write_text(json.dumps(changed))
        if "damaged" not in message:
            (out / "checksums.json").unlink()
    with tiny.one_line_error(message):
        load(out)
    if changes is None or "sequence_len" in changes.get("model", {}):
        with tiny.one_line_error(message):
            GKAForCausalLM.from_pretrained(out)


def test_another_models_tokenizer_is_refused(trained, tokenizer, tmp_path):
    out = exported(trained, tmp_path / "out")
    (out / "checksums.json").unlink()
    Tokenizer.train(tiny.documents(50, 9), 290).save(out, EXPORTED_NAME)
    with tiny.one_line_error(f"the model beside it {tokenizer.vocab_size}: it belongs to another model"):
        load(out)


def test_evaluate_asks_what_nanochat_asks(trained, tokenizer, tmp_path):
    def samples(*more):
        flags = ["--run", trained[0], "--eval", "sample", "--results", tmp_path / "bpb.jsonl", "--device-type", "cpu"]
        assert tiny.exit_code(evaluate.main, evaluate.EvaluateConfig, *flags, *more) == 0
        return json.loads((tmp_path / "bpb.jsonl").read_text().splitlines()[-1])["metrics"]

    metrics = samples()
    engine = Engine(trained[1], tokenizer)
    want = engine.complete(SAMPLE_PROMPTS, Sampling(max_tokens=16, temperature=0))
    assert list(metrics["samples"].items()) == list(zip(SAMPLE_PROMPTS, want)) and len(SAMPLE_PROMPTS) == 7
    assert [metrics["unconditioned"]] == engine.complete([""], Sampling(8, max_tokens=128, temperature=1.0, top_k=0))
    last = samples("--unconditioned", 0, "--prompt", "the", "--num-samples", 2, "--temperature", 1)
    assert list(last["samples"]) == ["the"] and len(set(last["samples"]["the"])) == 2 and "unconditioned" not in last


# ONNX

needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in onnx.NEEDED),
    reason='needs the extra: pip install -e ".[onnx]"',
)
HYBRID = dict(
    attention="VGA", head_offsets="PNS", offset_layers="all", gka_values="unrotated", value_embeds="every-second"
)
HYBRID |= dict(channel_bandwidths=True, head_gates=True)


@needs_onnx
@pytest.mark.slow
def test_export_writes_onnx_that_prefills_and_decodes_as_torch(tokenized, tokenizer, tmp_path):
    """Three rows of more tokens than the windows: at once, in two parts, and one by one."""
    model = awake(dataclasses.replace(SHAPE, n_layer=3, vocab_size=tokenizer.vocab_size, **HYBRID)).eval()
    folder = write_run(tmp_path / "run", model, tokenized / "tokenizer")
    exported((folder, model), tmp_path / "out", "--onnx")
    session = onnx.session(tmp_path / "out/model.onnx")
    about = session.get_modelmeta().custom_metadata_map
    assert about["name"] == '"run"' and json.loads(about["model"])["attention"] == "VGA"
    ids = torch.randint(70, (3, 21))
    with torch.no_grad():
        expected = model(ids)
    for parts in ([21], [13, 8], [1] * 21):
        past, logits = language.empty_cache(model, 3), []
        for part in ids.split(parts, dim=1):
            one, *past = onnx.run(session, part, *past)
            logits.append(one)
        torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=1e-5, atol=1e-5)
    assert [tuple(t.shape) for t in past] == [(3, 21, 4, 16)] * 5  # one of the gka layer without value embeddings


@needs_onnx
def test_onnx_that_differs_from_the_model_does_not_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx, "LARGEST_ERROR", 0.0)
    with pytest.raises(UserError, match=r"differed from the model .* and was deleted"):
        language.write(awake(dataclasses.replace(SHAPE, n_layer=1)).eval(), tmp_path, {})
    assert not list(tmp_path.iterdir())
