"""The report: what is on the page, where its numbers come from, and the mistakes that it names."""

import dataclasses
import json
import re
from collections import Counter

import pytest

import report_page
from browser import watched
from html_elements import Elements
from runs.comparison.claims import CLAIMS
from runs.figures import look
from runs.paper import published
from runs.report import attention, build, charts, language, ledger, provenance
from runs.report.__main__ import ReportConfig, main
from runs.report.charts import Series
from runs.report.trained import find_runs
from trainkit_gka.cli import UserError, run
from vision_runs import in_process

PHONE, DESK = {"width": 390, "height": 844}, {"width": 1200, "height": 900}
MOST_PIXELS = 12_000  # high, before anything is opened


@pytest.fixture(scope="module")
def base(packed, tmp_path_factory):
    return report_page.trained_base(packed, tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def text(base):
    run(main, ReportConfig, ["--base", str(base), "--text", report_page.TEXT])
    return (base / "report.html").read_text()


@pytest.fixture(scope="module")
def elements(text):
    return Elements(text)


def test_the_page_asks_for_nothing_and_is_small(text, elements):
    [policy] = [e["content"] for e in elements.tagged("meta") if "http-equiv" in e]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe-eval" not in policy
    addresses = [e[key] for e in elements.all for key in ("src", "href", "xlink:href", "action", "srcset") if key in e]
    assert addresses and all(address.startswith(("data:image/webp;base64,", "#")) for address in addresses)
    assert not re.search(r"@import|url\((?!#)", text) and len(text) < 3e6


def test_links_lead_somewhere_and_every_picture_has_words_and_numbers(elements):
    counts = Counter(e["id"] for e in elements.all if "id" in e)
    assert max(counts.values()) == 1
    assert all(e["href"][1:] in counts for e in elements.tagged("a", "use") if "href" in e)
    drawn = [e for e in elements.tagged("img", "svg") if "figure" in e["inside"]]
    assert len(drawn) == len(elements.tagged("figure")) > 12
    for picture in drawn:
        words = picture["alt"] if picture["tag"] == "img" else picture["aria-label"]
        assert len(words) > 30 and (picture["tag"] == "img" or picture["role"] == "img")
    tables = [e for e in elements.tagged("table") if "figure" in e["inside"]]
    assert len(tables) == len(drawn) and all("details" in table["inside"] for table in tables)


def test_the_page_says_what_ran_on_what_and_how(base, elements):
    body = elements.tagged("body")[0]["text"]
    lines = [json.loads(line) for line in (base / "results.jsonl").read_text().splitlines()]
    assert {line["config"]["model_tag"] for line in lines} == set(report_page.RUNS)
    for line in lines:
        assert line["command"] in body and line["hardware"] in body and line["torch"] in body
        assert line["commit"] in body and line["config"]["model_tag"] in body
    measured = [row[0] for row in provenance.file_facts().rows]
    assert "demo.jsonl" in measured and all(name in body for name in measured)


def test_the_numbers_are_those_of_the_logs(base, elements):
    tables = {e["text"].strip().splitlines()[0]: e["text"] for e in elements.tagged("table")}
    for trained in find_runs((), base):
        [ended] = [text for name, text in tables.items() if "as their logs end" in name and trained.name in text]
        key, form = ("ema_top1", ".2f") if trained.is_vision else ("val_bpb", ".4f")
        assert f"{trained.finish[key]:{form}}" in ended
        assert trained.is_vision or f"{trained.name}; {trained.finish['eval_rows']} rows" in ended
        drawn = tables["Vision, validation" if trained.is_vision else "Language, validation"]
        evaluations = [value for _, value in trained.points("eval", key)]
        assert evaluations and all(f"{value:.4g}" in drawn for value in evaluations)
        if trained.has_sigma:
            last = trained.points("eval", "sigma")[-1][1]["layer_0"]
            assert f"{sum(last) / len(last):.4g}" in tables[f"σ over training, {trained.name}"]


def test_the_page_has_the_papers_tables_and_every_claim(elements):
    assert {table["label"] for table in published.TABLES.values()} <= {e.get("id") for e in elements.tagged("table")}
    claims = [e["text"] for e in elements.tagged("details") if e.get("class") == "claim"]
    assert len(claims) == len(CLAIMS)
    for claim, shown in zip(CLAIMS.values(), claims):
        assert claim.get("quote", claim.get("figures")) in shown and claim["command"] in shown


def test_charts_are_the_same_bytes_in_the_pages_colours_and_with_ids_of_their_own():
    looks = [look(form) for form in ("GGGA", "GKA")]
    series = [Series("one", [(1, 2.0), (2, 3.5)], looks[0], band=[(1.5, 2.5), (3, 4)])]
    series.append(Series("a < b", [(1, 1.0), (4, 2.0)], looks[1]))
    first, again = (charts.lines("A & b", "caption", "x", "y", series) for _ in range(2))
    other = charts.lines("Another", "caption", "x", "y", series)
    assert first.markup == again.markup and first.table.html() == again.table.html()
    ids = [set(re.findall(r' id="([^"]+)"', chart.markup)) for chart in (first, other)]
    assert ids[0] and not ids[0] & ids[1]
    assert first.table.rows == [["1", "2", "1.5 to 2.5", "1"], ["2", "3.5", "3 to 4", ""], ["4", "", "", "2"]]
    assert "A &amp; b" in first.markup and "a &lt; b" in first.markup


def test_damaged_logs_and_unfinished_runs_are_reported_as_such(base, tmp_path):
    for name in report_page.RUNS:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        lines = (base / "runs" / name / "log.jsonl").read_text().splitlines()
        kept = [line for line in lines if json.loads(line)["event"] != "finish"]
        (folder / "log.jsonl").write_text("\n".join(["{}", "not JSON", *kept, '{"event": "eval", "st']))
    (tmp_path / "runs" / "empty").mkdir()
    (tmp_path / "runs" / "empty" / "log.jsonl").write_text("")
    runs = find_runs((), tmp_path)
    assert [trained.name for trained in runs] == sorted(report_page.RUNS)
    section = build.training(runs)
    assert all(cell == "not finished" for table in section.tables for row in table.rows for cell in row[1:])
    assert len(section.pictures) >= 4
    assert provenance.run_facts(runs).rows[0][1:] == [provenance.NOT_RECORDED] * 5


def test_runs_without_a_checkpoint_or_of_one_trainer_leave_the_others_pictures_out(base, tmp_path):
    vision, words = find_runs((), base)
    assert vision.is_vision and not words.is_vision
    assert attention.subjects([words], []) == ([], "") and attention.pictures([]) == []
    assert language.subjects([vision], "text") == ([], "") and language.pictures([]) == []
    begun = dataclasses.replace(vision, folder=tmp_path), dataclasses.replace(words, folder=tmp_path)
    for collect, given in ((attention.subjects, []), (language.subjects, "some text")):
        seen, reason = collect(begun, given)
        assert not seen and "is not drawn: no checkpoint in" in reason
    seen, reason = language.subjects([begun[1], words], "some text")
    assert [subject.model for subject in seen] == [words.name] or reason
    with pytest.raises(UserError, match="the text is empty"):
        language.subjects([words], " ")


def test_without_runs_the_page_names_the_command_that_makes_some(tmp_path):
    assert "make demo" in build.summary([], ledger.ledger(), []).missing and "make demo" in build.training([]).missing


def test_mistakes_are_named(base, tmp_path, capsys):
    message = in_process(main, ReportConfig, "--run", tmp_path, capsys=capsys)
    assert f"{tmp_path} is not a run: it has no log.jsonl" in message
    nowhere = in_process(main, ReportConfig, "--base", tmp_path / "nope", capsys=capsys)
    assert f"there is no folder {tmp_path}/nope;" in nowhere and not (tmp_path / "nope").exists()


def test_the_page_is_short_and_its_contents_stay_in_view(browser, base, text):
    with watched(browser, viewport=DESK) as (tab, problems, _):
        tab.goto((base / "report.html").as_uri())
        assert tab.evaluate("document.documentElement.scrollHeight") < MOST_PIXELS
        assert tab.locator("#summary figure:visible").count() == 3
        tab.evaluate("scrollTo({ top: 5000, behavior: 'instant' })")
        assert tab.locator("nav").bounding_box()["y"] == 0 and not problems


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_the_page_without_sideways_scrolling(browser, base, text, scheme):
    address = (base / "report.html").as_uri()
    with watched(browser, viewport=PHONE, color_scheme=scheme, has_touch=True) as (tab, problems, requests):
        tab.goto(address)
        tab.evaluate("document.querySelectorAll('details').forEach((details) => (details.open = true))")
        assert tab.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        wide = "[...document.querySelectorAll('.scroll')].filter((box) => box.scrollWidth > box.clientWidth).length"
        assert tab.evaluate(wide) > 3
        dark = max(map(int, re.findall(r"\d+", tab.evaluate("getComputedStyle(document.body).backgroundColor")))) < 128
        ink = tab.evaluate("getComputedStyle(document.querySelector('svg.chart text')).fill")
        assert dark == (scheme == "dark") == (min(map(int, re.findall(r"\d+", ink)[:3])) > 128)
        tab.tap("canvas")
        assert not problems and requests == [address]


def test_the_policy_forbids_connections_and_other_scripts(browser, base, text):
    address = (base / "report.html").as_uri()
    with watched(browser) as (tab, problems, _):
        tab.goto(address)
        refused = "fetch('https://example.org/').then(() => 'fetched', () => 'refused')"
        assert tab.evaluate(refused) == "refused" and any("Content Security Policy" in text for text in problems)
        tab.evaluate(
            "document.body.append(Object.assign(document.createElement('script'), {text: 'window.script = 1'}))"
        )
        assert tab.evaluate("window.script") is None
