"""The report: what is on the page, where its numbers come from, and the mistakes that it names."""

import html
import json
import re

import pytest

import gpt_runs
import tiny
import tiny_vision
import vision_runs
from runs import report
from runs.report import ReportConfig, find_runs, main
from runs.table import Table
from trainkit_gka.cli import run

NAMES = ("digits-gka", "words-gka")
TEXT = "the kernel token mixes every head and <b>nothing</b> else so that past values come back with weights"


@pytest.fixture(scope="module")
def base(packed, tmp_path_factory):
    """A folder of outputs as the trainers leave it: a vision run, and a language run with offsets and windows."""
    base = tmp_path_factory.mktemp("report")
    places = ["--out", base / "runs", "--results", base / "results.jsonl"]
    shape = ["--model", vision_runs.GKA, "--input-size", 32, "--epochs", 1]
    easy = [*vision_runs.EASY, "--batch-size", 64, "--group-size", 64, "--eval-every", 1]
    tiny_vision.call("deit_gka.train", *places, *easy, *shape, "--model-tag", NAMES[0], folder=base / "output")
    rows = ["--data", packed / "packed", *tiny.TRAIN_FLAGS, "--num-iterations", 4, "--eval-every", 2, "--save-every", 4]
    form = ["--attention", "gka", "--head-offsets", "PS", "--log-every", 1, "--model-tag", NAMES[1]]
    tiny.call(gpt_runs.MODULE, *places, *rows, *form)
    return base


@pytest.fixture(scope="module")
def text(base):
    run(main, ReportConfig, ["--base", str(base), "--text", TEXT])
    return (base / "report.html").read_text()


def cells(page):
    """The texts of a page's cells."""
    return {html.unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", page)}


def test_the_page_asks_for_nothing_and_runs_no_script(text):
    [policy] = re.findall(r'content="(default-src[^"]*)"', text)
    assert policy.startswith("default-src 'none'") and "script" not in policy and "<script" not in text
    addresses = re.findall(r'\b(?:src|href|action|srcset)="([^"]*)"', text)
    assert addresses and all(address.startswith(("data:image/webp;base64,", "#")) for address in addresses)
    assert not re.search(r"@import|url\(|\bon\w+=", text) and len(text) < 4e6
    assert {address[1:] for address in addresses if address[0] == "#"} <= set(re.findall(r'\bid="([^"]*)"', text))


def test_the_numbers_are_those_of_the_logs_and_say_what_ran(base, text):
    lines = [json.loads(line) for line in (base / "results.jsonl").read_text().splitlines()]
    assert {line["config"]["model_tag"] for line in lines} == set(NAMES)
    body = html.unescape(text)
    assert all(line[fact] in body for line in lines for fact in ("command", "hardware", "torch", "commit"))
    ended = {row[0].split(";")[0]: row for table in report.run_tables(find_runs((), base)) for row in table.rows}
    for trained in find_runs((), base):
        key, digits = ("ema_top1", ".2f") if trained.is_vision else ("val_bpb", ".4f")
        row = ended[trained.name]
        assert f"{trained.finish[key]:{digits}}" in row and set(row) <= cells(text)
        evaluations = [value for _, value in trained.points("eval", key)]
        last = trained.points("eval", "sigma")[-1][1]["layer_0"]
        assert evaluations and {report.number(v) for v in (*evaluations, sum(last) / len(last))} <= cells(text)


def test_words_from_outside_are_escaped():
    table = Table.of(["<i>"], [["<script>alert(1)</script> **a<b**"]], title='"&`<u>`')
    section = report.Section("x", "<h>", "<p>", tables=[table], commands=["rm <x>"])
    page = report.page_template().render(sections=[section], commit="c", command="<c>")
    assert "<script>" not in page and "&lt;script&gt;alert(1)&lt;/script&gt; <b>a&lt;b</b>" in page
    assert "&amp;<code>&lt;u&gt;</code>" in page and "rm &lt;x&gt;" in page and "<h>" not in page


def test_damaged_logs_and_unfinished_runs_are_reported_as_such(base, tmp_path):
    for name in NAMES:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        lines = (base / "runs" / name / "log.jsonl").read_text().splitlines()
        unfinished = [line for line in lines if json.loads(line)["event"] != "finish"]
        (folder / "log.jsonl").write_text("\n".join(["{}", "not JSON", *unfinished, '{"event": "eval", "st']))
    runs = find_runs((), tmp_path)
    assert [trained.name for trained in runs] == sorted(NAMES)
    assert all(cell == "not finished" for table in report.run_tables(runs) for row in table.rows for cell in row[2:])
    assert len(report.curves(runs, tmp_path)) >= 4
    seen, reason = report.vision_pictures(runs, [], tmp_path)
    assert not seen and "digits-gka is not drawn: no checkpoint in" in reason


def test_mistakes_are_named(base, tmp_path):
    assert f"{tmp_path} is not a run: it has no log.jsonl" in tiny.refused(main, ReportConfig, "--run", tmp_path)
    nowhere = tiny.refused(main, ReportConfig, "--base", tmp_path / "nope")
    assert f"there is no folder {tmp_path}/nope;" in nowhere and not (tmp_path / "nope").exists()
