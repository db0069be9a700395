"""What make runs: the commands of its targets, what they need first, and what it says when it cannot.

Most tests ask the launcher for its lines; test_settings.py passes odd settings through make itself.
"""

import ast
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest

from deit_gka.model import registry
from gka.kinds import KINDS
from makefile import LAUNCHER, TARGETS
from runs import commands as words
from runs import make as launcher
from runs.paper import gpt_d20_gka, gpt_d20_softmax
from runs.settings import Problem
from runs.study import gpt_d20_best
from sources import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
PYTHON = ".venv/bin/python"


# Language models


def test_looking_at_pretraining_shows_the_whole_chain_and_every_flag_of_the_trainer(make):
    lines = make("-n", "pretrain-d20", "NGPU=7").stdout
    order = ["-m venv .venv", "pip install", "nanochat_gka.corpus --source fineweb", "finish-corpus"]
    order += ["nanochat_gka.tokenizer", "nanochat_gka.pack", "nanochat_gka.train"]
    positions = [lines.index(step) for step in order]
    assert positions == sorted(positions)
    assert "--sequence-len 2048" in lines and "--vocab-size 32768" in lines and "--num-shards 170" in lines
    torchrun = f"{PYTHON} -m trainkit_gka.torchrun --standalone --nproc-per-node 7 -m -- nanochat_gka.train"
    places = "--data out/packed/fineweb-170-32768-2048 --out out/runs --results out/results.jsonl --wandb disabled"
    recipe = "--depth 20 --attention gka --target-param-data-ratio 8.25"
    assert lines.splitlines()[-1] == f"{torchrun} {places} {recipe}"


@pytest.mark.parametrize(
    "target, experiment",
    [("pretrain-d20", gpt_d20_gka), ("pretrain-d20-base", gpt_d20_softmax), ("pretrain-d20-best", gpt_d20_best)],
)
def test_pretraining_has_the_recipe_of_its_experiment(commands, target, experiment):
    settings = dict(DEPTH="12", WANDB_MODE="offline", ARGS="--device-batch-size 8", NGPU="2", BASE="b", SHARDS="8")
    command = commands(target, **settings)[-1]
    places = "--data b/packed/fineweb-8-32768-2048 --out b/runs --results b/results.jsonl --wandb offline --depth 12"
    flags = [*places.split(), *words.flags(**experiment.RECIPE), "--device-batch-size", "8"]
    assert command[command.index("nanochat_gka.train") + 1 :] == flags


def test_the_study_packs_short_rows_of_the_builtin_text_unless_told_otherwise(make):
    lines = make("-n", "study", "ARGS=--list").stdout.splitlines()
    assert lines[-1].endswith("-m runs.study.train --data out/packed/builtin-4096-512-whole --runs out/study --list")
    assert "nanochat_gka.pack" in lines[-2] and "--list" not in lines[-2]
    assert "--sequence-len 512 --split-documents no" in lines[-2]  # its results' rows
    last = make("-n", "study", "CORPUS=fineweb", "SHARDS=8", "BASE=b").stdout.splitlines()[-1]
    assert last.endswith("--data b/packed/fineweb-8-4096-512 --runs b/study")


def test_the_small_run_takes_the_builtin_text_in_short_rows_and_one_process(make, tmp_path):
    """However many GPUs there are: a step has four rows, and more processes than rows are refused."""
    smi = tmp_path / "bin/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text('#!/bin/sh\nfor i in 0 1 2 3 4 5 6 7; do echo "GPU $i: H100 (UUID: GPU-$i)"; done\n')
    smi.chmod(0o755)
    eight = {"PATH": f"{smi.parent}:{os.environ['PATH']}"}
    lines = make("-n", "pretrain-small", env=eight).stdout.splitlines()
    assert "--data out/packed/builtin-4096-512 " in lines[-1] and "--depth 4" in lines[-1]
    assert "torchrun" not in lines[-1]
    assert "--nproc-per-node 8 " in make("-n", "pretrain-d20", env=eight).stdout.splitlines()[-1]
    own = make("-n", "pretrain-small", "CORPUS=docs", "VOCAB=300", "DEPTH=2").stdout.splitlines()[-1]
    assert re.search(r"--data out/packed/docs-\d+-300-512 ", own) and "--depth 2" in own


def test_a_finished_step_is_not_run_again(commands, tmp_path, ready):
    base, made = "a: b's|%#", ["corpus/builtin/.complete", "tokenizer/builtin-32768/tokenizer.json"]
    made += ["packed/builtin-32768-2048/manifest.json"]

    def modules(target, **more):
        return [words[2].partition(".")[2] for words in commands(target, BASE=base, CORPUS="builtin", **more)]

    seen = [modules("pretrain-d20")]
    for file in made:
        (tmp_path / base / file).parent.mkdir(parents=True)
        (tmp_path / base / file).touch()
        seen.append(modules("pretrain-d20"))
    steps = ["corpus", "make", "tokenizer", "pack", "train"]  # make: the end of the corpus
    assert seen == [steps, steps[2:], steps[3:], steps[4:]] and modules("tokenize") == []
    assert modules("tokenize", ARGS="--split-documents yes") == ["pack"]  # which the step refuses, or does


SHARDS = [f"text/shard_0000{number}.parquet" for number in range(2)]


@pytest.mark.parametrize(
    "files, corpus, as_it_is",
    [
        (["notes/only.parquet"], "notes/", False),
        (["book.txt.gz"], "book.txt.gz", False),
        ([SHARDS[0], "text/b.parquet"], "text", False),
        ([*SHARDS, "text/notes.md", "text/.hidden.parquet"], "text", True),
        (["text/a.parquet", "text/b.parquet", "text/source.json"], "text", True),
    ],
    ids=["folder", "file", "not all shards", "nanochat's shards", "made before"],
)
def test_files_of_yours_are_read_as_they_are_or_made_into_a_corpus(commands, tmp_path, ready, files, corpus, as_it_is):
    """By every step, each time: they may have changed."""
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    source = corpus.rstrip("/")
    for _ in range(2):
        *made, tokenizer, pack = [words[2:] for words in commands("tokenize", CORPUS=corpus)]
        documents = source if as_it_is else made[0][-1]
        assert made == ([] if as_it_is else [["nanochat_gka.corpus", "--source", source, "--out", documents]])
        assert as_it_is or re.fullmatch(rf"out/corpus/{source}-\d+", documents)
        assert tokenizer[1:3] == pack[1:3] == ["--corpus", documents]
        for finished in (tokenizer[-1] + "/tokenizer.json", pack[-1] + "/manifest.json"):
            (tmp_path / finished).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / finished).touch()
    named = commands("tokenize", CORPUS=corpus, COLUMN="body")[0]
    assert named[2] == "nanochat_gka.corpus" and named[-2:] == ["--text-column", "body"]


def test_a_corpus_links_the_first_fetched_shards(commands, tmp_path, ready):
    fetched = tmp_path / "out/corpus/fineweb"
    fetched.mkdir(parents=True)
    for number in range(4):
        (fetched / f"shard_{number}.parquet").write_text(str(number))
    finish = commands("data", SHARDS="3")[-1]
    for _ in range(2):
        subprocess.run(finish, cwd=tmp_path, check=True)
    linked = tmp_path / "out/corpus/fineweb-3"
    assert sorted(path.name for path in linked.iterdir()) == [".complete", *(f"shard_{n}.parquet" for n in range(3))]
    assert (linked / "shard_2.parquet").samefile(fetched / "shard_2.parquet")


def test_own_corpora_have_a_checksum_in_their_name():
    """The names of folders made before must stay, or everything is packed again."""
    cksum = subprocess.run("echo /some/where/text | cksum", shell=True, capture_output=True, text=True).stdout.split()
    assert launcher.dataset("/some/where/text/", "170") == f"text-{cksum[0]}"
    assert launcher.dataset("fineweb", "8") == "fineweb-8"


# Vision models


def test_the_ablation_trains_every_model_and_reads_the_runs(commands, ready):
    *training, table = commands("ablate-projections", DATA="digits", ARGS="--seed 3")
    places = "--data digits --out out/runs --results out/results.jsonl --wandb disabled --model"
    start, hybrid = [PYTHON, "-m", "deit_gka.train", *places.split()], registry.model_name("tiny", "gka")
    assert training[-1] == [*start, hybrid, "--attention", "GGGA", "--seed", "3"]
    models = [registry.model_name("tiny", kind) for kind in KINDS]
    assert training[:-1] == [[*start, model, "--seed", "3"] for model in models]
    assert table == [PYTHON, "-m", "runs.paper.ablation", "--runs", "out/runs"]


def test_kinds_of_vision_targets_are_those_of_the_project():
    names = {"softmax" if kind == "base" else kind: word for kind, word in words.VISION_KINDS.items()}
    assert list(names) == list(KINDS)
    for size, timm_size in words.VISION_SIZES.items():
        for kind, name in zip(words.VISION_KINDS, names):
            assert words.vision_model(f"{size}-{kind}") == registry.model_name(timm_size, name)


# The other targets

EVALUATE = "nanochat_gka.evaluate --results out/results.jsonl"  # a run knows its rows, an evaluation fetches none
RESNET = "--out out/runs --results out/results.jsonl --wandb disabled --model resnet18"
NAMED = dict(BASE="b", RUN="elsewhere")


@pytest.mark.parametrize(
    "target, settings, command",
    [
        ("train-deit-ti", dict(DATA="x", MODEL="resnet18"), f"deit_gka.train --data x {RESNET}"),
        ("eval-bpb", {}, f"{EVALUATE} --run out/runs/d20-gka"),
        ("eval-bpb", dict(CORPUS="builtin", SEQ="256"), f"{EVALUATE} --data out/packed/builtin-32768-256 "
         "--run out/runs/d20-gka"),
        *(("eval-bpb", {name: "300"}, f"{EVALUATE} --data out/packed/fineweb-{rows} --run out/runs/d20-gka")
          for name, rows in (("SEQ", "170-32768-300"), ("VOCAB", "170-300-2048"), ("SHARDS", "300-32768-2048"))),
        ("eval-core-base", dict(DEPTH="12"), "nanochat_gka.eval_core --run out/runs/d12-softmax --out out/core"),
        ("eval-core", dict(BUNDLE="a b", RUN="elsewhere"), "nanochat_gka.eval_core --run elsewhere --out out/core "
         "--bundle 'a b'"),
        ("eval-deit", dict(DATA="digits", MODEL="deit_base_patch16_224"), "deit_gka.evaluate "
         "--run out/runs/deit_base_patch16_224 --data digits --results out/results.jsonl"),
        ("sample", dict(PROMPT='It\'s "so"; ls'), "nanochat_gka.generate --run out/runs/d20-gka "
         """--prompt 'It'"'"'s "so"; ls' --stream"""),
        ("sample", dict(RUN="-run", PROMPT="-5 is"), "nanochat_gka.generate --run ./-run '--prompt=-5 is' --stream"),
        ("export", dict(RUN="my runs/d4/"), "nanochat_gka.export --run 'my runs/d4' --out 'my runs/d4-export'"),
        ("figures", dict(IMAGE="my cat.jpg", **NAMED), "deit_gka.draw --out b/figures --demo b/demo --run elsewhere "
         "--image 'my cat.jpg'"),
        ("report", dict(IMAGE="my cat.jpg", TEXT="It is so", **NAMED), "runs.report --base b --run elsewhere "
         "--image 'my cat.jpg' --text 'It is so'"),
        ("report", dict(ARGS="--image *.jpg --text 'a $ b'"), "runs.report --base out --image *.jpg --text 'a $ b'"),
        ("demo", dict(NGPU="0"), "runs.demo --out out/demo --wandb disabled"),
        ("demo", dict(NGPU="2", DEPTH="6"), "runs.demo --out out/demo --ranks 2 --depth 6 --wandb disabled"),
    ],
)  # fmt: skip
def test_a_target_runs_its_command_with_the_settings_that_were_given(commands, ready, target, settings, command):
    assert commands(target, **settings) == [[PYTHON, "-m", *shlex.split(command)]]


@pytest.mark.parametrize(
    "file, content",
    [("checkpoints/step_00000007/state.json", '{"model_config": {}}'), ("config.json", '{"model_type": "gka-gpt"}')],
)
def test_figures_of_a_language_run_are_of_a_text(commands, tmp_path, ready, file, content):
    path = tmp_path / "else where" / file
    path.parent.mkdir(parents=True)
    path.write_text(content)
    [found] = commands("figures", RUN="else where", TEXT="It's $5 for a $cat")
    assert found[2] == "nanochat_gka.draw" and found[-4:] == ["--run", "else where", "--text", "It's $5 for a $cat"]
    with pytest.raises(Problem, match="figures of a language run take TEXT="):
        commands("figures", RUN="else where", IMAGE="cat.jpg")
    path.write_text("damaged")
    assert commands("figures", RUN="else where")[0][2] == "deit_gka.draw"


@pytest.mark.parametrize(
    "settings, drawn",
    [
        ({}, ["deit_gka.draw", "nanochat_gka.draw"]),
        (dict(TEXT="a cat"), ["nanochat_gka.draw"]),
        (dict(IMAGE="cat.jpg"), ["deit_gka.draw"]),
        (dict(MODEL="deit_small_patch16_224"), ["deit_gka.draw"]),
    ],
)
def test_figures_of_the_demo_are_of_both_trainers(commands, tmp_path, ready, settings, drawn):
    (tmp_path / "out/demo/runs/d4-gka-paper-400").mkdir(parents=True)
    assert [words[2] for words in commands("figures", **settings)] == drawn


# What cannot run


@pytest.mark.parametrize(
    "target, settings, message",
    [
        ("pretrain-d20", {}, 'no GPU is visible.*Run "make demo"'),
        ("train-deit-ti", {}, 'no images and no GPU.*run "make demo"'),
        ("ablate-projections", dict(DATA="digits"), "no GPU is visible.*--device-type cpu"),
        ("train-deit-ti", dict(DATA="wds:/nope"), "DATA=wds:/nope: there is no such folder"),
        ("train-deit-ti", dict(DATA="requirements.txt"), "DATA=requirements.txt: there is no such folder"),
        ("train-deit-xl", {}, "there is train-deit-{ti,s,b}-{base,vlt,gka}, not train-deit-xl"),
        ("nothing", {}, "there is no target nothing; make help lists them"),
        ("tokenizer", dict(CORPUS="no/such/folder"), "is neither fineweb nor builtin nor a folder or file"),
        ("figures", dict(RUN=".", TEXT="a cat"), "figures of a vision model take IMAGE=file, not TEXT"),
        ("figures", dict(RUN="elsewhere", TEXT="a cat"), "RUN=elsewhere: there is no such folder"),
        ("figures", dict(RUN="elsewhere", ARGS="--text-file text.txt"), "RUN=elsewhere: there is no such folder"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(lines, ready, monkeypatch, target, settings, message):
    monkeypatch.setattr(launcher, "count_gpus", lambda: 0)
    with pytest.raises(Problem, match=message):
        lines(target, look=False, **settings)


def test_a_problem_is_one_line_and_exit_code_2(make):
    done = make("tokenizer", "CORPUS=no/such/folder")
    assert done.returncode == 2 and not done.stdout
    error, of_make = done.stderr.splitlines()
    assert error.startswith("error: CORPUS=no/such/folder is neither") and "Error 2" in of_make


@pytest.mark.parametrize("data", ["wds:.", "hf-stream:some/images", "digits"])
def test_images_that_may_be_there_are_left_to_the_trainer(lines, ready, monkeypatch, data):
    monkeypatch.setattr(launcher, "count_gpus", lambda: 0)
    for asked in ("--device-type=cpu", "--device_type cpu", '--device-type "cpu"'):
        assert len(lines("train-deit-ti", look=False, DATA=data, ARGS=asked)) == 1


@pytest.mark.parametrize("flag", ["--dry-run", "--dry_run"])
def test_a_dry_run_asks_the_trainer_alone(commands, lines, ready, monkeypatch, flag):
    """It needs no GPU, and fetches and packs nothing."""
    monkeypatch.setattr(launcher, "count_gpus", lambda: 0)
    [command] = commands("pretrain-d20", look=False, ARGS=f"{flag} --seed 3")
    assert command[2] == "nanochat_gka.train" and command[-3:] == [flag, "--seed", "3"]
    assert len(lines("ablate-projections", look=False, DATA="digits", ARGS=flag)) == len(KINDS) + 1  # no table


def test_the_small_run_that_is_suggested_keeps_what_the_user_gave(lines, tmp_path, monkeypatch, ready):
    """And it runs: its settings pass the check that suggests it."""
    monkeypatch.setattr(launcher, "count_gpus", lambda: 0)
    images = tmp_path / "my images"
    images.mkdir()
    settings = dict(DATA=str(images), ARGS="--val-split 'the test'")
    with pytest.raises(Problem) as problem:
        lines("train-deit-ti", look=False, **settings)
    words = shlex.split(str(problem.value).partition(" small: ")[2])
    given = dict(word.split("=", 1) for word in words if "=" in word)
    assert given.pop("ARGS").endswith(f" {settings.pop('ARGS')}") and given.items() >= settings.items()
    launcher.check_images({**given, "ARGS": words[-1].partition("=")[2]})
    settings = dict(CORPUS=str(images), SEQ="64", ARGS="--seed 3")
    with pytest.raises(Problem) as problem:
        lines("pretrain-d20", look=False, **settings)
    words = shlex.split(str(problem.value).partition("make pretrain-small ")[2])
    assert dict(word.split("=", 1) for word in words) == settings
    assert lines("pretrain-small", look=False, **settings)


# An environment of one's own


def test_an_environment_of_ones_own_takes_the_place_of_venv(make, tmp_path):
    """It is used as it is: nothing is made, nothing is installed."""
    own = tmp_path / "my env/bin/python"
    own.parent.mkdir(parents=True)
    own.write_text('#!/bin/sh\necho "$@" >> calls\n')
    own.chmod(0o755)
    given = [f"ENV_PYTHON={own}", "DATA=digits", "ARGS=--device-type cpu", "NGPU=1"]
    for target in TARGETS:
        if target not in ("help", "setup", "clean"):
            done = make("-n", target, *given)
            assert done.returncode == 0 and ".venv" not in done.stdout and "pip" not in done.stdout, done
    assert make("train-deit-ti", *given).returncode == 0 and not (tmp_path / ".venv").exists()
    assert (tmp_path / "calls").read_text().startswith("-m deit_gka.train --data digits ")


@pytest.mark.parametrize(
    "words, said", [(["demo"], "there is no such program"), (["setup"], "install there: nowhere/")]
)
def test_an_environment_that_is_not_there_or_to_be_made_is_refused(make, tmp_path, words, said):
    done = make(*words, "ENV_PYTHON=nowhere/python")
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 2  # one is make's
    assert not (tmp_path / ".venv").exists()


# Running


@pytest.mark.parametrize("target", [name for name in TARGETS if name != "help"])
def test_without_an_environment_it_is_made_once_and_first(lines, target):
    shown = lines(target, DATA="digits")
    used = [number for number, line in enumerate(shown) if line.startswith(".venv/bin/")]
    made = [number for number, line in enumerate(shown) if line.endswith(" -m venv .venv")]
    assert made == made[:1] if used else not made
    assert not used or made[0] < used[0]
    assert sum("--editable" in line for line in shown) == len(made)


@pytest.mark.parametrize("older", ["requirements.txt", "pyproject.toml"])
def test_the_environment_is_made_again_when_what_it_is_made_of_changes(commands, tmp_path, ready, older):
    assert not commands("setup")
    later = (tmp_path / ".venv/.installed").stat().st_mtime + 1
    os.utime(tmp_path / older, (later, later))
    assert commands("setup")[-1] == ["touch", ".venv/.installed"]


def test_targets_named_together_share_their_steps_and_args_go_to_each(make, ready):
    lines = make("-n", "-j4", "pretrain-d20", "tokenize", "sample", "ARGS=--x 1").stdout.splitlines()
    found = [(line.split()[2], line.endswith("--x 1")) for line in lines if "-m nanochat_gka" in line]
    steps = {"corpus": False, "tokenizer": False, "pack": True, "train": True, "generate": True}
    assert found == [(f"nanochat_gka.{name}", has_args) for name, has_args in steps.items()]
    cleaned = make("-n", "clean", "setup").stdout
    assert "-m venv .venv" in cleaned.partition("rm -rf .venv")[2]


@pytest.mark.parametrize("code", [2, 75])
def test_a_step_that_fails_ends_the_chain_with_its_code(make, tmp_path, scripted, code):
    scripted(f"echo $2 >> calls; [ $2 != nanochat_gka.tokenizer ] || exit {code}")
    done = make("tokenize", "CORPUS=builtin")
    assert done.returncode == 2 and f"Error {code}\n" in done.stderr
    assert (tmp_path / "calls").read_text().split() == ["nanochat_gka.corpus", "nanochat_gka.tokenizer"]


@pytest.mark.parametrize("target, called", [("sample", "generate"), ("tokenize", "corpus")], ids=["last", "a step"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_the_command_which_saves_and_no_other_starts(bare, scripted, target, called, number):
    save = "trap 'echo saved >> calls; exit 0' TERM HUP"
    scripted(f"{save}; echo $2 >> calls; echo $PPID > parent; echo $$ > own; while :; do sleep 0.05; done")
    settings = {"CORPUS": "builtin", "PYTHON": sys.executable, "NGPU": "1"}
    settings |= {"GOALS": target, "SETTINGS": " ".join(settings)}
    words = [sys.executable, "-m", "runs.make"]
    with subprocess.Popen(words, cwd=bare, env={**os.environ, **settings}, stdout=subprocess.DEVNULL) as process:
        while not (bare / "own").exists() or not (bare / "own").read_text().strip():
            assert process.poll() is None
            time.sleep(0.02)
        own = int((bare / "own").read_text())
        assert (own == process.pid) == (target == "sample")  # the last command takes the launcher's place
        process.send_signal(number)
        try:
            assert process.wait(timeout=20) == (0 if target == "sample" else 128 + number)
        except subprocess.TimeoutExpired:
            os.kill(own, signal.SIGKILL)
            process.kill()
            raise
    assert (bare / "calls").read_text().split() == [f"nanochat_gka.{called}", "saved"]


def test_what_a_target_runs_may_call_make_itself(make, tmp_path, scripted):
    """A command does not see which targets were named: a shell that it starts would run them again."""
    scripted('printf "%s" "goals: $GOALS" > seen\n')
    make("test")
    assert (tmp_path / "seen").read_text() == "goals: "


# The list


def test_help_lists_every_target_on_one_screen(make):
    lines = make("help", "NGPU=0").stdout.splitlines()
    listed = " ".join(line[2:27] for line in lines if line.startswith("  "))
    assert set(TARGETS) <= set(listed.split()) and any("NGPU=0 processes" in line for line in lines)
    cut = subprocess.run("make -s help | head -n 1", shell=True, cwd=ROOT, capture_output=True, text=True)
    assert cut.stdout == lines[0] + "\n" and "Traceback" not in cut.stderr


def test_the_launcher_needs_nothing_but_an_old_python():
    """make runs it before there is an environment, with whatever Python it finds."""
    for name in LAUNCHER:
        tree = ast.parse((ROOT / f"runs/{name}.py").read_text(), feature_version=(3, 8))
        own = [node for top in tree.body if not isinstance(top, ast.If) for node in ast.walk(top)]
        imported = {alias.name for node in own if isinstance(node, ast.Import) for alias in node.names}
        imported |= {
            f"{node.module}.{alias.name}" for node in own if isinstance(node, ast.ImportFrom) for alias in node.names
        }
        allowed = {f"runs.{other.replace('/', '.')}" for other in LAUNCHER}
        outside = {
            name for name in imported if not any(name.startswith(start) for start in allowed | {"runs.commands"})
        }
        assert {name.split(".")[0] for name in outside} <= sys.stdlib_module_names, name
