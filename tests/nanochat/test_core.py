"""CORE: the naive scorer's answers, published figures; its bundle is read, fetched, and unpacked where it belongs."""

import dataclasses
import math
import os
import zipfile

import pytest
import torch

import tiny
import tiny_core
from hub import FOLDER, Hub
from naive_core import naive_task
from nanochat_gka.core_metric import fetch, published, scoring
from nanochat_gka.core_metric.bundle import Question, read_tasks
from nanochat_gka.core_metric.fetch import BundleFlags
from nanochat_gka.core_metric.published import CORE_SIZES, CORE_TASKS, GPT2_ACCURACY
from nanochat_gka.core_metric.report import Score, aggregate, centered, show
from nanochat_gka.core_metric.scoring import batches, judge, likeliest
from tiny_gpt import SHAPE, VARIANTS, awake
from trainkit_gka.cli import PassingFault

# Answers

ALL = 10**6  # tokens: no cropping, no limit on a batch
CASES = [(VARIANTS[i], {}) for i in (0, 3, 6, 8, 13)]
CASES += [(VARIANTS[2], dict(max_seq_len=20)), (VARIANTS[4], dict(max_per_task=11, max_seq_len=64))]


@pytest.mark.parametrize("variant,limit", CASES, ids=str)
def test_the_answers_are_the_naive_scorers(variant, limit, bundle, tokenizer, monkeypatch):
    """Every type of task, with shots, long and cropped prompts, one question at a time or any batch."""
    monkeypatch.setitem(scoring.LOGITS_AT_ONCE, "cpu", 7 * tokenizer.vocab_size)
    model = awake(dataclasses.replace(SHAPE, sequence_len=64, vocab_size=tokenizer.vocab_size, **variant))
    for task in read_tasks(bundle):
        wanted, right = naive_task(model, tokenizer, bundle, task.label, **limit)
        examples, longest = task.examples(limit.get("max_per_task", -1)), limit.get("max_seq_len", ALL)
        questions = [task.question(examples, index, tokenizer, longest) for index in range(len(examples))]
        for batch_tokens in (1, 600, ALL):
            predictions = {}
            for batch in batches(questions, batch_tokens):
                predictions |= dict(zip(batch, judge(model, [questions[place] for place in batch])))
            assert [predictions[place] for place in range(len(questions))] == wanted, (task.label, batch_tokens)
            assert [predictions[place] == one.gold for place, one in enumerate(questions)] == right


TIES = [  # mean losses of three prompts, NaN for an empty span; the prompts; the answer
    ((2.0, 1.0, 1.0), (1, 2, 3), 1),
    ((2.0, math.nan, 1.0), (1, 2, 3), 2),
    ((math.nan, 1.0, 2.0), (1, 2, 3), 0),
    ((2.0, 1.0 + 1e-9, 1.0), (2, 1, 1), 1),  # cropped to equal prompts: not 2, by the rounding of equal losses
]


@pytest.mark.parametrize("means, tokens, wanted", TIES)
def test_ties_and_empty_spans_are_upstreams(means, tokens, wanted):
    questions = Question([[token] for token in tokens], starts=[1, 1, 1], gold=0, greedy=False)
    assert likeliest(questions, means) == wanted


# Scores

BASELINES = dict(zip(CORE_TASKS, (25, 0, 0, 25, 25, 50, 20, 50, 25, 0, 25, 50, 50, 0, 20, 0, 0, 0, 0, 0, 62, 9.1)))


def scores_of(accuracies, most=10**6):
    return [Score(label, share, BASELINES[label], min(most, CORE_SIZES[label])) for label, share in accuracies.items()]


@pytest.mark.parametrize("number", range(4), ids=published.GPT2_MODELS)
def test_published_accuracies_give_the_published_core(number):
    scores = scores_of({label: accuracy[number] for label, accuracy in GPT2_ACCURACY.items()})
    name, value, _ = aggregate(scores)
    assert name == "CORE" and value == pytest.approx(published.GPT2_CORE[number], abs=2e-6)  # six printed digits
    assert aggregate(scores_of(dict.fromkeys(CORE_TASKS, 0.5), most=10_569))[0] == "CORE estimate (max 10569 each)"
    if number == 0:  # accuracies are whole numbers of examples
        assert all(round(round(s.accuracy * s.examples) / s.examples, 6) == s.accuracy for s in scores)


def test_centring_errors_and_the_papers_means():
    assert centered(0.25, 25) == 0 and centered(1.0, 62) == 1
    assert centered(0.552294, 62) == pytest.approx(-0.178175, abs=2e-6)  # boolq of GPT-2 124M, as published
    for model, mean in enumerate(published.PAPER_MEAN):
        assert sum(row[model] for row in published.PAPER_CENTERED.values()) / 6 == pytest.approx(mean, abs=6e-5)
    drawn = (torch.rand(20_000, 200, generator=torch.Generator().manual_seed(0)) < 0.43).double().mean(dim=1)
    one = Score("copa", 0.43, 25, 200)  # 20,000 draws give its error to 0.5 %
    assert one.standard_error == pytest.approx(centered(drawn, 25).std().item(), rel=0.03)
    assert aggregate([one] * 4)[2] == pytest.approx(one.standard_error / 2)


def test_the_table_has_our_and_the_published_numbers(capsys):
    show(scores_of(dict.fromkeys(CORE_TASKS, 0.5)), "a model")
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.strip()}
    gpt2, paper = ["0.0780", "0.3360"], ["0.2650", "0.007", "0.2267", "0.047"]
    assert rows["hellaswag_zeroshot"][1:] == ["10,042", "0.5000", "0.3333", "0.007", *gpt2, *paper]
    assert rows["CORE"][-2:] == ["0.1139", "0.2565"] and rows["mean"][-4:] == ["0.2418", "0.020", "0.2286", "0.026"]


# The bundle

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


COPA, TASK_LIST, BASELINE_TABLE = "eval_data/reasoning/copa.jsonl", "core.yaml", "eval_meta_data.csv"
# File of the bundle; text in it that is replaced ("": the end); by what (None: the file is deleted); the error.
OF_A_TASK = [
    (COPA, "", None, "copa cannot be read: .*copa.jsonl"),
    (COPA, "", "\n{oops\n", "copa.jsonl:17"),
    (COPA, "", '{"query": "q", "choices": ["a"], "gold": 1}', "copa.jsonl:16: .*gold"),
    (COPA, "", '{"query": "q", "choices": "ab", "gold": 0}', "copa.jsonl:16: .*choices"),
    (COPA, "", "[" * 200_000, "copa.jsonl:16"),
    (COPA, "", '"' + "a" * 2**20 + '"', "copa.jsonl:16: .*1,048,578 bytes"),
    (TASK_LIST, "multiple_choice", "essay", "icl_task_type 'essay'"),
    (BASELINE_TABLE, "copa,,,,,50", "copa,,,,,100", "copa has no random baseline"),
]
OF_THE_BUNDLE = [
    (TASK_LIST, "", None, "core.yaml cannot be read"),
    (TASK_LIST, "", "\n  - {label: copa\n", "core.yaml is not"),
    (TASK_LIST, "label: copa", "label: !!python/object/apply:os.getcwd []", "core.yaml is not"),
    (TASK_LIST, "reasoning/", "../../", "dataset_uri .*copa.jsonl leads out of"),
    (TASK_LIST, "reasoning/copa.jsonl", '"a\\0"', "dataset_uri .* leads out of"),
    (TASK_LIST, "", "#" * 2**18, r"core.yaml has 26\d,\d+ bytes"),
    (TASK_LIST, "- 0\n", "- -1\n", "core.yaml is not .*num_fewshot"),
    (BASELINE_TABLE, "Random", "Chance", "Random baseline"),
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
    """Serves the bundle as the real one is packed, everything below eval_bundle/."""
    served = make_zip(tmp_path / "served.zip", [(f"eval_bundle/{name}", text) for name, text in files(bundle).items()])
    monkeypatch.setattr(fetch.time, "sleep", lambda seconds: None)
    hub = Hub({ZIP: served.read_bytes()})
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
    with tiny.one_line_error("not a usable zip file"):
        fetched(hub, tmp_path / "out", "corrupt")
    content, hub.files[ZIP] = hub.files[ZIP], b"another file of before" * 100
    with pytest.raises(PassingFault):
        fetched(hub, tmp_path / "out", 200, 0, 0, 0, 0)
    hub.files[ZIP] = content
    with tiny.one_line_error("not a usable zip file"):
        fetched(hub, tmp_path / "out")  # from its byte 200 on
    assert files(fetched(hub, tmp_path / "out")) == files(bundle) and starts(hub) == [0]


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
