"""The Makefile as a user meets it: what it would run, and what it says when it cannot."""

import ast
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import run as torchrun

from makefile import TARGETS
from runs import names

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def test_dry_run_of_pretraining_shows_the_whole_chain(make):
    lines = make("-n", "pretrain-d20", "NGPU=7").stdout
    order = ["names check-gpu", "venv .venv", "pip install", "nanochat_gka.corpus --source fineweb", "finish-corpus"]
    order += ["nanochat_gka.tokenizer", "nanochat_gka.pack", "runs.paper.gpt_d20_gka"]
    positions = [lines.index(step) for step in order]
    assert positions == sorted(positions)
    assert "--sequence-len 2048" in lines and "--vocab-size 32768" in lines and "--num-shards 170" in lines
    data = "--data out/packed/fineweb-170-32768-2048"
    assert f"gpt_d20_gka {data} --depth 20 --base out --ngpu 7 --wandb disabled -- \n" in lines
    settings = ("DEPTH=12", "WANDB_MODE=offline", "ARGS=--device-batch-size 8", "NGPU=1", "BASE=b")
    last = make("-n", "pretrain-d20-base", *settings).stdout.splitlines()[-1]
    assert last.startswith(".venv/bin/python -m runs.paper.gpt_d20_softmax --data b/packed/fineweb-170-32768-2048")
    assert last.endswith("--depth 12 --base b --ngpu 1 --wandb offline -- --device-batch-size 8")
    best = make("-n", "pretrain-d20-best", *settings).stdout.splitlines()[-1]
    assert best == last.replace("runs.paper.gpt_d20_softmax", "runs.study.gpt_d20_best")


def test_the_study_packs_short_rows_of_the_builtin_text_unless_told_otherwise(make):
    lines = make("-n", "study", "ARGS=--list").stdout.splitlines()
    assert lines[-1].endswith("-m runs.study --data out/packed/builtin-4096-512-whole --runs out/study --list")
    assert any("nanochat_gka.pack" in line and "--split-documents no" in line for line in lines)  # its results' rows
    assert "--split-documents" not in make("-n", "tokenize", "CORPUS=builtin").stdout
    assert "--list" not in lines[-2] and "--sequence-len 512" in lines[-2] and "source builtin" in "".join(lines)
    last = make("-n", "study", "CORPUS=fineweb", "SHARDS=8", "BASE=b").stdout.splitlines()[-1]
    assert last.endswith("--data b/packed/fineweb-8-4096-512 --runs b/study ")


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
    assert "runs.paper.gpt_d20_gka" in lines
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
    # The alternative that it names passes the check.
    assert make("check-gpu", "ARGS=--device-type cpu --num-iterations 100").returncode == 0


@pytest.mark.parametrize(
    "target, name", [("train-deit-ti", "ti-gka"), ("train-deit-s-vlt", "s-vlt"), ("train-deit-b-base", "b-base")]
)
def test_vision_targets_name_their_experiment(make, target, name):
    args = "ARGS=--epochs 2 --device-type cpu"
    last = make("-n", target, "DATA=/some/images", "NGPU=7", args).stdout.splitlines()[-1]
    assert last.startswith(f".venv/bin/python -m runs.paper.deit {name} --data /some/images")
    assert last.endswith("--base out --ngpu 7 --wandb disabled -- --epochs 2 --device-type cpu")
    assert "--model resnet18 " in make("-n", target, "DATA=x", "MODEL=resnet18", "ARGS=--device-type cpu").stdout


def test_the_ablation_trains_on_the_images_and_reads_the_runs(make):
    last = make("-n", "ablate-projections", "DATA=digits", "ARGS=--device-type cpu").stdout.splitlines()[-1]
    assert "runs.paper.ablation --runs out/runs --data digits --base out " in last


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
    assert "runs.paper.core --run elsewhere --bundle 'a b' --base out --ngpu 2 -- " in last
    assert "--run out/runs/d12-softmax  --base" in make("-n", "eval-core-base", "DEPTH=12").stdout


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
def test_images_that_may_be_there_are_left_to_the_trainer(make, data):
    assert make("check-images", f"DATA={data}", "ARGS=--device-type cpu").returncode == 0


def test_the_demo_gets_only_settings_that_were_given(make):
    assert "runs.demo --out out/demo  --wandb disabled" in make("-n", "demo").stdout
    assert (
        "runs.demo --out b/demo --ranks 2 --depth 6 --wandb" in make("-n", "demo", "NGPU=2", "DEPTH=6", "BASE=b").stdout
    )


def test_bits_per_byte_never_fetch_a_corpus(make):
    """A run knows its rows; only a corpus that is named on the command line is another choice."""
    for target, run in (("eval-bpb", "out/runs/d20-gka"), ("eval-bpb-base", "out/runs/d20-softmax")):
        lines = make("-n", target).stdout
        assert (
            re.search(rf"nanochat_gka.evaluate --results out/results.jsonl +--run {run}", lines)
            and "--data" not in lines
        )
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


def test_a_corpus_links_the_first_fetched_shards(tmp_path):
    fetched = tmp_path / "corpus/fineweb"
    fetched.mkdir(parents=True)
    for number in range(4):
        (fetched / f"shard_{number}.parquet").write_text(str(number))
    for _ in range(2):
        names.finish_corpus({"BASE": str(tmp_path), "SHARDS": "3"})
    linked = tmp_path / "corpus/fineweb-3"
    assert sorted(path.name for path in linked.iterdir()) == [".complete", *(f"shard_{n}.parquet" for n in range(3))]
    assert (linked / "shard_2.parquet").samefile(fetched / "shard_2.parquet")


def test_own_corpora_have_a_checksum_in_their_name():
    """The names of folders made before must stay, or everything is packed again."""
    assert names.dataset("/some/where/text/", "170") == "text-" + posix_cksum("/some/where/text")
    assert names.dataset("/else/where/text", "170") != names.dataset("/some/where/text", "170")


def posix_cksum(text):
    done = subprocess.run(f"echo {text} | cksum", shell=True, capture_output=True, text=True)
    return done.stdout.split()[0]


@pytest.mark.parametrize("args, device", [("--device-type cpu", True), ("--device-type=cpu", True), ("--x cpu", False)])
def test_asking_for_the_cpu_is_a_device(args, device, monkeypatch):
    monkeypatch.setattr(names, "count_gpus", lambda: 0)
    assert names.has_device({"ARGS": args}) == device


@pytest.mark.parametrize("target", ["help", "tokenize", "eval-bpb"])
def test_a_missing_python_is_one_line(make, ready, target):
    """Without the names that it works out, commands would run with empty paths."""
    done = make("-n", target, "PYTHON=python-is-missing")
    assert done.returncode == 2 and not done.stdout and "set PYTHON=python3.x" in done.stderr


def test_help_may_be_cut_short():
    done = subprocess.run("make -s help | head -n 1", shell=True, cwd=ROOT, capture_output=True, text=True)
    assert "make help" in done.stdout and "Traceback" not in done.stderr


def test_names_need_nothing_but_an_old_python():
    """make runs it before there is an environment, with whatever Python it finds."""
    for name in ("names", "settings"):
        tree = ast.parse((ROOT / f"runs/{name}.py").read_text(), feature_version=(3, 8))
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert imported <= {*sys.stdlib_module_names, "runs.settings"}


def test_help_lists_every_public_target(make):
    listed = re.findall(r"^  make ([a-z0-9-]+)", make("help").stdout, re.MULTILINE)
    assert {name for name in TARGETS if not name.startswith("check-")} == set(listed)
    assert "NGPU=0 processes" in make("help", "NGPU=0").stdout
