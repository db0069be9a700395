"""A headless Chromium for the tests of pages, through Playwright; tests are skipped, with the reason, without one."""

import contextlib
import shutil

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextlib.contextmanager
def launch():
    """Yield a browser of the machine's own Chromium, and close it."""
    from playwright import sync_api as playwright

    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"no browser was found: none of {', '.join(NAMES)} is on the PATH")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextlib.contextmanager
def watched(browser, **options):
    """Yield a page and two lists that fill as it is used: what went wrong on it, and every address it asked for.

    options: of a Playwright page, such as viewport={"width": 390, "height": 844} or color_scheme="dark".
    """
    page = browser.new_page(**options)
    problems, requests = [], []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    yield page, problems, requests
    page.close()
