"""The page to explore models, served by the real command and driven in a browser."""

import json
import re
import signal
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

import tiny_demo
import tiny_vision
from browser import watched
from processes import environment
from tiny import command

TIMEOUT = 120_000  # milliseconds; tells a hang from a machine that has other things to do
POWER = "input[type=number][aria-label*='to the power of']"


class Server:
    """The command, once it serves. http: a client of it. folder: of its temporary files."""

    def __init__(self, demo: Path, folder: Path, *flags: str, **variables: str):
        self.demo, self.folder = demo, folder
        self.process = subprocess.Popen(
            command("runs.explore", "--demo", demo, *flags),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment(), "TMPDIR": str(folder), **variables},
        )
        said = iter(self.process.stdout.readline, "")
        line = next((line for line in said if line.startswith("open ")), None)
        assert line, self.process.communicate()[1]
        self.http = httpx.Client(base_url=line.split()[1], timeout=60, trust_env=False)
        self.address = str(self.http.base_url).rstrip("/")

    def end(self) -> tuple[int, str]:
        """Press Ctrl-C. Returns exit code and standard error."""
        self.process.send_signal(signal.SIGINT)
        errors = self.process.communicate(timeout=TIMEOUT / 1000)[1]
        return self.process.returncode, errors


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("explore")
    (root / "temporary").mkdir()
    running = Server(tiny_demo.write(root / "demo"), root / "temporary")
    yield running
    running.process.kill()
    running.process.communicate()


@pytest.fixture(scope="module")
def page(browser, server):
    """The page on a desktop, loaded once; whatever it did, nothing went wrong and nothing left the machine."""
    with watched(browser, viewport={"width": 1280, "height": 900}) as (opened, problems, requests):
        opened.set_default_timeout(TIMEOUT)
        opened.goto(server.address)
        opened.wait_for_selector("#map-0 img")
        opened.wait_for_selector("#chances-1 td")
        yield opened
        addresses = [address for address in requests if not address.startswith(("data:", "blob:"))]
        assert len(addresses) > 20 and {urlsplit(address).hostname for address in addresses} == {"127.0.0.1"}
        assert [problem for problem in problems if "queue/data" not in problem] == []


def wait_for(page, selector: str, pattern: str) -> str:
    """The text of an element as soon as it matches."""
    page.wait_for_function(
        "([selector, pattern]) => new RegExp(pattern).test(document.querySelector(selector)?.innerText)",
        arg=[selector, pattern],
    )
    return page.inner_text(selector)


def source(page, number: int) -> str:
    return page.get_attribute(f"#map-{number} img", "src")


def set_power(page, value: float, tab: int) -> None:
    slider = page.locator(POWER).nth(tab)
    slider.fill(str(value))
    slider.press("Enter")


def chances(text: str) -> dict[str, list[float]]:
    """Row -> its percentages, from the text of a table."""
    rows = re.findall(r"^(\S.*?)\t([\d.%\t]+)$", text, re.MULTILINE)
    return {name: [float(cell.rstrip("%")) for cell in cells.split("\t")] for name, cells in rows}


def test_a_click_on_a_patch_changes_the_maps(page):
    page.get_by_role("tab", name="Images").click()
    before = [source(page, number) for number in (0, 1)]
    assert "CLS row" in page.inner_text("#note-0")
    box = page.locator("#map-0 img").bounding_box()
    page.locator("#map-0 img").click(position={"x": 0.81 * box["width"], "y": 0.1 * box["height"]})
    assert "row 1, column 3" in wait_for(page, "#note-0", "W of the patch") and "σ =" in page.inner_text("#note-0")
    assert "row 1, column 3" in wait_for(page, "#note-1", "W of the patch") and "no σ" in page.inner_text("#note-1")
    assert all(source(page, number) != old for number, old in enumerate(before))
    box = page.locator("#map-1 img").bounding_box()
    page.locator("#map-1 img").click(position={"x": 0.9 * box["width"], "y": 0.9 * box["height"]})
    wait_for(page, "#note-0", "row 4, column 4")


def test_the_slider_changes_map_and_prediction_and_leaves_the_twin(page):
    page.get_by_role("tab", name="Images").click()
    before, twin = source(page, 0), (source(page, 1), page.inner_text("#chances-1"))
    set_power(page, -2, tab=0)
    everywhere = wait_for(page, "#chances-0", "σ × 0.25")
    rows = chances(everywhere)
    assert len(rows) >= 5 and all(len(values) == 2 for values in rows.values())
    assert max(abs(old - new) for old, new in rows.values()) > 1
    assert source(page, 0) != before
    assert page.locator("#map-1 img").is_visible() and (source(page, 1), page.inner_text("#chances-1")) == twin
    page.get_by_label("this layer", exact=True).first.check()
    page.wait_for_function(
        "old => document.querySelector('#chances-0').innerText != old", arg=page.inner_text("#chances-0")
    )
    set_power(page, 0, tab=0)
    page.wait_for_function("!document.querySelector('#chances-0').innerText.includes('σ ×')")


def test_numbers_can_be_typed_key_by_key_and_stop_at_the_sliders_ends(page):
    """A minus sign alone is the start: σ as it is."""
    page.get_by_role("tab", name="Images").click()
    box = page.locator(POWER).first
    for typed, heading in (("-1", "σ × 0.5"), ("100", "σ × 16")):
        box.press("Control+a")
        box.press_sequentially(typed)
        wait_for(page, "#chances-0", f"as it is\\s+{heading}")
    assert page.locator(".toast-body").count() == 0
    set_power(page, 0, tab=0)
    page.wait_for_function("!document.querySelector('#chances-0').innerText.includes('σ ×')")


def test_a_file_that_is_too_large_is_refused_before_it_is_sent(page, tmp_path):
    page.get_by_role("tab", name="Images").click()
    before, file = source(page, 0), tmp_path / "large.png"
    file.write_bytes(bytes(9 * 2**20))
    page.locator("input[type=file]").first.set_input_files(file)
    wait_for(page, "#too-large", "large.png is larger than 8 MiB; give a smaller one.")
    assert source(page, 0) == before and page.locator("#map-0 img").is_visible()


def test_another_image_can_be_chosen(page):
    page.get_by_role("tab", name="Images").click()
    before = source(page, 0)
    page.get_by_label("Image", exact=True).click()
    page.get_by_role("option", name="flower").click()
    page.wait_for_function("old => document.querySelector('#map-0 img').src != old", arg=before)


def test_an_uploaded_image_is_shown_and_named(page):
    page.get_by_role("tab", name="Images").click()
    before, content = source(page, 0), tiny_vision.encoded(tiny_vision.photo(3, 2), "WEBP")
    file = {"name": "mine.webp", "mimeType": "image/webp", "buffer": content}
    page.locator("input[type=file]").first.set_input_files(file)
    page.wait_for_function("old => document.querySelector('#map-0 img').src != old", arg=before)
    assert "mine.webp" in wait_for(page, "#note-0", "mine.webp") and page.get_by_label("Image: mine.webp").is_visible()


def test_a_token_and_the_slider_change_the_row_and_the_next_token(page):
    page.get_by_role("tab", name="Text").click()
    first = wait_for(page, "#row-0", "Token")
    page.locator("#tokens-0 button").nth(3).click()
    assert wait_for(page, "#row-0", "Token 4,") != first and "Token 4," in wait_for(page, "#row-1", "Token 4,")
    assert page.locator("#tokens-0 button[aria-pressed=true]").get_attribute("data-token") == "3"
    set_power(page, 3, tab=1)
    rows = chances(wait_for(page, "#next-0", "σ × 8"))
    assert max(abs(old - new) for old, new in rows.values()) > 0.5
    page.get_by_role("button", name="Continue the text").click()
    assert "σ × 8" in wait_for(page, "#continuation-0", "Continuation, σ")
    assert "Continuation, as it is" in wait_for(page, "#continuation-1", "Continuation")
    page.get_by_label("Text", exact=True).fill("the kernel")
    wait_for(page, "#tokens-0", "^\\W+bos\\W+the␣kernel$")
    page.get_by_label("Text", exact=True).fill("no " * 200)
    wait_for(page, ".toast-wrap", "The text has \\d+ tokens; the page takes at most 128: shorten it.")


def test_no_file_of_the_machine_is_served(server):
    for path in ("/etc/passwd", "Makefile", "..%2F..%2Fetc%2Fpasswd"):
        answer = server.http.get(f"/gradio_api/file={path}")
        assert answer.status_code == 403 and "root:" not in answer.text
    assert server.http.get("/config", headers={"Host": "elsewhere.example"}).status_code == 400


OTHER_SITES = {
    "another port": {"Origin": "http://127.0.0.1:1"},
    "a file": {"Origin": "null"},
    "an image": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"},
    "a frame": {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
}


def upload(server: Server, **headers: str) -> int:
    """Status of a request to upload a file."""
    try:
        file = {"files": ("x.png", bytes(2**20))}
        return server.http.post("/gradio_api/upload", files=file, headers=headers).status_code
    except (httpx.WriteError, httpx.ReadError):  # it hangs up on who is still sending
        return 403


@pytest.mark.parametrize("headers", OTHER_SITES.values(), ids=OTHER_SITES)
def test_pages_of_other_sites_can_neither_upload_nor_run_models(server, headers):
    stored = set(server.folder.rglob("x.png"))
    assert upload(server, **headers) == 403 and set(server.folder.rglob("x.png")) == stored
    assert server.http.get("/config", headers=headers).status_code == 403
    body = {"data": [], "fn_index": 0, "session_hash": "other"}
    assert server.http.post("/gradio_api/queue/join", json=body, headers=headers).status_code == 403


def test_the_page_itself_uploads_and_links_to_it_work(server):
    assert upload(server, Origin=server.address) == 200 and list(server.folder.rglob("x.png"))
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert server.http.get("/", headers=link).status_code == 200
    assert server.http.get("/config", headers={"Sec-Fetch-Site": "same-origin"}).status_code == 200


@pytest.mark.slow
def test_localhost_behind_proxies_is_this_machine_alone(server, tmp_path):
    """Gradio would ask a proxy for the page, and need a package more for one of SOCKS."""
    proxies = dict.fromkeys(("http_proxy", "HTTPS_PROXY", "https_proxy"), "http://127.0.0.1:9")
    running = Server(server.demo, tmp_path, "--host", "localhost", **proxies, ALL_PROXY="socks5://127.0.0.1:9")
    try:
        assert running.address.startswith("http://localhost:")
        assert running.http.get("/config").status_code == 200
        assert running.http.get("/config", headers={"Host": "elsewhere.example"}).status_code == 400
    finally:
        code, errors = running.end()
    assert code == 130 and "warning" not in errors


def test_events_cannot_name_a_file_of_the_machine(server):
    """A request by hand for the upload's event, with a path that was not uploaded."""
    config = server.http.get("/config").json()
    upload = next(part["id"] for part in config["components"] if part["type"] == "uploadbutton")
    event = next(event for event in config["dependencies"] if upload in event["inputs"])
    parts = {part["id"]: part["props"].get("value") for part in config["components"]}
    parts[upload] = {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}
    body = {"data": [parts[id] for id in event["inputs"]], "fn_index": event["id"], "session_hash": "byhand"}
    server.http.post("/gradio_api/queue/join", json={**body, "trigger_id": upload})
    text = server.http.get("/gradio_api/queue/data?session_hash=byhand").text
    done = next(json.loads(line[6:]) for line in text.splitlines() if "process_completed" in line)
    assert not done["success"] and "root:" not in text
    assert server.http.get("/gradio_api/info").json() == {"named_endpoints": {}, "unnamed_endpoints": {}}


def test_ctrl_c_ends_the_command_and_deletes_its_files(server):
    """The last test: the others need the server."""
    assert list(server.folder.glob("gka-explore-*/*"))
    code, errors = server.end()
    assert code == 130 and errors.endswith("interrupted\n") and "KeyboardInterrupt" not in errors
    assert "Traceback" not in errors and errors.count("refused a request") == 1, errors
    assert not list(server.folder.glob("gka-explore-*"))
