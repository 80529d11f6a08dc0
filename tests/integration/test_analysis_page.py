"""The page of the analysis as a reader sees it, in a browser that is offline."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli import gnnlm
from tests.integration.browser import PHONE, WIDE, opened

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def page(tiny_run: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = Path(shutil.copytree(tiny_run.root, tmp_path_factory.mktemp("analysed") / "run"))
    gnnlm("analyze", root)
    return root / "analysis" / "index.html"


@pytest.mark.parametrize(("size", "dark"), [(WIDE, False), (WIDE, True), (PHONE, False), (PHONE, True)])
def test_it_opens_whole_and_asks_for_nothing(page: Path, size: tuple[int, int], dark: bool, tmp_path: Path) -> None:
    with opened(page, size, dark) as seen:
        seen.page.screenshot(path=tmp_path / "page.png", full_page=True)
        assert seen.requests == [page.resolve().as_uri()]
        assert seen.complaints == []
        widths = seen.page.evaluate("[...document.images].map((image) => image.complete && image.naturalWidth)")
        assert len(widths) >= 4
        assert all(widths)
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= size[0]
        assert seen.page.evaluate("document.querySelectorAll('main section').length") >= 4


def test_dark_means_dark_with_figures_on_a_light_card(page: Path) -> None:
    with opened(page, dark=True) as seen:
        back = "getComputedStyle(document.querySelector('{}')).backgroundColor"
        body, card = (seen.page.evaluate(back.format(name)) for name in ("body", ".picture"))
    assert max(_rgb(body)) < 60
    assert min(_rgb(card)) > 240


def _rgb(colour: str) -> list[int]:
    return [int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]


def test_tables_sort_by_click_and_by_keyboard(page: Path) -> None:
    table = "#table-recall-recall table"
    with opened(page) as seen:
        first = f"[...document.querySelectorAll('{table} tbody tr')].map((row) => row.cells[0].textContent)"
        values = f"[...document.querySelectorAll('{table} tbody tr')].map((row) => Number(row.cells[4].dataset.v))"
        heading = seen.page.locator(f"{table} thead th").nth(4)
        was = seen.page.evaluate(first)
        heading.get_by_role("button").click()
        assert heading.get_attribute("aria-sort") == "ascending"
        assert seen.page.evaluate(values) == sorted(seen.page.evaluate(values))
        assert "ascending" in seen.page.locator("#status").text_content()
        heading.get_by_role("button").focus()
        seen.page.keyboard.press("Enter")
        assert heading.get_attribute("aria-sort") == "descending"
        assert seen.page.evaluate(values) == sorted(seen.page.evaluate(values), reverse=True)
        seen.page.keyboard.press("Space")
        assert heading.get_attribute("aria-sort") == "none"
        assert seen.page.evaluate(first) == was
        assert seen.complaints == []


def test_what_is_not_known_is_sorted_last(page: Path) -> None:
    """The speed of the network alone is not known for base, the first row."""
    table = "#table-neighbours-graph_k table"
    with opened(page) as seen:
        last = f"document.querySelector('{table} tbody').rows[document.querySelector('{table} tbody').rows.length - 1]"
        button = seen.page.locator(f"{table} thead th").last.get_by_role("button")
        for _ in range(2):
            button.click()
            assert seen.page.evaluate(f"{last}.cells[0].textContent") == "base"


def test_it_prints_on_paper(page: Path, tmp_path: Path) -> None:
    with opened(page, media="print") as seen:
        seen.page.pdf(path=tmp_path / "page.pdf", format="A4")
        assert seen.page.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
        assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("dark", [False, True])
def test_no_barriers_are_found(page: Path, dark: bool, axe: str) -> None:
    with opened(page, dark=dark) as seen:
        seen.page.evaluate(axe)
        found = seen.page.evaluate("axe.run()")
    assert [(v["id"], [node["html"][:200] for node in v["nodes"]]) for v in found["violations"]] == []
    assert len(found["passes"]) > 20
