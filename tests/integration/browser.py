"""A page in Debian's chromium: a file, cut off from everything but itself, or the page of a server."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

FLAGS = [
    "--no-sandbox",
    "--headless",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
WIDE, PHONE = (1280, 900), (375, 812)


@dataclass
class Opened:
    """A page, what it asked for beyond itself, and what it complained of."""

    page: Any
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


@contextmanager
def opened(path: Path, size: tuple[int, int] = WIDE, dark: bool = False, media: str = "screen") -> Iterator[Opened]:
    """Open a file in the browser, offline."""
    sync_api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs Debian's chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        scheme = "dark" if dark else "light"
        viewport = {"width": size[0], "height": size[1]}
        context = browser.new_context(viewport=viewport, color_scheme=scheme, offline=True)
        page = context.new_page()
        page.emulate_media(media=media, color_scheme=scheme)
        seen = Opened(page)
        page.on("request", lambda request: seen.requests.append(request.url))
        page.on("console", lambda message: seen.complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: seen.complaints.append(str(error)))
        page.goto(path.resolve().as_uri())
        page.wait_for_load_state("load")
        seen.requests = [url for url in seen.requests if not url.startswith("data:")]
        try:
            yield seen
        finally:
            browser.close()


class Visit:
    """A page of a server; at the end, nothing may have gone elsewhere, popped up, or been refused by the policy."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.address, self.urls, self.complaints = address, list[str](), list[str]()
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.page = self.context.new_page()
        self.page.set_default_timeout(120_000)
        self.page.on("request", lambda request: self.urls.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._heard)
        self.page.on("dialog", self._popped)
        self.page.goto(address)

    def _heard(self, message: Any) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)

    def _popped(self, dialog: Any) -> None:
        self.complaints.append(f"a dialog: {dialog.message}")
        dialog.dismiss()

    def ready(self) -> Any:
        self.page.wait_for_selector("html[data-ready]")
        return self.page

    def close(self) -> None:
        self.context.close()
        assert not self.complaints
        assert {url for url in self.urls if not url.startswith(f"{self.address}/")} == set()


Visiting = Callable[..., Visit]


def write(page: Any, prompt: str = "luto kin", tokens: int = 40, predictor: str = "knn", temperature: str = "0") -> Any:
    """Write a text to its end; its pane."""
    begin(page, prompt, tokens, predictor, temperature)
    page.wait_for_selector("#go:enabled")
    return page.locator("section.pane").first


def begin(page: Any, prompt: str, tokens: int, predictor: str = "knn", temperature: str = "0") -> None:
    page.fill("#prompt", prompt)
    page.locator("#options").evaluate("options => (options.open = true)")
    page.fill("#max-tokens", str(tokens))
    page.fill("#temperature", temperature)
    page.locator(f"#predictor input[value={predictor}]").check(force=True)
    page.click("#go")


def until(page: Any, expression: str, seconds: float = 120) -> None:
    """Wait until an expression is true; Playwright's own way evaluates strings, which the page's policy forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"not in {seconds:g} seconds: {expression}"
        page.wait_for_timeout(20)


def serious(page: Any) -> dict[str, list[str]]:
    """What axe, which the page has loaded, finds serious."""
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")["violations"]
    return {
        one["id"]: [node["html"][:200] + " " + node["failureSummary"] for node in one["nodes"][:3]]
        for one in found
        if one["impact"] in ("serious", "critical")
    }
