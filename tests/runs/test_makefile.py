"""The Makefile as a user meets it: what it would run, and what it says when it cannot."""

import ast
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import run as torchrun

from deit_gka.model import registry
from gka.kinds import KINDS
from makefile import LAUNCHER, TARGETS
from runs import commands as words
from runs import make as launcher
from runs.paper import ablation, core, deit, gpt_d20, gpt_d20_gka, gpt_d20_softmax
from runs.study import gpt_d20_best

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def commands(done) -> list[list[str]]:
    """The words of the commands that make shows, after the launcher's own line."""
    first, *lines = done.stdout.splitlines()
    assert "runs.make" in first and done.returncode == 0, done.stderr
    return [shlex.split(line) for line in lines]


def last_line(done) -> list[str]:
    """The words of the last command that make shows."""
    return shlex.split(done.stdout.splitlines()[-1])


def test_looking_at_pretraining_shows_the_whole_chain_and_every_flag_of_the_trainer(make):
    lines = make("-n", "pretrain-d20", "NGPU=7").stdout
    order = ["-m venv .venv", "pip install", "nanochat_gka.corpus --source fineweb", "finish-corpus"]
    order += ["nanochat_gka.tokenizer", "nanochat_gka.pack", "nanochat_gka.train"]
    positions = [lines.index(step) for step in order]
    assert positions == sorted(positions)
    assert "--sequence-len 2048" in lines and "--vocab-size 32768" in lines and "--num-shards 170" in lines
    torchrun = ".venv/bin/python -m trainkit_gka.torchrun --standalone --nproc-per-node 7 -m -- nanochat_gka.train"
    places = "--data out/packed/fineweb-170-32768-2048 --out out/runs --results out/results.jsonl --wandb disabled"
    recipe = "--depth 20 --attention gka --target-param-data-ratio 8.25"
    assert lines.splitlines()[-1] == f"{torchrun} {places} {recipe}"


@pytest.mark.parametrize(
    "target, experiment",
    [("pretrain-d20", gpt_d20_gka), ("pretrain-d20-base", gpt_d20_softmax), ("pretrain-d20-best", gpt_d20_best)],
)
def test_pretraining_is_the_command_of_its_experiment(make, target, experiment):
    settings = ("DEPTH=12", "WANDB_MODE=offline", "ARGS=--device-batch-size 8", "NGPU=2", "BASE=b", "SHARDS=8")
    data = Path("b/packed/fineweb-8-32768-2048")
    config = gpt_d20.LanguageConfig(base=Path("b"), ngpu=2, wandb="offline", depth=12, data=data)
    words = gpt_d20.words(config, experiment.RECIPE, ["--device-batch-size", "8"])
    assert last_line(make("-n", target, *settings)) == [".venv/bin/python", *words]


def test_the_study_packs_short_rows_of_the_builtin_text_unless_told_otherwise(make):
    lines = make("-n", "study", "ARGS=--list").stdout.splitlines()
    assert lines[-1].endswith("-m runs.study --data out/packed/builtin-4096-512-whole --runs out/study --list")
    assert any("nanochat_gka.pack" in line and "--split-documents no" in line for line in lines)  # its results' rows
    assert "--split-documents" not in make("-n", "tokenize", "CORPUS=builtin").stdout
    assert "--list" not in lines[-2] and "--sequence-len 512" in lines[-2] and "source builtin" in "".join(lines)
    last = make("-n", "study", "CORPUS=fineweb", "SHARDS=8", "BASE=b").stdout.splitlines()[-1]
    assert last.endswith("--data b/packed/fineweb-8-4096-512 --runs b/study")


def test_a_finished_step_is_not_run_again(make, tmp_path, ready):
    (tmp_path / "out/packed/fineweb-170-32768-2048").mkdir(parents=True)
    (tmp_path / "out/tokenizer/fineweb-170-32768").mkdir(parents=True)
    (tmp_path / "out/corpus/fineweb-170").mkdir(parents=True)
    for made in (
        "corpus/fineweb-170/.complete",
        "tokenizer/fineweb-170-32768/tokenizer.json",
        "packed/fineweb-170-32768-2048/manifest.json",
    ):
        (tmp_path / "out" / made).touch()
    lines = make("-n", "pretrain-d20").stdout
    assert "nanochat_gka.train" in lines
    assert not any(
        step in lines for step in ("pip", "nanochat_gka.corpus", "nanochat_gka.tokenizer", "nanochat_gka.pack")
    )
    assert "nanochat_gka.pack" not in make("-n", "tokenize").stdout
    asked = make("-n", "tokenize", "ARGS=--split-documents yes").stdout  # which the step refuses, or does
    assert "nanochat_gka.pack" in asked and "nanochat_gka.tokenizer" not in asked


def test_every_corpus_has_its_own_folders(make, tmp_path):
    for folder in ("a/text", "b/text"):
        (tmp_path / folder).mkdir(parents=True)
    lines = {
        what: make("-n", "tokenize", what, "ARGS=--workers 2").stdout
        for what in ("CORPUS=a/text", "CORPUS=b/text", "SHARDS=8", "SHARDS=9")
    }
    packed = {what: re.search(r"nanochat_gka.pack .* --out (\S+) --workers 2", text)[1] for what, text in lines.items()}
    assert len(set(packed.values())) == 4
    assert all(
        "--workers" not in line
        for text in lines.values()
        for line in text.splitlines()
        if "nanochat_gka.tokenizer" in line
    )


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine may have a GPU")
def test_without_a_gpu_pretraining_says_what_to_run_instead(make):
    for target in ("pretrain-d20", "pretrain-d20-base", "pretrain-d20-best"):
        done = make(target)
        assert done.returncode == 2
        assert "no GPU is visible" in done.stderr and 'Run "make demo"' in done.stderr


@pytest.mark.parametrize(
    "target, name", [("train-deit-ti", "ti"), ("train-deit-s-vlt", "s-vlt"), ("train-deit-b-base", "b-base")]
)
def test_vision_targets_are_the_command_of_their_experiment(make, target, name):
    config = deit.VisionConfig(ngpu=7, data="/some/images")
    words = deit.words(config, deit.model_of(name), ["--epochs", "2"])
    found = make("-n", target, "DATA=/some/images", "NGPU=7", "ARGS=--epochs 2")
    assert last_line(found) == [".venv/bin/python", *words]
    assert "--model resnet18 " in make("-n", target, "DATA=x", "MODEL=resnet18", "ARGS=--device-type cpu").stdout


def test_an_unknown_vision_target_is_one_line(make):
    done = make("-n", "train-deit-xl")
    assert done.returncode == 2 and not done.stdout.partition("\n")[2]
    assert "error: there is train-deit-{ti,s,b}-{base,vlt,gka}, not train-deit-xl\n" in done.stderr


def test_the_ablation_trains_every_model_and_reads_the_runs(make):
    *_, softmax, vlt, gka, hybrid, table = make(
        "-n", "ablate-projections", "DATA=digits", "ARGS=--seed 3"
    ).stdout.splitlines()
    config = ablation.AblationConfig(data="digits")
    expected = [[".venv/bin/python", *words] for words in ablation.training(config, ["--seed", "3"])]
    assert [shlex.split(line) for line in (softmax, vlt, gka, hybrid)] == expected
    assert table == ".venv/bin/python -m runs.paper.ablation --runs out/runs"


@pytest.mark.parametrize(
    "setting, run",
    [
        ((), "out/runs/deit_tiny_gka_patch16_224"),
        (("MODEL=deit_base_patch16_224",), "out/runs/deit_base_patch16_224"),
        (("RUN=elsewhere",), "elsewhere"),
    ],
)
def test_vision_evaluation_takes_the_named_run(make, setting, run):
    assert f"deit_gka.evaluate --run {run} --data digits" in make("-n", "eval-deit", "DATA=digits", *setting).stdout


def test_figures_are_of_the_named_run_and_image_or_the_demos(make):
    last = make("-n", "figures", "RUN=elsewhere", "IMAGE=my cat.jpg", "BASE=b").stdout.splitlines()[-1]
    assert "deit_gka.draw --out b/figures --demo b/demo --run elsewhere" in last and "--image 'my cat.jpg'" in last
    assert "--run" not in make("-n", "figures").stdout.splitlines()[-1]
    refused = make("figures", "RUN=elsewhere", "TEXT=a cat")
    assert refused.returncode == 2 and "error: figures of a vision model take IMAGE=file, not TEXT" in refused.stderr


def test_the_report_is_of_the_named_run_or_of_all(make):
    last = make("-n", "report", "RUN=elsewhere", "IMAGE=my cat.jpg", "TEXT=It's so", "BASE=b").stdout.splitlines()[-1]
    places, shown = ["--base", "b", "--run", "elsewhere"], ["--image", "my cat.jpg", "--text", "It's so"]
    assert shlex.split(last)[1:] == ["-m", "runs.report", *places, *shown]
    assert shlex.split(make("-n", "report").stdout.splitlines()[-1])[1:] == ["-m", "runs.report", "--base", "out"]


@pytest.mark.parametrize(
    "file, content",
    [
        ("checkpoints/step_00000007/state.json", '{"model_config": {}}'),
        ("state.json", '{"model_config": {}}'),
        ("config.json", '{"model_type": "gka-gpt"}'),
    ],
)
def test_figures_of_a_language_run_are_of_a_text(make, tmp_path, ready, file, content):
    path = tmp_path / "else where" / file
    path.parent.mkdir(parents=True)
    path.write_text(content)
    *_, line = make("-n", "figures", "RUN=else where", "TEXT=It's $5 for a $cat").stdout.splitlines()
    words = shlex.split(line)
    assert "nanochat_gka.draw --out out/figures --demo out/demo" in line
    assert words[words.index("--run") + 1] == "else where"
    assert words[words.index("--text") + 1] == "It's $5 for a $cat"
    refused = make("figures", "RUN=else where", "IMAGE=cat.jpg")
    assert "error: figures of a language run take TEXT='...', not IMAGE or MODEL\n" in refused.stderr
    path.write_text("damaged")
    assert "deit_gka.draw" in make("-n", "figures", "RUN=else where").stdout


@pytest.mark.parametrize(
    "settings, drawn",
    [
        ((), ["deit_gka", "nanochat_gka"]),
        (("TEXT=a cat",), ["nanochat_gka"]),
        (("IMAGE=cat.jpg",), ["deit_gka"]),
        (("MODEL=deit_small_patch16_224",), ["deit_gka"]),
    ],
)
def test_figures_of_the_demo_are_of_both_trainers(make, tmp_path, ready, settings, drawn):
    (tmp_path / "out/demo/runs/d4-gka-paper-400").mkdir(parents=True)
    assert re.findall(r"-m (\w+)\.draw", make("-n", "figures", *settings).stdout) == drawn


def test_the_page_is_of_the_named_run_or_the_demos(make):
    last = make("-n", "explore", "BASE=b", "RUN=elsewhere", "ARGS=--port 8000").stdout.splitlines()[-1]
    assert last.split()[1:] == ["-m", "runs.explore", "--demo", "b/demo", "--run", "elsewhere", "--port", "8000"]
    assert "--run" not in make("-n", "explore").stdout.splitlines()[-1]


def test_core_takes_the_named_run_and_bundle(make):
    last = make("-n", "eval-core", "BUNDLE=a b", "RUN=elsewhere", "NGPU=2").stdout.splitlines()[-1]
    words = core.words(core.CoreConfig(run=Path("elsewhere"), bundle="a b", ngpu=2), [])
    assert shlex.split(last) == [".venv/bin/python", *words]
    assert "--run out/runs/d12-softmax " in make("-n", "eval-core-base", "DEPTH=12").stdout


def test_a_prompt_reaches_the_command_as_it_is(make):
    last = make("-n", "sample", 'PROMPT=It\'s "so"; ls').stdout.splitlines()[-1]
    words = shlex.split(last)
    assert words[words.index("--prompt") + 1] == 'It\'s "so"; ls' and words[-1] == "--stream"


@pytest.mark.parametrize("target", ["eval-deit", "eval-bpb"])
def test_torchrun_leaves_our_flags_to_us(make, tmp_path, target):
    """It has a --run-path, and would take our --run for a short form of it."""
    line = make(
        "-n", target, "NGPU=2", "DATA=digits", f"RUN={tmp_path}/none", "ARGS=--device-type cpu"
    ).stdout.splitlines()[-1]
    python, m, launcher, *words = shlex.split(line)
    taken = torchrun.parse_args(words)
    assert (python, m, launcher) == (".venv/bin/python", "-m", "trainkit_gka.torchrun")
    assert taken.nproc_per_node == "2" and taken.run_path is False
    ours = taken.training_script_args
    assert ours[ours.index("--run") + 1] == f"{tmp_path}/none" and ours[-2:] == ["--device-type", "cpu"]
    assert taken.training_script == {"eval-deit": "deit_gka.evaluate", "eval-bpb": "nanochat_gka.evaluate"}[target]


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine may have a GPU")
def test_vision_without_images_or_gpu_says_what_is_missing(make):
    done = make("train-deit-ti")
    assert done.returncode == 2 and "no images and no GPU" in done.stderr and 'run "make demo"' in done.stderr
    done = make("ablate-projections", "DATA=digits")
    assert done.returncode == 2 and "no GPU is visible" in done.stderr and "--device-type cpu" in done.stderr
    assert "--data" not in make("-n", "eval-deit").stdout.splitlines()[-1]  # the run knows its images


@pytest.mark.parametrize("target", ["train-deit-ti", "ablate-projections"])
@pytest.mark.parametrize("data", ["/nope", "wds:/nope", "digit", "requirements.txt"])
def test_images_that_are_not_there_are_said_before_a_missing_gpu(make, target, data):
    done = make(target, f"DATA={data}")
    assert done.returncode == 2 and f"error: DATA={data}: there is no such folder. Give DATA=" in done.stderr


@pytest.mark.parametrize("data", [".", "wds:.", "hf:some/images", "hf-stream:some/images"])
def test_images_that_may_be_there_are_left_to_the_trainer(data):
    launcher.check_images({"DATA": data, "ARGS": "--device-type cpu"})


def test_a_dry_run_asks_the_trainer_alone(make, tmp_path, ready):
    """It needs no GPU, and fetches and packs nothing."""
    args = "ARGS=--dry-run --seed 3"
    [command] = commands(make("-n", "pretrain-d20", args))
    assert command[-3:] == ["--dry-run", "--seed", "3"] and "nanochat_gka.train" in command
    launcher.chain(["pretrain-d20", "train-deit-ti"], {"ARGS": "--dry-run", "DATA": "digits", "PYTHON": "python3"})
    assert len(commands(make("-n", "ablate-projections", "DATA=digits", args))) == 4


def test_the_demo_gets_only_settings_that_were_given(make):
    assert "runs.demo --out out/demo --wandb disabled" in make("-n", "demo").stdout
    assert (
        "runs.demo --out b/demo --ranks 2 --depth 6 --wandb" in make("-n", "demo", "NGPU=2", "DEPTH=6", "BASE=b").stdout
    )


def test_bits_per_byte_never_fetch_a_corpus(make):
    """A run knows its rows; only a corpus that is named on the command line is another choice."""
    for target, run in (("eval-bpb", "out/runs/d20-gka"), ("eval-bpb-base", "out/runs/d20-softmax")):
        lines = make("-n", target).stdout
        assert f"nanochat_gka.evaluate --results out/results.jsonl --run {run}" in lines and "--data" not in lines
        assert "nanochat_gka.corpus" not in lines and "nanochat_gka.pack" not in lines
    named = make("-n", "eval-bpb", "CORPUS=builtin", "VOCAB=4096", "SEQ=256", "RUN=elsewhere").stdout
    assert "--data out/packed/builtin-4096-256 --run elsewhere" in named and "nanochat_gka.corpus" not in named


def test_a_missing_corpus_folder_is_one_line(make, ready):
    done = make("tokenizer", "CORPUS=no/such/folder")
    assert done.returncode == 2 and not done.stdout
    assert "error: CORPUS=no/such/folder is neither fineweb nor builtin nor a folder or file\n" in done.stderr


def steps(make, *settings: str) -> list[list[str]]:
    """What `make tokenize` would run of ours."""
    lines = make("-n", "tokenize", "SEQ=128", "VOCAB=512", *settings).stdout.splitlines()
    return [shlex.split(line)[2:] for line in lines if "nanochat_gka" in line]


@pytest.mark.parametrize("name", ["notes", "notes/", "book.txt.gz"])
def test_your_own_files_are_made_into_a_corpus_first(make, tmp_path, ready, name):
    """Every time: they may have changed."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/only.parquet").touch()
    (tmp_path / "book.txt.gz").touch()
    for _ in range(2):
        corpus, tokenizer, pack = steps(make, f"CORPUS={name}", "COLUMN=body")
        made = corpus[-3]
        assert re.fullmatch(rf"out/corpus/{name.strip('/')}-\d+", made)
        assert corpus[1:] == ["--source", name.strip("/"), "--out", made, "--text-column", "body"]
        assert tokenizer[1:3] == pack[1:3] == ["--corpus", made]
        for finished in (tokenizer[-1] + "/tokenizer.json", pack[-1] + "/manifest.json"):
            (tmp_path / finished).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / finished).touch()


@pytest.mark.parametrize("names", [("a", "b"), ("train-00000-of-00002", "train-00001-of-00002"), ("shard_00000", "b")])
def test_other_parquet_files_side_by_side_are_made_into_a_corpus(make, tmp_path, ready, names):
    (tmp_path / "text").mkdir()
    for name in names:
        (tmp_path / "text" / f"{name}.parquet").touch()
    corpus, tokenizer, pack = steps(make, "CORPUS=text")
    assert corpus[:3] == ["nanochat_gka.corpus", "--source", "text"]
    assert tokenizer[1:3] == pack[1:3] == ["--corpus", corpus[-1]]


@pytest.mark.parametrize(
    "files", [("shard_00000.parquet", "shard_00001.parquet"), ("a.parquet", "b.parquet", "source.json")]
)
def test_shards_and_a_corpus_of_ours_are_read_as_they_are(make, tmp_path, ready, files):
    """Every step looks at them, each time."""
    (tmp_path / "text").mkdir()
    for name in (*files, "notes.md", ".hidden.parquet"):
        (tmp_path / "text" / name).touch()
    for _ in range(2):
        tokenizer, pack = steps(make, "CORPUS=text")
        assert tokenizer[1:3] == pack[1:3] == ["--corpus", "text"]
        for finished in (tokenizer[-1] + "/tokenizer.json", pack[-1] + "/manifest.json"):
            (tmp_path / finished).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / finished).touch()
    assert steps(make, "CORPUS=text", "COLUMN=body")[0][0] == "nanochat_gka.corpus"


def test_a_corpus_links_the_first_fetched_shards(make, tmp_path, ready):
    fetched = tmp_path / "out/corpus/fineweb"
    fetched.mkdir(parents=True)
    for number in range(4):
        (fetched / f"shard_{number}.parquet").write_text(str(number))
    line = next(line for line in make("-n", "data", "SHARDS=3").stdout.splitlines() if "finish-corpus" in line)
    for _ in range(2):
        subprocess.run(shlex.split(line), cwd=tmp_path, check=True)
    linked = tmp_path / "out/corpus/fineweb-3"
    assert sorted(path.name for path in linked.iterdir()) == [".complete", *(f"shard_{n}.parquet" for n in range(3))]
    assert (linked / "shard_2.parquet").samefile(fetched / "shard_2.parquet")


def test_own_corpora_have_a_checksum_in_their_name():
    """The names of folders made before must stay, or everything is packed again."""
    assert launcher.dataset("/some/where/text/", "170") == "text-" + posix_cksum("/some/where/text")
    assert launcher.dataset("/else/where/text", "170") != launcher.dataset("/some/where/text", "170")


def posix_cksum(text):
    done = subprocess.run(f"echo {text} | cksum", shell=True, capture_output=True, text=True)
    return done.stdout.split()[0]


@pytest.mark.parametrize("args, device", [("--device-type cpu", True), ("--device-type=cpu", True), ("--x cpu", False)])
def test_asking_for_the_cpu_is_a_device(args, device, monkeypatch):
    monkeypatch.setattr(launcher, "count_gpus", lambda: 0)
    assert launcher.has_device({"ARGS": args}) == device


@pytest.mark.parametrize("target", ["help", "tokenize"])
def test_a_missing_python_is_one_line(make, ready, target):
    done = make("-n", target, "PYTHON=python-is-missing")
    assert done.returncode == 2 and not done.stdout and "set PYTHON=python3.x" in done.stderr


@pytest.mark.parametrize("older", ["requirements.txt", "pyproject.toml"])
def test_the_environment_is_made_again_when_what_it_is_made_of_changes(make, tmp_path, ready, older):
    assert not commands(make("-n", "setup"))
    later = (tmp_path / ".venv/.installed").stat().st_mtime + 1
    os.utime(tmp_path / older, (later, later))
    assert commands(make("-n", "setup"))[-1] == ["touch", ".venv/.installed"]


def test_targets_named_together_share_their_steps_and_args_go_to_each(make, ready):
    lines = commands(make("-n", "-j4", "pretrain-d20", "tokenize", "sample", "ARGS=--x 1"))
    modules = [words[2] for words in lines if words[1] == "-m" and "gka" in words[2]]
    assert modules == [f"nanochat_gka.{name}" for name in ("corpus", "tokenizer", "pack", "train", "generate")]
    assert [words[-2:] == ["--x", "1"] for words in lines if "nanochat_gka" in words[2]] == [
        False,
        False,
        True,
        True,
        True,
    ]


@pytest.fixture
def scripted(tmp_path, ready):
    """An environment whose Python is a script for the shell, called with the words of a command."""

    def write(script):
        python = tmp_path / ".venv/bin/python"
        python.parent.mkdir()
        python.write_text("#!/bin/sh\n" + script)
        python.chmod(0o755)

    return write


@pytest.mark.parametrize("code", [2, 75])
def test_a_step_that_fails_ends_the_chain_with_its_code(make, tmp_path, scripted, code):
    scripted(f"echo $2 >> calls; [ $2 != nanochat_gka.tokenizer ] || exit {code}")
    done = make("tokenize", "CORPUS=builtin")
    assert done.returncode == 2 and f"Error {code}\n" in done.stderr
    assert (tmp_path / "calls").read_text().split() == ["nanochat_gka.corpus", "nanochat_gka.tokenizer"]


@pytest.mark.parametrize("target, called", [("sample", "generate"), ("tokenize", "corpus")], ids=["last", "a step"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_the_command_which_saves_and_no_other_starts(make, tmp_path, scripted, target, called, number):
    save = "trap 'echo saved >> calls; exit 0' TERM HUP"
    scripted(f"{save}; echo $2 >> calls; echo $PPID > parent; echo $$ > own; while :; do sleep 0.05; done")
    settings = {
        "GOALS": target,
        "SETTINGS": "CORPUS PYTHON NGPU",
        "CORPUS": "builtin",
        "PYTHON": sys.executable,
        "NGPU": "1",
    }
    words = [sys.executable, "-m", "runs.make"]
    with subprocess.Popen(words, cwd=tmp_path, env={**os.environ, **settings}, stdout=subprocess.DEVNULL) as process:
        while not (tmp_path / "own").exists() or not (tmp_path / "own").read_text().strip():
            assert process.poll() is None
            time.sleep(0.02)
        own = int((tmp_path / "own").read_text())
        assert (own == process.pid) == (target == "sample")  # the last command takes the launcher's place
        process.send_signal(number)
        try:
            assert process.wait(timeout=20) == (0 if target == "sample" else 128 + number)
        except subprocess.TimeoutExpired:
            os.kill(own, signal.SIGKILL)
            process.kill()
            raise
    assert (tmp_path / "calls").read_text().split() == [f"nanochat_gka.{called}", "saved"]


def test_help_may_be_cut_short():
    done = subprocess.run("make -s help | head -n 1", shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "Start\n" and "Traceback" not in done.stderr


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


def test_help_lists_every_target_on_one_screen(make):
    lines = make("help", "NGPU=0").stdout.splitlines()
    listed = " ".join(line[2:27] for line in lines if line.startswith("  "))
    assert set(TARGETS) <= set(listed.split()) and any("NGPU=0 processes" in line for line in lines)
    assert len(lines) <= 40 and max(map(len, lines)) <= 100


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_of_the_list_is_known(make, ready, target):
    assert make("-n", target).returncode == 0


def test_kinds_of_vision_targets_are_those_of_the_project():
    names = {"softmax" if kind == "base" else kind: word for kind, word in words.VISION_KINDS.items()}
    assert list(names) == list(KINDS)
    for size, timm_size in words.VISION_SIZES.items():
        for kind, name in zip(words.VISION_KINDS, names):
            assert words.vision_model(f"{size}-{kind}") == registry.model_name(timm_size, name)


def test_setup_after_clean_makes_the_environment_that_clean_deletes(make):
    lines = make("-n", "clean", "setup").stdout
    assert "rm -rf .venv" in lines and "-m venv .venv" in lines.partition("rm -rf .venv")[2]
    assert "--ranks" not in make("-n", "demo", "NGPU=0").stdout


def test_a_dry_run_prepares_nothing_however_it_is_spelled(make):
    for flag in ("--dry-run", "--dry_run"):
        lines = make("-n", "pretrain-d20", f"ARGS={flag}").stdout.splitlines()
        assert lines[-1].endswith(flag) and "nanochat_gka.train" in lines[-1]
        assert not any("nanochat_gka.corpus" in line or "nanochat_gka.pack" in line for line in lines)
