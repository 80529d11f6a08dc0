"""A page in Debian's chromium, cut off from everything but itself."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
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
