"""CORE's bundle: fetched from servers that misbehave, unpacked only where it belongs, read task by task."""

import hashlib
import http.server
import os
import threading
import zipfile

import pytest

import tiny
import tiny_core
from nanochat_gka.core_metric import fetch
from nanochat_gka.core_metric.bundle import read_tasks
from nanochat_gka.core_metric.fetch import BundleFlags
from trainkit_gka.cli import PassingFault

# Reading


def test_tasks_are_chosen_by_label_and_by_set(bundle):
    assert [task.label for task in read_tasks(bundle)] == list(tiny_core.TASKS)
    assert [task.label for task in read_tasks(bundle, ["jeopardy", "copa"])] == ["copa", "jeopardy"]
    task = read_tasks(bundle, ["arc_easy"])[0]
    assert (task.kind, task.shots, task.delimiter, task.baseline) == ("multiple_choice", 2, "\nAnswer: ", 25.0)
    assert read_tasks(bundle, ["copa"])[0].delimiter == " "
    for name, missing in (("paper", "hellaswag_zeroshot"), ("core", "boolq"), ("nonsense", "nonsense")):
        with tiny.one_line_error(rf"--tasks {name}: .*{missing}"):
            read_tasks(bundle, [name])


COPA, TASKS, BASELINES = "eval_data/reasoning/copa.jsonl", "core.yaml", "eval_meta_data.csv"
# File of the bundle; text in it that is replaced ("": the end); by what (None: the file is deleted); the error.
OF_A_TASK = [
    (COPA, "", None, "copa cannot be read: .*copa.jsonl"),
    (COPA, "", "\n{oops\n", "copa.jsonl:17"),
    (COPA, "", '{"choices": ["a"], "gold": 0}', "copa.jsonl:16: query"),
    (COPA, "", '{"query": "q", "choices": ["a"], "gold": 1}', "copa.jsonl:16: .*gold"),
    (COPA, "", '{"query": "q", "choices": "ab", "gold": 0}', "copa.jsonl:16: .*choices"),
    (COPA, "", '{"query": "q", "choices": ["a"]}', "copa.jsonl:16: gold"),
    (COPA, "", "[" * 200_000, "copa.jsonl:16"),
    (COPA, "", '"' + "a" * 2**20 + '"', "copa.jsonl:16: .*1,048,578 bytes"),
    (TASKS, "multiple_choice", "essay", "icl_task_type 'essay'"),
    (BASELINES, "copa,", "x,", "copa has no random baseline"),
    (BASELINES, "copa,,,,,50", "copa,,,,,100", "copa has no random baseline"),
    (BASELINES, "copa,,,,,50", "copa,,,,,nan", "copa has no random baseline"),
]
OF_THE_BUNDLE = [
    (TASKS, "", None, "core.yaml cannot be read"),
    (TASKS, "", "\n  - {label: copa\n", "core.yaml is not"),
    (TASKS, "label: copa", "label: !!python/object/apply:os.getcwd []", "core.yaml is not"),
    (TASKS, "reasoning/", "../../", "dataset_uri .*copa.jsonl leads out of"),
    (TASKS, "reasoning/copa.jsonl", '"a\\0"', "dataset_uri .* leads out of"),
    (TASKS, "", "#" * 2**18, r"core.yaml has 26\d,\d+ bytes"),
    (TASKS, "icl_tasks", "[" * 1000, "core.yaml is not"),
    (TASKS, "icl_tasks", "icl_tasks: []\nx", "core.yaml is not"),
    *((TASKS, "- 0\n", f"- {shots}\n", "core.yaml is not .*num_fewshot") for shots in ("-1", "1.5", ".inf", "true")),
    (BASELINES, "Random", "Chance", "Random baseline"),
]


@pytest.mark.parametrize("file, old, new, message", OF_A_TASK + OF_THE_BUNDLE, ids=lambda text: (text or "-")[:25])
def test_a_fault_is_one_line_and_that_of_a_task_leaves_the_others_readable(file, old, new, message, tmp_path):
    folder, tasks = tiny_core.write_bundle(tmp_path / "bundle"), []
    text = (folder / file).read_text()
    (folder / file).write_text(text.replace(old, new or "", 1) if old else text + (new or ""))
    if new is None:
        (folder / file).unlink()
    with tiny.one_line_error(message):
        tasks = read_tasks(folder)
        tasks[0].examples()
    assert len(tasks) == (5 if (file, old, new, message) in OF_A_TASK else 0)
    assert all(task.examples() for task in tasks[1:])


# Fetching


class Server(http.server.BaseHTTPRequestHandler):
    """Serves `content` with ranges and its MD5; `cuts` are the bytes after which it hangs up, one for each request."""

    content, damage, cuts, requests = b"", b"", [], []

    def do_GET(self):
        cls, first = type(self), int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        cls.requests.append(first)
        self.send_response(206 if first else 200)
        self.send_header("ETag", f'"{hashlib.md5(cls.content).hexdigest()}"')
        self.send_header("Content-Length", str(len(cls.content) - first))
        self.end_headers()
        body = (cls.damage + cls.content[len(cls.damage) :])[first:]
        self.wfile.write(body[: cls.cuts.pop(0)] if cls.cuts else body)

    def log_message(self, *args):
        pass


@pytest.fixture
def flags(bundle, tmp_path, monkeypatch):
    """Flags with an address that serves the bundle as the real one is packed: everything below eval_bundle/."""
    served = make_zip(tmp_path / "served.zip", [(f"eval_bundle/{name}", text) for name, text in files(bundle).items()])
    Server.content, Server.damage, Server.cuts, Server.requests = served.read_bytes(), b"", [], []
    monkeypatch.setattr(fetch.time, "sleep", lambda seconds: None)
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=httpd.serve_forever, args=(0.05,)).start()
    yield BundleFlags(bundle_url=f"http://127.0.0.1:{httpd.server_port}/eval_bundle.zip")
    httpd.shutdown()
    httpd.server_close()


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def make_zip(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def test_an_interrupted_download_continues_in_this_process_and_the_next(flags, bundle, tmp_path):
    Server.cuts, out = [700, 300, *[0] * 20], tmp_path / "out"
    with pytest.raises(PassingFault, match=r"1000 of \d+ bytes arrived.*run the same command again"):
        flags.open_bundle(out)
    Server.cuts = [50]
    unpacked = flags.open_bundle(out)
    assert Server.requests == [0, 700, 1000, 1000, 1000, 1000, 1050]
    assert files(unpacked) == files(bundle) and {path.name for path in out.iterdir()} == {"eval_bundle", ".lock"}
    assert flags.open_bundle(out) == unpacked and len(Server.requests) == 7  # not again


def test_a_damaged_or_changed_download_is_fetched_again(flags, bundle, tmp_path):
    Server.damage = Server.content[:500] + bytes([Server.content[500] ^ 1])
    with tiny.one_line_error("its MD5 is not the server's"):
        flags.open_bundle(tmp_path / "out")
    Server.damage, Server.cuts, Server.requests = b"another file of before", [200, *[0] * 20], []
    with pytest.raises(PassingFault):
        flags.open_bundle(tmp_path / "out")
    Server.damage, Server.cuts, Server.requests = b"", [], []
    assert files(flags.open_bundle(tmp_path / "out")) == files(bundle) and Server.requests == [200, 0]


def test_an_endless_download_ends(flags, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "MAX_BYTES", 1000)
    with tiny.one_line_error("larger than 1,000 bytes"):
        flags.open_bundle(tmp_path / "out")
    assert len(Server.requests) == 1 and ".eval_bundle.part" not in os.listdir(tmp_path / "out")
    with tiny.one_line_error("--bundle-url must begin with https:// or http://"):
        BundleFlags(bundle_url="file:///etc/passwd").open_bundle(tmp_path / "file")


# Unpacking


def link(name):
    info = zipfile.ZipInfo(name)
    info.external_attr = 0o120777 << 16
    return info


ROOT, ZEROS = ("core.yaml", "icl_tasks: []" * 50), bytes(80 * 2**20)
EVIL = ["../evil", "../../../evil", "/tmp/evil", "a\\..\\..\\evil", "C:/evil", "x/../../evil", "a/b/../../../evil"]
UNSAFE = [(name, [ROOT, (name, "x")], None, "evil leads out of its folder") for name in EVIL]
UNSAFE += [
    ("deep root", [("a/b/core.yaml", ""), (EVIL[-1], "x")], None, "evil leads out of its folder"),
    ("link", [ROOT, (link("eval_data"), "/tmp"), ("eval_data/evil", "x")], None, "eval_data is a link"),
    ("bomb", [ROOT, ("eval_data/a.jsonl", ZEROS)], None, "2 files of 83,886,730 bytes"),
    ("many", [ROOT, *((f"eval_data/{number}", "") for number in range(10_000))], None, "10,001 files"),
    ("another", [("readme", "")], None, "no core.yaml"),
    ("nameless", [ROOT, ("xyz", "x")], lambda content: content.replace(b"xyz", b"\0yz"), "without a name"),
    ("flipped", [ROOT], lambda content: content[:45] + bytes([content[45] ^ 1]) + content[46:], "not a usable zip"),
    ("cut", [ROOT], lambda content: content[:-30], "not a usable zip"),
    ("lie", [ROOT, ("eval_data/a.jsonl", ZEROS)],
     lambda content: content.replace(len(ZEROS).to_bytes(4, "little"), (2000).to_bytes(4, "little")),
     "not a usable zip"),  # it states a smaller size than a member has
]  # fmt: skip


@pytest.mark.parametrize("members, damage, message", [row[1:] for row in UNSAFE], ids=[row[0] for row in UNSAFE])
def test_an_unsafe_or_damaged_zip_leaves_nothing(members, damage, message, tmp_path):
    path, out = make_zip(tmp_path / "bad.zip", members), tmp_path / "out"
    if damage:
        path.write_bytes(damage(path.read_bytes()))
    with tiny.one_line_error(message):
        BundleFlags(bundle=path).open_bundle(out)
    assert set(tmp_path.rglob("*")) == {path, out, out / ".lock"}


def test_a_zip_is_unpacked_once_and_over_nothing(bundle, tmp_path):
    members = [(f"x/y/{path}", content) for path, content in files(bundle).items()]
    flags = BundleFlags(bundle=make_zip(tmp_path / "mine.zip", members))
    unpacked = flags.open_bundle(tmp_path / "out")
    written = (unpacked / "core.yaml").stat().st_mtime_ns
    assert files(unpacked) == files(bundle) and flags.open_bundle(tmp_path / "out") == unpacked
    assert (unpacked / "core.yaml").stat().st_mtime_ns == written
    (unpacked / "core.yaml").rename(unpacked / "mine.yaml")
    with tiny.one_line_error("is in the way"):
        flags.open_bundle(tmp_path / "out")
