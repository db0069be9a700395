"""CORE's bundle is fetched, also from a server that misbehaves, and unpacked only where it belongs."""

import hashlib
import http.server
import os
import shutil
import threading
import zipfile

import pytest

import tiny
from nanochat_gka.core_metric import fetch
from nanochat_gka.core_metric.fetch import BundleFlags
from trainkit_gka.cli import PassingFault


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


def same_files(a, b):
    def files(folder):
        return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    return files(a) == files(b)


def test_interrupted_download_continues(flags, bundle, tmp_path):
    Server.cuts, out = [700, 300], tmp_path / "out"
    folder = flags.open_bundle(out)
    assert Server.requests == [0, 700, 1000]
    assert same_files(folder, bundle) and {path.name for path in out.iterdir()} == {"eval_bundle", ".lock"}
    assert flags.open_bundle(out) == folder and len(Server.requests) == 3  # not again


def test_next_run_continues_an_unchanged_file(flags, bundle, tmp_path):
    Server.cuts = [200] + [0] * 20
    message = r"could not download http.*: 200 of \d+ bytes arrived. Check the network and run the same command again"
    with pytest.raises(PassingFault, match=message):
        flags.open_bundle(tmp_path / "out")
    Server.cuts, Server.requests = [50], []
    Server.etag = '"another"'
    assert same_files(flags.open_bundle(tmp_path / "out"), bundle)
    assert Server.requests == [0, 50]


def test_damaged_download_is_fetched_again(flags, bundle, tmp_path):
    good = Server.content
    Server.content = good[:500] + bytes([good[500] ^ 1]) + good[501:]
    with tiny.one_line_error("it arrived damaged, its MD5 is not the server's"):
        flags.open_bundle(tmp_path / "out")
    Server.content = good
    assert same_files(flags.open_bundle(tmp_path / "out"), bundle)


def test_an_address_of_another_kind_is_refused(tmp_path):
    with tiny.one_line_error("must begin with https:// or http://"):
        BundleFlags(bundle_url="file:///etc/passwd").open_bundle(tmp_path / "out")


def make_zip(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def link(name):
    info = zipfile.ZipInfo(name)
    info.external_attr = 0o120777 << 16
    return info


def assert_refused(path, message):
    """One line, and nothing is left of it."""
    out = path.parent / "out"
    with tiny.one_line_error(message):
        BundleFlags(bundle=path).open_bundle(out)
    assert set(path.parent.rglob("*")) == {path, out, out / ".lock"}


EVIL = ["../evil", "../../../evil", "TMP/evil", "a\\..\\..\\evil", "C:/evil", "x/../../evil", "./../evil"]


@pytest.mark.parametrize("evil", [*EVIL, "a/b/../../../evil"])
def test_members_that_lead_out_of_the_folder_are_refused(evil, tmp_path):
    root = "a/b/" if evil.startswith("a/b/") else ""
    members = [(f"{root}core.yaml", ""), (evil.replace("TMP", str(tmp_path)), "x")]
    assert_refused(make_zip(tmp_path / "bad.zip", members), "bad.zip is refused: .*evil leads out of its folder")


def test_links_are_refused(tmp_path):
    members = [("core.yaml", ""), (link("eval_data"), str(tmp_path)), ("eval_data/evil", "x")]
    assert_refused(make_zip(tmp_path / "bad.zip", members), "bad.zip is refused: eval_data is a link")


def bomb(path, megabytes):
    """A zip of one member of zeros, a thousandth of their size."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("core.yaml", "")
        with archive.open("eval_data/a.jsonl", "w") as member:
            for _ in range(megabytes):
                member.write(bytes(2**20))
    return path


def test_a_zip_that_grows_too_much_is_refused(tmp_path):
    path = bomb(tmp_path / "bomb.zip", 80)
    assert_refused(path, r"bomb.zip is refused: \d+ bytes would become 83,886,080, .* at most 100 times")


def test_a_zip_that_lies_about_its_size_writes_no_more_than_it_says(tmp_path):
    path = bomb(tmp_path / "lie.zip", 30)
    content = path.read_bytes()
    stated, smaller = ((size).to_bytes(4, "little") for size in (30 * 2**20, 2000))
    path.write_bytes(content.replace(stated, smaller))
    assert_refused(path, "lie.zip is not a usable zip file")


def test_too_many_files_or_bytes_are_refused(tmp_path, monkeypatch):
    many = [("core.yaml", ""), *((f"eval_data/{number}", "") for number in range(10_000))]
    assert_refused(make_zip(tmp_path / "many.zip", many), "many.zip is refused: it has 10,001 files, .* at most 10,000")
    (tmp_path / "many.zip").unlink()
    shutil.rmtree(tmp_path / "out")
    monkeypatch.setattr(fetch, "MAX_BYTES", 1000)
    path = make_zip(tmp_path / "large.zip", [("core.yaml", "#" * 1001)])
    assert_refused(path, r"large.zip is refused: \d+ bytes would become 1,001, .* at most 1,000")


def test_an_endless_download_ends(flags, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "MAX_BYTES", 1000)
    with tiny.one_line_error("eval_bundle.zip is larger than 1,000 bytes, .*; pass --bundle"):
        flags.open_bundle(tmp_path / "out")
    assert os.listdir(tmp_path / "out") == [".lock"] and len(Server.requests) == 1


def change(content, at, value):
    return content[:at] + bytes([value]) + content[at + 1 :]


@pytest.mark.parametrize(
    "damage", [lambda content: change(content, 60, content[60] ^ 1), lambda content: content[:-30]]
)
def test_a_damaged_or_cut_zip_leaves_nothing(damage, tmp_path):
    path = make_zip(tmp_path / "bundle.zip", [("core.yaml", "icl_tasks: []" * 50)])
    path.write_bytes(damage(path.read_bytes()))
    assert_refused(path, "is not a usable zip file")


def test_another_zip_is_refused(tmp_path):
    assert_refused(make_zip(tmp_path / "other.zip", [("readme", "")]), "is not a CORE bundle: it has no core.yaml")


def test_users_zip_is_unpacked_once(bundle, tmp_path):
    files = [file for file in bundle.rglob("*") if file.is_file()]
    members = [(f"x/y/{file.relative_to(bundle)}", file.read_bytes()) for file in files]
    flags = BundleFlags(bundle=make_zip(tmp_path / "mine.zip", members))
    folder = flags.open_bundle(tmp_path / "out")
    written = (folder / "core.yaml").stat().st_mtime_ns
    assert same_files(folder, bundle) and flags.open_bundle(tmp_path / "out") == folder
    assert (folder / "core.yaml").stat().st_mtime_ns == written
