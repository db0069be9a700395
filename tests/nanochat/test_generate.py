"""Writing text from the command line, and models that leave as folders: export, card, loading back, damage."""

import dataclasses
import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import tiny
import tiny_core
from nanochat_gka import eval_core, evaluate, export, generate
from nanochat_gka.data.tokenizer import Tokenizer
from nanochat_gka.generation.engine import Engine
from nanochat_gka.generation.sampling import SAMPLE_PROMPTS, Sampling
from nanochat_gka.model import checkpoints as model_io
from nanochat_gka.model.checkpoints import load
from tiny_gpt import SHAPE, VARIANTS, awake, write_run
from trainkit.cli import UserError, run
from trainkit.files import sha256


@pytest.fixture(scope="module")
def tokenizer(packed):
    return Tokenizer.load(packed / "tokenizer")


@pytest.mark.parametrize("said", [{"gka_values": "normalised"}, {}], ids=["stated", "unstated"])
def test_an_older_export_keeps_the_form_it_was_trained_in(said, packed, tokenizer, tmp_path):
    model = awake(dataclasses.replace(SHAPE, vocab_size=tokenizer.vocab_size, attention="gka", gka_values="normalised"))
    model_io.export(load(write_run(tmp_path / "run", model, packed / "tokenizer")), tmp_path / "out")
    about = json.loads((tmp_path / "out" / "config.json").read_text())
    del about["model"]["gka_values"]
    about["model"].update(said)
    (tmp_path / "out" / "config.json").write_text(json.dumps(about))
    ids = torch.randint(70, (1, 16))
    assert torch.equal(load(tmp_path / "out").model(ids), model(ids))


@pytest.fixture(scope="module")
def trained(packed, tokenizer, tmp_path_factory):
    """A run folder and its model."""
    model = awake(
        dataclasses.replace(
            SHAPE,
            vocab_size=tokenizer.vocab_size,
            attention="GGA",
            head_offsets="PS",
            gka_values="normalised",
            n_layer=3,
        )
    )
    return write_run(tmp_path_factory.mktemp("generate") / "tiny-run", model, packed / "tokenizer"), model


def write(trained, *flags):
    """The command in this process; returns its exit code."""
    try:
        run(
            generate.main,
            generate.GenerateConfig,
            list(map(str, ["--run", trained[0], "--device-type", "cpu", "--max-tokens", 12, *flags])),
        )
    except SystemExit as left:
        return left.code
    return 0


def test_text_goes_to_output_and_the_rest_to_error(trained, tokenizer, capsys):
    assert write(trained, "--prompt", "the kernel", "a", "--num-samples", 2, "--seed", 5) == 0
    printed = capsys.readouterr()
    texts = Engine(trained[1], tokenizer).complete(["the kernel", "a"], Sampling(num_samples=2, max_tokens=12, seed=5))
    assert printed.out == "".join(
        prompt + text + "\n\n" for prompt, row in zip(["the kernel", "a"], texts) for text in row
    )
    assert "tiny-run: GGA, depth 3, step 7" in printed.err and "tokens/s" in printed.err


def test_a_stream_is_the_same_text(trained, tokenizer, capsys):
    assert write(trained, "--prompt", "the kernel", "--num-samples", 2, "--stream", "--stop", "e") == 0
    [texts] = Engine(trained[1], tokenizer).complete(["the kernel"], Sampling(num_samples=2, max_tokens=12), stop=["e"])
    assert capsys.readouterr().out == "".join("the kernel" + text + "\n" for text in texts)


def test_prompts_from_a_file_come_back_as_json_lines_in_order(trained, tokenizer, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text('the kernel\n\n"two\\nlines"\nevery head\n')
    assert (
        write(
            trained,
            "--prompts-file",
            tmp_path / "prompts.txt",
            "--num-samples",
            3,
            "--max-rows",
            2,
            "--temperature",
            1.5,
        )
        == 0
    )
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    prompts = ["the kernel", "two\nlines", "every head"]
    want = Engine(trained[1], tokenizer).complete(prompts, Sampling(num_samples=3, max_tokens=12, temperature=1.5))
    assert records == [{"prompt": prompt, "texts": texts} for prompt, texts in zip(prompts, want)]


def test_text_is_written_as_it_is(trained, capsys):
    prompt = ":smile: a\tb [bold] \x0c|\r|"
    assert write(trained, "--prompt", prompt) == 0
    assert capsys.readouterr().out.startswith(prompt)


def test_a_prompts_file_from_anywhere(trained, tmp_path, capsys):
    """A byte order mark, Windows' line ends, and a line separator that json.dumps leaves as it is."""
    prompts = ["the :smile: kernel", "two\u2028lines", "every"]
    text = "\ufeff" + "\r\n".join(json.dumps(prompt, ensure_ascii=False) for prompt in prompts)
    (tmp_path / "prompts.txt").write_bytes(text.encode())
    assert write(trained, "--prompts-file", tmp_path / "prompts.txt") == 0
    assert [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines()] == prompts


def test_a_prompts_text_does_not_depend_on_the_other_prompts(trained, capsys):
    assert write(trained, "--prompt", "the kernel") == 0
    alone = capsys.readouterr().out
    assert write(trained, "--prompt", "every", "the kernel") == 0
    assert capsys.readouterr().out.endswith(alone)


def test_a_reader_that_leaves_ends_it_quietly(trained):
    command = tiny.command(
        "nanochat_gka.generate", "--run", trained[0], "--stream", "--num-samples", 500, "--device-type", "cpu"
    )
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=tiny.environment())
    process.stdout.read(1)
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=tiny.HANG_AFTER) == 141 and b"Traceback" not in errors and b"Error" not in errors


def test_a_model_of_no_numbers_writes_nothing(trained, packed, tokenizer, tmp_path, capsys):
    model = awake(dataclasses.replace(SHAPE, vocab_size=tokenizer.vocab_size))
    with torch.no_grad():
        model.transformer.h[0].attn.c_proj.weight.fill_(float("nan"))
    run_folder = write_run(tmp_path / "run", model, packed / "tokenizer")
    for temperature in (0, 1):
        assert write((run_folder, None), "--temperature", temperature) == 2
        assert "logits are not numbers" in capsys.readouterr().err


def test_an_interactive_process_continues_what_is_typed_until_the_input_ends(trained, tokenizer):
    command = tiny.command(
        "nanochat_gka.generate",
        "--run",
        trained[0],
        "--interactive",
        "--temperature",
        0,
        "--max-tokens",
        8,
        "--device-type",
        "cpu",
    )
    too_long = "the kernel " * 100
    typed = f"the kernel\n{too_long}\n\nevery\n".encode()
    done = subprocess.run(command, input=typed, capture_output=True, env=tiny.environment(), timeout=tiny.HANG_AFTER)
    assert done.returncode == 0, done.stderr
    texts = Engine(trained[1], tokenizer).complete(["the kernel", "", "every"], Sampling(max_tokens=8, temperature=0))
    assert done.stdout.decode() == f"the kernel{texts[0][0]}\n{texts[1][0]}\nevery{texts[2][0]}\n"
    assert b"error: the prompt has" in done.stderr and b"Traceback" not in done.stderr


def test_asked_again_an_interactive_process_writes_something_else(trained):
    flags = ("--interactive", "--temperature", 2, "--top-k", 0, "--device-type", "cpu")
    done = subprocess.run(
        tiny.command("nanochat_gka.generate", "--run", trained[0], *flags),
        input=b"the\n" * 2,
        capture_output=True,
        env=tiny.environment(),
        timeout=tiny.HANG_AFTER,
    )
    assert done.returncode == 0, done.stderr
    half = len(done.stdout) // 2
    assert half > 20 and done.stdout[:half] != done.stdout[half:]


@pytest.mark.parametrize(
    "flags,message",
    [
        (["--prompts-file", "/nonexistent"], "/nonexistent: No such file"),
        (["--top-p", "0"], "--top-p must be above 0"),
        (["--max-rows", "0"], "--max-rows must be at least 1"),
        (["--prompts-file", "x", "--stream"], "leave --stream and --interactive out"),
        (["--prompt", "\udcff"], "is not Unicode text"),
        (["--step", "-2"], "--step must be the step of a checkpoint, or -1"),
        (["--stop", ""], "a stop text must not be empty"),
        (["--prompt", "the " * 400], "the model takes at most 159"),
        (["--run", "/nonexistent"], "no checkpoint in /nonexistent; train one first"),
    ],
)
def test_bad_flags_are_one_line(trained, flags, message, capsys):
    assert write(trained, *flags) == 2
    [error] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in error


def test_a_prompts_file_that_is_wrong_is_named_with_its_line(trained, tmp_path, capsys):
    for content, message in (
        (b'the\n"open\n', "prompts.txt:2: begins with a quote but is not a JSON string"),
        (b"\n", "has no prompts"),
        (b"\xff", "is not UTF-8"),
    ):
        (tmp_path / "prompts.txt").write_bytes(content)
        assert write(trained, "--prompts-file", tmp_path / "prompts.txt") == 2
        assert message in capsys.readouterr().err


# Export


def exported(trained, out):
    run(export.main, export.ExportConfig, ["--run", str(trained[0]), "--out", str(out)])
    return out


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_an_exported_model_gives_the_same_logits(variant, packed, tokenizer, tmp_path):
    model = awake(dataclasses.replace(SHAPE, vocab_size=tokenizer.vocab_size, **variant))
    run_folder = write_run(tmp_path / "run", model, packed / "tokenizer")
    loaded = load(exported((run_folder, model), tmp_path / "out"))
    ids = torch.randint(70, (2, 16))
    assert torch.equal(loaded.model(ids), model(ids)) and torch.equal(load(run_folder).model(ids), model(ids))
    assert loaded.model.config == model.config and loaded.tokenizer.sha256 == tokenizer.sha256
    assert not loaded.model.training


def test_an_exported_folder_says_what_it_is(trained, tmp_path, tokenizer):
    out = exported(trained, tmp_path / "out")
    assert {path.name for path in out.iterdir()} == {"model.safetensors", "config.json", "tokenizer.json", "README.md"}
    about = json.loads((out / "config.json").read_text())
    assert about["attention"] == ["gka", "gka", "softmax"] and set(about["sigma"]) == {"0", "1"}
    torch.testing.assert_close(torch.tensor(about["sigma"]["1"]), trained[1].bandwidths()[1])
    assert (about["step"], about["training"]["tokens"], about["training"]["commit"]) == (7, 7000, "abc1234")
    assert (
        about["parameters"]
        == sum(p.numel() for p in trained[1].parameters())
        == sum(t.numel() for t in load_file(out / "model.safetensors").values())
    )
    card = (out / "README.md").read_text()
    assert "| what GKA heads mix | normalised features before rotation, not the paper's form; head offsets PS |" in card
    for fact in ("gka and softmax attention", "| training tokens | 7,000 (7 of 7 steps) |", "| trained at commit | abc1234 |", "layer 1: 2 to 2",
                 "2 parquet files, shard_00000.parquet to shard_00001.parquet", about["sha256"]["model.safetensors"]):  # fmt: skip
        assert fact in card
    assert exported(trained, out) == out  # again, the same model


def test_an_export_is_the_checkpoints_model_whatever_dtype_its_tables_have(packed, tokenizer, tmp_path):
    """Trained on CUDA the embedding tables are bfloat16, on a CPU they load, and leave, as float32."""
    model = awake(dataclasses.replace(SHAPE, vocab_size=tokenizer.vocab_size))
    model.embeddings_to(torch.bfloat16)
    run_folder = write_run(tmp_path / "run", model, packed / "tokenizer")
    out = exported((run_folder, model), tmp_path / "out")
    assert exported((run_folder, model), out) == out
    assert load(out).sha256 == load(run_folder).sha256


def test_an_export_goes_nowhere_where_something_else_is(trained, tmp_path, capsys):
    (tmp_path / "README.md").write_text("mine")
    for folder in (tmp_path, trained[0]):
        with pytest.raises(SystemExit):
            exported(trained, folder)
        assert "is not empty and does not hold an exported model" in capsys.readouterr().err
    assert (tmp_path / "README.md").read_text() == "mine"


def test_an_export_that_was_cut_off_is_made_again(trained, tmp_path, monkeypatch):
    def full(*_):
        raise OSError("full")

    with monkeypatch.context() as patched:
        patched.setattr(model_io, "write_json", full)
        with pytest.raises(OSError, match="full"):
            exported(trained, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()  # an empty folder is as good as none
    assert load(exported(trained, tmp_path / "out")).step == 7
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_checkpoint_folder_has_its_step_only(trained):
    [folder] = (trained[0] / "checkpoints").iterdir()
    assert load(folder, step=7).step == 7
    with pytest.raises(UserError, match="holds step 7, not 8"):
        load(folder, step=8)


def test_the_commands_take_an_exported_folder(trained, tokenizer, tmp_path, capsys):
    out = exported(trained, tmp_path / "exported")
    assert write((out, None), "--prompt", "the", "--temperature", 0) == 0
    [[text]] = Engine(trained[1], tokenizer).complete(["the"], Sampling(max_tokens=12, temperature=0))
    printed = capsys.readouterr()
    assert f"the{text}\n" in printed.out and "tiny-run: GGA" in printed.err
    with pytest.raises(UserError, match="holds step 7, not 8"):
        load(out, step=8)


def test_the_cards_code_runs(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exported(trained, tmp_path / "out")
    code = (tmp_path / "out/README.md").read_text().split("```python")[1].split("```")[0]
    exec(compile(code, "card", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_a_damaged_or_foreign_folder_is_refused(trained, packed, tokenizer, tmp_path):
    out = exported(trained, tmp_path / "out")
    for name in ("model.safetensors", "tokenizer.json"):
        content = (out / name).read_bytes()
        (out / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(UserError, match=f"{name} is missing or damaged"):
            load(out)
        (out / name).write_bytes(content)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "model": {**config["model"], "n_layer": 2}}))
    with pytest.raises(UserError, match="does not hold a model of the shape it states"):
        load(out)
    for damage in (
        {"name": 1},
        {"step": "7"},
        {"sha256": {}},
        {"sha256": "x"},
        {"model": None},
        {"checkpoint_sha256": None},
    ):
        (out / "config.json").write_text(json.dumps({**config, **damage}))
        with pytest.raises(UserError, match="not of a model that this project exported, or it is damaged"):
            load(out)
    (out / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UserError, match="not of a model that this project exported"):
        load(out)
    other = write_run(
        tmp_path / "other", awake(dataclasses.replace(SHAPE, vocab_size=tokenizer.vocab_size)), packed / "tokenizer"
    )
    good = exported(trained, tmp_path / "good")
    with pytest.raises(SystemExit):
        exported((other, None), good)
    assert load(good).name == "tiny-run"


# Commands that load a model


def test_a_tokenizer_that_is_not_the_models_is_one_line_everywhere(trained, tokenizer, tmp_path, monkeypatch, capsys):
    pytest.importorskip("lm_eval")
    from nanochat_gka import harness

    folder = tmp_path / "run"
    shutil.copytree(trained[0], folder)
    (there,) = (folder / "checkpoints").glob("step_*")
    more = {**tokenizer.ranks, **{f"zz{number}".encode(): len(tokenizer.ranks) + number for number in range(40)}}
    Tokenizer(more).save(there)
    manifest = json.loads((there / "manifest.json").read_text())
    (there / "manifest.json").write_text(json.dumps({**manifest, "tokenizer.json": sha256(there / "tokenizer.json")}))
    commands = [
        (generate, generate.GenerateConfig, ["--prompt", "zz1"]),
        (evaluate, evaluate.EvaluateConfig, ["--eval", "sample", "--results", tmp_path / "results.jsonl"]),
        (
            eval_core,
            eval_core.CoreConfig,
            ["--bundle", tiny_core.write_bundle(tmp_path / "bundle"), "--out", tmp_path / "core"],
        ),
        (export, export.ExportConfig, ["--out", tmp_path / "exported"]),
    ]
    said = []
    for module, config, flags in commands:
        with pytest.raises(SystemExit) as left:
            run(module.main, config, list(map(str, ["--run", folder, *flags])))
        assert left.value.code == 2
        said.append(capsys.readouterr().err)
    monkeypatch.setattr(
        sys,
        "argv",
        ["harness", "--model", "gka", "--model_args", f"run={folder}", "--tasks", "wikitext", "--device", "cpu"],
    )
    with pytest.raises(SystemExit) as left:
        harness.main()
    assert left.value.code == 2
    said.append(capsys.readouterr().err.splitlines()[-1])
    size = tokenizer.vocab_size
    assert all(
        f"tokenizer.json has {size + 40} tokens and the model beside it {size}: it belongs to another model" in line
        for line in said
    )
    assert all(len(line.strip().splitlines()) == 1 for line in said) and not (tmp_path / "exported").exists()


def test_evaluate_asks_what_nanochat_asks(trained, tokenizer, tmp_path, capsys):
    flags = ["--run", trained[0], "--eval", "sample", "--results", tmp_path / "results.jsonl", "--device-type", "cpu"]
    run(evaluate.main, evaluate.EvaluateConfig, list(map(str, flags)))
    metrics = json.loads((tmp_path / "results.jsonl").read_text())["metrics"]
    engine = Engine(trained[1], tokenizer)
    want = engine.complete(SAMPLE_PROMPTS, Sampling(max_tokens=16, temperature=0))
    assert list(metrics["samples"].items()) == list(zip(SAMPLE_PROMPTS, want)) and len(SAMPLE_PROMPTS) == 7
    assert [metrics["unconditioned"]] == engine.complete([""], Sampling(8, max_tokens=128, temperature=1.0, top_k=0))
    assert "The capital of France is" in capsys.readouterr().out
    run(
        evaluate.main,
        evaluate.EvaluateConfig,
        list(map(str, [*flags, "--unconditioned", 0, "--prompt", "the", "--num-samples", 2, "--temperature", 1])),
    )
    last = json.loads((tmp_path / "results.jsonl").read_text().splitlines()[-1])["metrics"]
    assert list(last["samples"]) == ["the"] and len(set(last["samples"]["the"])) == 2 and "unconditioned" not in last
