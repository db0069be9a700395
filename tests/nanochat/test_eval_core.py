"""The CORE command: files, continuing, bad tasks beside good ones, ranks; and fetching the bundle from a server that misbehaves."""

import dataclasses
import hashlib
import http.server
import json
import os
import random
import re
import shutil
import threading
import zipfile

import pytest
import torch

import tiny
import tiny_core
from nanochat_gka import eval_core
from nanochat_gka.core_metric import fetch, task_scorer
from nanochat_gka.core_metric.bundle import read_tasks
from nanochat_gka.data.tokenizer import Tokenizer
from nanochat_gka.eval_core import CoreConfig, main
from runs.bench.core_naive import naive_task
from tiny_gpt import SHAPE, awake, write_run
from trainkit.cli import UserError, run
from trainkit.distributed import Runtime
from trainkit.progress import read_lines

MODULE = "nanochat_gka.eval_core"


@pytest.fixture(scope="module")
def world(packed, tmp_path_factory):
    """A run, its model, its tokenizer, and a bundle."""
    root = tmp_path_factory.mktemp("eval_core")
    tokenizer = Tokenizer.load(packed / "tokenizer")
    model = awake(dataclasses.replace(SHAPE, sequence_len=64, vocab_size=tokenizer.vocab_size, attention="gka"))
    write_run(root / "tiny-gka", model, packed / "tokenizer")
    return root / "tiny-gka", model, tokenizer, tiny_core.write_bundle(root / "bundle")


def evaluate(world, out, *more, bundle=None):
    """The command in this process; returns its exit code."""
    flags = ["--run", world[0], "--bundle", bundle or world[3], "--out", out, "--device-type", "cpu", *more]
    try:
        run(main, CoreConfig, list(map(str, flags)))
    except SystemExit as left:
        return left.code
    return 0


MEAN = f"mean of 5 tasks (max {tiny_core.COUNT} each)"


def tasks_of(path):
    """The lines of a results file that are of one task."""
    return [line for line in read_lines(path) if line["kind"] == "core"]


def table(path):
    return {row.split(",")[0].strip(): row.split(",")[1].strip() for row in path.read_text().splitlines()}


def test_scores_are_the_naive_ones_in_files_named_by_model_and_step(world, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(task_scorer, "READ_AHEAD", 4)
    assert evaluate(world, tmp_path) == 0
    _, model, tokenizer, bundle = world
    found = table(tmp_path / "tiny-gka_step000007.csv")
    for label in tiny_core.TASKS:
        assert found[label] == f"{naive_task(model, tokenizer, bundle, label).accuracy:.6f}"
    lines = tasks_of(tmp_path / "tiny-gka_step000007.jsonl")
    assert [line["config"]["task"] for line in lines] == list(tiny_core.TASKS)
    assert all(
        line["metrics"]["examples"] == tiny_core.COUNT and line["metrics"]["examples_per_second"] > 0 for line in lines
    )
    printed = capsys.readouterr().out
    assert "CORE:" not in printed  # five tasks are not CORE
    (mean,) = [line for line in read_lines(tmp_path / "tiny-gka_step000007.jsonl") if line["kind"] == "core_mean"]
    assert (
        mean["metrics"]["name"] == MEAN
        and f"{mean['metrics']['centered']:.6f}" in (tmp_path / "tiny-gka_step000007.csv").read_text()
    )
    assert printed.count(MEAN) == 2 and MEAN in found  # the table, the last line, the CSV
    assert (
        evaluate(world, tmp_path) == 0 and len(read_lines(tmp_path / "tiny-gka_step000007.jsonl")) == 6
    )  # nothing is new


def test_it_continues_where_it_stopped_and_scores_again_what_changed(world, tmp_path, capsys):
    bundle = tmp_path / "bundle"
    shutil.copytree(world[3], bundle)
    out = tmp_path / "out"
    log = out / "tiny-gka_step000007.jsonl"
    assert evaluate(world, out, "--tasks", "copa", "winograd", bundle=bundle) == 0
    assert len(tasks_of(log)) == 2
    assert evaluate(world, out, bundle=bundle) == 0
    assert [line["config"]["task"] for line in tasks_of(log)] == [
        "copa",
        "winograd",
        "arc_easy",
        "lambada_openai",
        "jeopardy",
    ]
    assert evaluate(world, out, "--max-per-task", 6, bundle=bundle) == 0  # other questions
    assert [line["metrics"]["examples"] for line in tasks_of(log)] == [tiny_core.COUNT] * 5 + [6] * 5
    assert evaluate(world, out, "--tasks", "copa", bundle=bundle) == 0  # nothing new, and nothing forgotten
    assert set(table(log.with_suffix(".csv"))) == {*tiny_core.TASKS, "Task", MEAN}
    assert set(table(out / "tiny-gka_step000007_max6.csv")) == {
        *tiny_core.TASKS,
        "Task",
        "mean of 5 tasks (max 6 each)",
    }
    assert len(tasks_of(log)) == 10
    with open(bundle / "eval_data/reasoning/copa.jsonl", "a") as file:
        file.write(json.dumps({"query": "the", "choices": ["a", "of"], "gold": 0}) + "\n")
    assert evaluate(world, out, bundle=bundle) == 0  # other data, of one task
    assert [(line["config"]["task"], line["metrics"]["examples"]) for line in tasks_of(log)[10:]] == [
        ("copa", tiny_core.COUNT + 1)
    ]


def test_a_score_is_known_by_everything_it_depends_on(world, tmp_path):
    """A line of the file is used again only if the weights, the data, and how it was asked are the same."""
    runtime, subject = (
        Runtime(0, 1, torch.device("cpu")),
        eval_core.open_model(CoreConfig(run=world[0]), torch.device("cpu")),
    )
    task = read_tasks(world[3], ["jeopardy"])[0]

    def identity(task=task, subject=subject, **flags):
        return eval_core.Evaluation(CoreConfig(out=tmp_path, **flags), runtime, subject).file.identity(task)

    other = tmp_path / "other.jsonl"
    other.write_text("{}")
    changed = [identity(dataclasses.replace(task, **{key: value})) for key, value in
               (("kind", "schema"), ("shots", 2), ("delimiter", " "), ("label", "x"), ("file", other))]  # fmt: skip
    changed += [
        identity(max_seq_len=20),
        identity(max_per_task=5),
        identity(subject=dataclasses.replace(subject, sha256="0")),
    ]
    assert len({json.dumps(each) for each in [identity(), *changed]}) == 1 + len(changed)
    assert identity() == identity(batch_tokens=7, prefix_reuse=False, max_seq_len=10**9)  # these change nothing


def test_a_bad_task_is_one_error_and_costs_no_other(world, tmp_path):
    bundle = tmp_path / "bundle"
    shutil.copytree(world[3], bundle)
    path = bundle / "eval_data/language/winograd.jsonl"
    path.write_text(path.read_text() + "{oops\n")
    done = tiny.call(
        MODULE, "--run", world[0], "--bundle", bundle, "--out", tmp_path / "out", "--device-type", "cpu", check=False
    )
    tiny.assert_one_line_error(done, rf"winograd.jsonl:{tiny_core.COUNT + 1}: not a JSON record")
    assert set(table(tmp_path / "out/tiny-gka_step000007.csv")) == {
        *tiny_core.TASKS,
        "Task",
        "mean of 4 tasks (max 15 each)",
    } - {"winograd"}
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert evaluate(world, tmp_path / "out", bundle=bundle) == 0
    assert len(tasks_of(tmp_path / "out/tiny-gka_step000007.jsonl")) == 5


def test_a_model_of_no_numbers_has_no_score(world, packed, tmp_path, capsys):
    model = awake(world[1].config)
    with torch.no_grad():
        model.transformer.h[-1].mlp.c_proj.weight.fill_(float("nan"))
    broken = write_run(tmp_path / "broken", model, packed / "tokenizer")
    assert evaluate((broken, *world[1:]), tmp_path / "out", "--tasks", "copa") == 2
    assert "copa: the model's losses are not numbers" in capsys.readouterr().err
    assert tasks_of(tmp_path / "out" / "broken_step000007.jsonl") == []


def test_a_line_that_was_cut_short_swallows_no_other(world, tmp_path):
    log = tmp_path / "tiny-gka_step000007.jsonl"
    assert evaluate(world, tmp_path, "--tasks", "copa", "winograd") == 0
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:2])[:-40])  # in the second task's line
    with open(log) as file:
        assert len(file.readlines()) == 2
    assert evaluate(world, tmp_path, "--tasks", "copa", "winograd") == 0
    assert [line["config"]["task"] for line in tasks_of(log)] == ["copa", "winograd"]


def test_a_place_that_cannot_be_written_is_named_before_anything_is_scored(world, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(task_scorer, "judge", lambda *_: pytest.fail("scored"))
    (tmp_path / "tiny-gka_step000007.jsonl").mkdir()
    assert evaluate(world, tmp_path) == 2
    assert "tiny-gka_step000007.jsonl" in capsys.readouterr().err


def test_names_with_brackets_are_shown_as_they_are(world, tmp_path, capsys):
    assert evaluate(world, tmp_path / "x[bold]y[", "--tasks", "copa") == 0
    assert "x[bold]y[" in capsys.readouterr().out.replace("\n", "")


def test_a_question_that_cannot_be_asked_is_named_whichever_rank_has_it(world, tmp_path):
    """A continuation that the tokenizer merges into its context, in the second rank's share; both must go on, and score the other tasks."""
    bundle = tmp_path / "bundle"
    shutil.copytree(world[3], bundle)
    manifest = (bundle / "core.yaml").read_text()
    lambada = manifest.index("  num_fewshot", manifest.index("lambada_openai"))
    (bundle / "core.yaml").write_text(manifest[:lambada] + '  continuation_delimiter: ""\n' + manifest[lambada:])
    path = bundle / "eval_data/language/lambada.jsonl"
    good = [{"context": "the", "continuation": " kernel"}] * tiny_core.COUNT
    order = [*range(tiny_core.COUNT)]
    random.Random(1337).shuffle(order)
    good[order[5]] = {"context": "the ker", "continuation": "nel"}
    path.write_text("".join(json.dumps(example) + "\n" for example in good))
    done = tiny.call(
        MODULE,
        "--run",
        world[0],
        "--bundle",
        bundle,
        "--out",
        tmp_path / "out",
        "--device-type",
        "cpu",
        ranks=2,
        check=False,
        real=True,
    )
    assert done.returncode != 0
    assert (
        done.stderr.count(
            "lambada.jsonl: lambada_openai cannot be asked with this tokenizer: it merges 'nel' into its context"
        )
        == 1
    )
    evaluate(world, tmp_path / "one")
    two, one = (table(tmp_path / name / "tiny-gka_step000007.csv") for name in ("out", "one"))
    assert {key: value for key, value in one.items() if key in tiny_core.TASKS and key != "lambada_openai"} == {
        key: value for key, value in two.items() if key in tiny_core.TASKS
    }


@pytest.mark.parametrize(
    "more,message",
    [
        (["--max-per-task", "3"], "--max-per-task 3 is too few for jeopardy: 3 shots and a question"),
        (["--hf-path", "gpt2", "--step", "3"], "--step is for a run of ours; a model of --hf-path has no steps"),
        (["--max-per-task", "0"], "--max-per-task must be at least 1"),
        (["--tasks", "copa", "nope"], "--tasks nope: .* has no nope"),
        (["--batch-tokens", "-1"], "--batch-tokens must be at least 0"),
        (["--step", "99"], "no checkpoint in .* at step 99"),
        (["--bundle", "/nonexistent"], "no CORE bundle in /nonexistent"),
        (["--bundle", "/nonexistent.zip"], "/nonexistent.zip: No such file"),
    ],
)
def test_bad_flags_are_one_line(world, tmp_path, more, message, capsys):
    assert evaluate(world, tmp_path, *more) == 2
    assert re.search(message, capsys.readouterr().err)


# Fetching


def open_bundle(config):
    return config.open_bundle(config.out)


class Server(http.server.BaseHTTPRequestHandler):
    """Serves `content` with ranges and an ETag; `cuts` are the bytes after which it hangs up, one for each request."""

    content, etag, cuts, requests = b"", "", [], []

    def do_GET(self):
        cls = type(self)
        first = 0
        wanted = self.headers.get("Range")
        if wanted and self.headers.get("If-Range") == cls.etag:
            first = int(wanted.removeprefix("bytes=").removesuffix("-"))
        cls.requests.append(first)
        self.send_response(206 if first else 200)
        self.send_header("ETag", cls.etag)
        self.send_header("Content-Length", str(len(cls.content) - first))
        self.end_headers()
        body = cls.content[first:]
        self.wfile.write(body[: cls.cuts.pop(0)] if cls.cuts else body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(world, tmp_path, monkeypatch):
    """An address that serves the bundle as the real one is packed: everything below eval_bundle/."""
    archive = tmp_path / "served.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for path in sorted(world[3].rglob("*")):
            packed.write(path, f"eval_bundle/{path.relative_to(world[3])}")
    Server.content, Server.cuts, Server.requests = archive.read_bytes(), [], []
    Server.etag = f'"{hashlib.md5(Server.content).hexdigest()}"'
    monkeypatch.setattr(fetch.time, "sleep", lambda seconds: None)
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}/eval_bundle.zip"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def same_files(a, b):
    def files(folder):
        return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    return files(a) == files(b)


def test_a_download_that_is_cut_twice_continues_and_is_whole(world, server, tmp_path):
    Server.cuts = [700, 300]
    folder = open_bundle(CoreConfig(out=tmp_path / "out", bundle_url=server))
    assert Server.requests == [0, 700, 1000]
    assert same_files(folder, world[3]) and {path.name for path in (tmp_path / "out").iterdir()} == {
        "eval_bundle",
        ".lock",
    }
    assert (
        open_bundle(CoreConfig(out=tmp_path / "out", bundle_url=server)) == folder and len(Server.requests) == 3
    )  # not again


def test_what_has_arrived_survives_giving_up_and_a_changed_file_starts_over(world, server, tmp_path):
    config = CoreConfig(out=tmp_path / "out", bundle_url=server)
    Server.cuts = [200] + [0] * 20
    with pytest.raises(
        UserError,
        match=r"could not download http.*: 200 of \d+ bytes arrived. Check the network and run the same command again",
    ):
        open_bundle(config)
    Server.cuts, Server.requests = [50], []
    Server.etag = '"another"'
    assert same_files(open_bundle(config), world[3])
    assert Server.requests == [0, 50]


def test_a_damaged_download_is_fetched_again(world, server, tmp_path):
    good = Server.content
    Server.content = good[:500] + bytes([good[500] ^ 1]) + good[501:]
    with pytest.raises(UserError, match="it arrived damaged, its MD5 is not the server's"):
        open_bundle(CoreConfig(out=tmp_path / "out", bundle_url=server))
    Server.content = good
    assert same_files(open_bundle(CoreConfig(out=tmp_path / "out", bundle_url=server)), world[3])


def test_a_folder_in_the_way_costs_no_download_and_an_interrupted_unpacking_none_either(
    world, server, tmp_path, monkeypatch
):
    config = CoreConfig(out=tmp_path / "out", bundle_url=server)
    (tmp_path / "out/eval_bundle/mine").mkdir(parents=True)
    with pytest.raises(UserError, match="eval_bundle is in the way"):
        open_bundle(config)
    assert Server.requests == []
    shutil.rmtree(tmp_path / "out/eval_bundle")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(fetch.shutil, "copyfileobj", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        open_bundle(config)
    assert same_files(open_bundle(config), world[3]) and Server.requests == [0]


def test_lines_that_are_no_records_are_passed_over(world, tmp_path):
    (tmp_path / "tiny-gka_step000007.jsonl").write_bytes(b'[]\n5\n{"config": 1}\nnull\n\xff\xfe\n')
    assert evaluate(world, tmp_path, "--tasks", "copa") == 0


def test_an_address_that_is_not_there_is_one_line(tmp_path, server):
    with pytest.raises(UserError, match=r"could not download http://127\.0\.0\.1:9/"):
        open_bundle(CoreConfig(out=tmp_path / "out", bundle_url="http://127.0.0.1:9/x.zip"))
    with pytest.raises(UserError, match="must begin with https:// or http://"):
        open_bundle(CoreConfig(out=tmp_path / "out", bundle_url="file:///etc/passwd"))


def make_zip(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def link(name, target):
    info = zipfile.ZipInfo(name)
    info.external_attr = 0o120777 << 16
    return info, target


@pytest.mark.parametrize(
    "members,message",
    [
        ([("core.yaml", ""), ("../evil", "x")], "not safe to unpack: '../evil'"),
        ([("core.yaml", ""), ("/tmp/evil", "x")], "not safe to unpack: '/tmp/evil'"),
        ([("core.yaml", ""), ("a\\..\\..\\evil", "x")], "not safe to unpack"),
        ([("core.yaml", ""), ("C:/evil", "x")], "not safe to unpack"),
        ([("core.yaml", ""), (".", "x")], "not safe to unpack"),
        ([("core.yaml", ""), link("eval_data", "/etc")], "not safe to unpack: 'eval_data'"),
        ([("readme", "")], "is not a CORE bundle: it has no core.yaml"),
    ],
    ids=str,
)
def test_archives_that_reach_outside_or_are_no_bundle_leave_nothing(members, message, tmp_path):
    path = make_zip(tmp_path / "bad.zip", members)
    with pytest.raises(UserError, match=message):
        open_bundle(CoreConfig(out=tmp_path / "out", bundle=path))
    assert not (tmp_path / "evil").exists() and os.listdir(tmp_path / "out") == [".lock"] and path.exists()


def test_a_damaged_or_huge_archive_leaves_nothing(world, tmp_path, monkeypatch):
    path = make_zip(tmp_path / "bundle.zip", [("core.yaml", "icl_tasks: []" * 50)])
    content = bytearray(path.read_bytes())
    content[60] ^= 1
    (tmp_path / "damaged.zip").write_bytes(content)
    (tmp_path / "cut.zip").write_bytes(path.read_bytes()[:-30])
    for name in ("damaged.zip", "cut.zip"):
        with pytest.raises(UserError, match="is not a usable zip file"):
            open_bundle(CoreConfig(out=tmp_path / "out", bundle=tmp_path / name))
    monkeypatch.setattr(fetch, "MAX_BYTES", 100)
    with pytest.raises(UserError, match="would unpack to more than"):
        open_bundle(CoreConfig(out=tmp_path / "out", bundle=path))
    assert os.listdir(tmp_path / "out") == [".lock"]


def test_a_zip_of_ones_own_is_unpacked_once(world, tmp_path):
    path = make_zip(
        tmp_path / "mine.zip",
        [(f"x/y/{file.relative_to(world[3])}", file.read_bytes()) for file in world[3].rglob("*") if file.is_file()],
    )
    config = CoreConfig(out=tmp_path / "out", bundle=path)
    folder = open_bundle(config)
    assert same_files(folder, world[3]) and open_bundle(config) == folder
