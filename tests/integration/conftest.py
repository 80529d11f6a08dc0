"""A server over the tiny run, for other people's clients.

The tools are installed where these tests run, so a test that is skipped has failed.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from gnnlm.book import Book
from gnnlm.run import Run
from gnnlm.serve.limits import Limits
from gnnlm.serve.runs import ServedRuns, open_runs
from tests.integration.browser import FLAGS, Visit, Visiting
from tests.serve.conftest import serving

KEY = "integration-key"
AXE = "axe-core@4.14.0"


@pytest.fixture(scope="session")
def served(tiny_run: Run) -> ServedRuns:
    return open_runs([tiny_run.root])


@pytest.fixture(scope="session")
def served_book(served: ServedRuns) -> Book:
    return served.find("tiny")[0].book


@pytest.fixture(scope="session")
def open_address(served: ServedRuns) -> Iterator[str]:
    """A server without keys."""
    with serving(served, Limits(max_prompt=2000, max_tokens=300)) as (address, _):
        yield address


@pytest.fixture(scope="session")
def locked_address(served: ServedRuns) -> Iterator[str]:
    """A server with a key, and room for few."""
    from tests.serve.conftest import fresh

    limits = Limits(max_prompt=300, max_tokens=3000, batch=1, queue=1)
    with serving(ServedRuns([fresh(run) for run in served]), limits, (KEY,)) as (address, _):
        yield address


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, None]:
    report = (yield).get_result()
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which counts as failed: {report.longrepr}"


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """axe-core, fetched when the tests run."""
    npm = shutil.which("npm")
    assert npm, f"this test gets {AXE} with npm: apt-get install npm"
    folder = tmp_path_factory.mktemp("axe")
    done = subprocess.run(
        [npm, "install", "--no-save", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(folder), AXE],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install 'gnnlm[browser]'")
    chromium = shutil.which("chromium")
    assert chromium, "these tests need Debian's chromium: apt-get install chromium"
    with sync_api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Visiting]:
    """Open the page of a server, as often as a test wants to."""
    visits: list[Visit] = []

    def begin(address: str, **options: Any) -> Visit:
        visits.append(Visit(browser, address, **options))
        return visits[-1]

    yield begin
    for one in visits:
        one.close()
