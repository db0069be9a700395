"""CORE's bundle: fetched from servers that misbehave, unpacked only where it belongs, read task by task."""

import hashlib
import os
import zipfile

import pytest

import tiny
import tiny_core
from hub import FOLDER, Hub
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


ZIP = "eval_bundle.zip"


@pytest.fixture
def hub(bundle, tmp_path, monkeypatch):
    """Serves the bundle as the real one is packed, everything below eval_bundle/, with its MD5."""
    served = make_zip(tmp_path / "served.zip", [(f"eval_bundle/{name}", text) for name, text in files(bundle).items()])
    monkeypatch.setattr(fetch.time, "sleep", lambda seconds: None)
    hub = Hub({ZIP: served.read_bytes()}, hashlib.md5)
    yield hub
    hub.close()


def fetched(hub: Hub, out, *trouble):
    """The folder of the bundle, fetched while the server has this trouble."""
    hub.trouble, hub.gets = {ZIP: [*trouble]}, []
    return BundleFlags(bundle_url=f"http://127.0.0.1:{hub.port}{FOLDER}{ZIP}").open_bundle(out)


def starts(hub: Hub) -> list[int]:
    """Where each of the last requests began."""
    return [start for _, start in hub.gets]


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def make_zip(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def test_an_interrupted_download_continues_in_this_process_and_the_next(hub, bundle, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(PassingFault, match=r"1000 of \d+ bytes arrived.*run the same command again"):
        fetched(hub, out, 700, 300, 0, 0, 0)
    assert starts(hub) == [0, 700, 1000, 1000, 1000]
    unpacked = fetched(hub, out, 50)
    assert starts(hub) == [1000, 1050]
    assert files(unpacked) == files(bundle) and {path.name for path in out.iterdir()} == {"eval_bundle", ".lock"}
    assert fetched(hub, out) == unpacked and not hub.gets  # not again


def test_a_damaged_or_changed_download_is_fetched_again(hub, bundle, tmp_path):
    with tiny.one_line_error("its MD5 is not the server's"):
        fetched(hub, tmp_path / "out", *["corrupt"] * 5)
    content, hub.files[ZIP] = hub.files[ZIP], b"another file of before" * 100
    with pytest.raises(PassingFault):
        fetched(hub, tmp_path / "out", 200, 0, 0, 0, 0)
    hub.files[ZIP] = content
    assert files(fetched(hub, tmp_path / "out")) == files(bundle) and starts(hub) == [200, 0]


def test_an_endless_download_ends(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "MAX_BYTES", 1000)
    with tiny.one_line_error("larger than 1,000 bytes"):
        fetched(hub, tmp_path / "out")
    assert starts(hub) == [0] and ".eval_bundle.part" not in os.listdir(tmp_path / "out")
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
