"""Chromium, and pages that must not go anywhere else nor complain."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="the browser tests do not run: there is no chromium (apt install it)"
)
_PATIENCE = 60_000  # milliseconds, that only a failure takes
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
# Nothing of the browser's own goes out, and nothing is kept.
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def chromium() -> Iterator[Browser]:
    expect.set_options(timeout=_PATIENCE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(_FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class Watch:
    """What a page has asked for, and what has gone wrong in it."""

    def __init__(self, page: Page) -> None:
        self.urls: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.urls.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._note)

    def _note(self, message: Any) -> None:
        if message.type == "error":  # such as what the content policy forbids
            self.complaints.append(message.text)


@contextmanager
def open_page(
    browser: Browser,
    url: str,
    *,
    width: int = 1440,
    height: int = 1000,
    scheme: Any = "light",
    password: str | None = None,
    quiet: bool = True,
) -> Iterator[Page]:
    """A page of a profile of its own, when it has shown its first data.

    quiet: at the end it must have asked nobody but `url`, and nothing may have gone wrong in it.
    """
    credentials: Any = None if password is None else {"username": "", "password": password}
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,
        http_credentials=credentials,
        reduced_motion="no-preference",
    )
    try:
        context.set_default_timeout(_PATIENCE)
        page = context.new_page()
        watch = Watch(page)
        page.goto(f"{url}/dashboard")
        page.wait_for_selector("#content:not([hidden])")
        expect(page.locator("#map")).to_have_attribute("data-frames", re.compile("[1-9]"))
        yield page
        if quiet:
            assert not watch.complaints, watch.complaints
            elsewhere = [found for found in watch.urls if not found.startswith(f"{url}/")]
            assert not elsewhere, elsewhere
    finally:
        context.close()
