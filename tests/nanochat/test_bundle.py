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
from trainkit_gka.cli import PassingFault, UserError

# Reading


@pytest.fixture
def folder(tmp_path):
    """A bundle to damage."""
    return tiny_core.write_bundle(tmp_path / "bundle")


def test_tasks_are_chosen_by_label_and_by_set(folder):
    assert [task.label for task in read_tasks(folder)] == list(tiny_core.TASKS)
    assert [task.label for task in read_tasks(folder, ["jeopardy", "copa"])] == ["copa", "jeopardy"]
    task = read_tasks(folder, ["arc_easy"])[0]
    assert (task.kind, task.shots, task.delimiter, task.baseline) == ("multiple_choice", 2, "\nAnswer: ", 25.0)
    assert read_tasks(folder, ["copa"])[0].delimiter == " "
    for name, missing in (("paper", "hellaswag_zeroshot"), ("core", "boolq"), ("nonsense", "nonsense")):
        with pytest.raises(UserError, match=rf"--tasks {name}: .*{missing}"):
            read_tasks(folder, [name])


COPA = "eval_data/reasoning/copa.jsonl"


def replace(folder, old, new, file="core.yaml"):
    (folder / file).write_text((folder / file).read_text().replace(old, new, 1))


def append(folder, line):
    with (folder / COPA).open("ab") as file:
        file.write(line)


BAD_TASKS = {
    "no file": (lambda folder: (folder / COPA).unlink(), "copa cannot be read: .*copa.jsonl"),
    "no JSON": (lambda folder: append(folder, b"\n{oops\n"), "copa.jsonl:17"),
    "no text": (lambda folder: append(folder, b'{"choices": ["a"], "gold": 0}'), "copa.jsonl:16: query"),
    "gold beyond": (lambda folder: append(folder, b'{"query": "q", "choices": ["a"], "gold": 1}'), "copa.jsonl:16"),
    "no list": (lambda folder: append(folder, b'{"query": "q", "choices": "ab", "gold": 0}'), "copa.jsonl:16"),
    "no gold": (lambda folder: append(folder, b'{"query": "q", "choices": ["a"]}'), "copa.jsonl:16: gold"),
    "too deep": (lambda folder: append(folder, b"[" * 200_000), "copa.jsonl:16"),
    "long": (lambda folder: append(folder, b'"%s"' % (b"a" * 2**20)), "copa.jsonl:16: 1,048,578 bytes"),
    "unknown type": (lambda folder: replace(folder, "multiple_choice", "essay"), "icl_task_type 'essay'"),
    "no baseline": (lambda folder: replace(folder, "copa,", "x,", "eval_meta_data.csv"), "copa has no row"),
}


@pytest.mark.parametrize("damage, message", BAD_TASKS.values(), ids=BAD_TASKS)
def test_a_bad_task_leaves_the_others_readable(damage, message, folder):
    damage(folder)
    tasks = read_tasks(folder)
    with tiny.one_line_error(message):
        tasks[0].examples()
    assert all(task.examples() for task in tasks[1:])


NO_BUNDLES = {
    "no tasks": (lambda folder: (folder / "core.yaml").unlink(), "core.yaml cannot be read"),
    "no YAML": (lambda folder: (folder / "core.yaml").write_text("icl_tasks:\n  - {label: copa\n"), "core.yaml is not"),
    "code": (lambda folder: replace(folder, "copa", "!!python/object/apply:os.getcwd []"), "core.yaml is not"),
    "leaves": (lambda folder: replace(folder, "reasoning/", "../../"), "dataset_uri .*copa.jsonl leads out of"),
    "large": (lambda folder: (folder / "core.yaml").write_text("#" * 2**18 + "#"), "262,145 bytes"),
    "deep": (lambda folder: (folder / "core.yaml").write_text("[" * 1000), "core.yaml is not"),
    "no column": (lambda folder: replace(folder, "Random", "Chance", "eval_meta_data.csv"), "Random baseline"),
}


@pytest.mark.parametrize("damage, message", NO_BUNDLES.values(), ids=NO_BUNDLES)
def test_other_folders_are_one_error(damage, message, folder):
    damage(folder)
    with tiny.one_line_error(message):
        read_tasks(folder)


# Fetching


class Server(http.server.BaseHTTPRequestHandler):
    """Serves `content` with ranges and an ETag; `cuts` are the bytes after which it hangs up, one for each request."""

    content, etag, cuts, requests = b"", "", [], []

    def do_GET(self):
        cls, first = type(self), 0
        if "Range" in self.headers and self.headers["If-Range"] == cls.etag:
            first = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
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
def flags(bundle, tmp_path, monkeypatch):
    """Flags with an address that serves the bundle as the real one is packed: everything below eval_bundle/."""
    archive = tmp_path / "served.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for path in sorted(bundle.rglob("*")):
            packed.write(path, f"eval_bundle/{path.relative_to(bundle)}")
    Server.content, Server.cuts, Server.requests = archive.read_bytes(), [], []
    Server.etag = f'"{hashlib.md5(Server.content).hexdigest()}"'
    monkeypatch.setattr(fetch.time, "sleep", lambda seconds: None)
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield BundleFlags(bundle_url=f"http://127.0.0.1:{httpd.server_port}/eval_bundle.zip")
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_interrupted_download_continues(flags, bundle, tmp_path):
    Server.cuts, out = [700, 300], tmp_path / "out"
    unpacked = flags.open_bundle(out)
    assert Server.requests == [0, 700, 1000]
    assert files(unpacked) == files(bundle) and {path.name for path in out.iterdir()} == {"eval_bundle", ".lock"}
    assert flags.open_bundle(out) == unpacked and len(Server.requests) == 3  # not again


def test_the_next_process_continues_unless_the_file_has_changed(flags, bundle, tmp_path):
    Server.cuts = [200] + [0] * 20
    with pytest.raises(PassingFault, match=r"200 of \d+ bytes arrived.*run the same command again"):
        flags.open_bundle(tmp_path / "out")
    Server.cuts, Server.requests = [50, 0], []
    assert files(flags.open_bundle(tmp_path / "out")) == files(bundle) and Server.requests == [200, 250, 250]
    Server.cuts, Server.requests = [200] + [0] * 20, []
    with pytest.raises(PassingFault):
        flags.open_bundle(tmp_path / "changed")
    Server.cuts, Server.requests, Server.etag = [50], [], '"another"'
    assert files(flags.open_bundle(tmp_path / "changed")) == files(bundle) and Server.requests == [0, 50]


def test_a_damaged_download_is_fetched_again(flags, bundle, tmp_path):
    good = Server.content
    Server.content = good[:500] + bytes([good[500] ^ 1]) + good[501:]
    with tiny.one_line_error("its MD5 is not the server's"):
        flags.open_bundle(tmp_path / "out")
    Server.content = good
    assert files(flags.open_bundle(tmp_path / "out")) == files(bundle)


def test_an_endless_download_ends(flags, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "MAX_BYTES", 1000)
    with tiny.one_line_error("larger than 1,000 bytes"):
        flags.open_bundle(tmp_path / "out")
    assert len(Server.requests) == 1 and ".eval_bundle.part" not in os.listdir(tmp_path / "out")
    with tiny.one_line_error("--bundle-url must begin with https:// or http://"):
        BundleFlags(bundle_url="file:///etc/passwd").open_bundle(tmp_path / "file")


# Unpacking


def make_zip(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def link(name):
    info = zipfile.ZipInfo(name)
    info.external_attr = 0o120777 << 16
    return info


def refused(path, message):
    """One line, and nothing of it is unpacked."""
    out = path.parent / "out"
    with tiny.one_line_error(message):
        BundleFlags(bundle=path).open_bundle(out)
    assert set(path.parent.rglob("*")) == {path, out, out / ".lock"}


EVIL = ["../evil", "../../../evil", "TMP/evil", "a\\..\\..\\evil", "C:/evil", "x/../../evil", "a/b/../../../evil"]


@pytest.mark.parametrize("evil", EVIL)
def test_members_that_lead_out_of_the_folder_are_refused(evil, tmp_path):
    root = "a/b/" if evil.startswith("a/b/") else ""
    members = [(f"{root}core.yaml", ""), (evil.replace("TMP", str(tmp_path)), "x")]
    refused(make_zip(tmp_path / "bad.zip", members), "evil leads out of its folder")


ZEROS = bytes(80 * 2**20)
UNSAFE = {
    "link": ([("core.yaml", ""), (link("eval_data"), "/tmp"), ("eval_data/evil", "x")], "eval_data is a link"),
    "bomb": ([("core.yaml", ""), ("eval_data/a.jsonl", ZEROS)], "would become 83,886,080"),
    "many": ([("core.yaml", ""), *((f"eval_data/{n}", "") for n in range(10_000))], "10,001 files"),
    "another": ([("readme", "")], "no core.yaml"),
}


@pytest.mark.parametrize("members, message", UNSAFE.values(), ids=UNSAFE)
def test_unsafe_zip_files_are_refused(members, message, tmp_path):
    refused(make_zip(tmp_path / "bad.zip", members), message)


def lie(content):
    return content.replace((80 * 2**20).to_bytes(4, "little"), (2000).to_bytes(4, "little"))


DAMAGES = {"flipped": lambda c: c[:45] + bytes([c[45] ^ 1]) + c[46:], "cut": lambda c: c[:-30], "lie": lie}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_zip_leaves_nothing(damage, tmp_path):
    """Nor does one that states a smaller size than a member has."""
    large = ZEROS if damage is lie else b"#" * 700
    path = make_zip(tmp_path / "bundle.zip", [("core.yaml", "icl_tasks: []" * 50), ("eval_data/a.jsonl", large)])
    path.write_bytes(damage(path.read_bytes()))
    refused(path, "is not a usable zip file")


def test_a_zip_is_unpacked_once(bundle, tmp_path):
    members = [(f"x/y/{path}", content) for path, content in files(bundle).items()]
    flags = BundleFlags(bundle=make_zip(tmp_path / "mine.zip", members))
    unpacked = flags.open_bundle(tmp_path / "out")
    written = (unpacked / "core.yaml").stat().st_mtime_ns
    assert files(unpacked) == files(bundle) and flags.open_bundle(tmp_path / "out") == unpacked
    assert (unpacked / "core.yaml").stat().st_mtime_ns == written
