"""The page in Debian's chromium, against a real server: what a visitor does, and what may never happen."""

from __future__ import annotations

import json
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gnnlm.config import parse_config
from gnnlm.run import Run
from gnnlm.serve import static_page as page_files
from gnnlm.serve.limits import Limits
from gnnlm.serve.runs import ServedRuns, open_runs
from tests.conftest import TINY, merge, write_texts
from tests.integration.browser import Visiting, begin, serious, until, write
from tests.serve.conftest import Command, fresh, serving

pytestmark = pytest.mark.integration
SCRIPT_NAME = "<script>alert(1)</script>.txt"
MARKUP = "<img src=x onerror=alert(2)> <b>bold</b> &amp; <script>alert(3)</script> and the end of it.\n"
LIMITS = Limits(max_tokens=4000)


# -- a run, a server, a browser --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tiny_lm_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A tiny run whose documents are as unkind as documents can be."""
    root = tmp_path_factory.mktemp("page")
    for number, split in enumerate(("train", "valid", "test")):
        write_texts(root / split, documents=3, seed=number)
    hostile = root / "train" / SCRIPT_NAME  # its slash makes a folder of it
    hostile.parent.mkdir()
    hostile.write_text("luto kin kin dosha luto.\n" * 6, encoding="utf-8")
    (root / "train" / "markup.txt").write_text(MARKUP * 4 + "\N{GRINNING FACE} after a wide sign.\n", encoding="utf-8")
    corpus = {split: str(root / split) for split in ("train", "valid", "test")}
    values = merge(TINY, {"corpus": corpus, "lm": {"model": str(tiny_lm_dir)}})
    for share in ("valid_share", "test_share"):
        del values["corpus"][share]
    made = Run(parse_config({"run": str(root / "tiny"), **values}))
    made.build_all()
    return made


@pytest.fixture(scope="module")
def served(run: Run) -> ServedRuns:
    return open_runs([run.root])


@pytest.fixture(scope="module")
def address(served: ServedRuns) -> Iterator[str]:
    with serving(served, LIMITS) as (address, _):
        yield address


@pytest.fixture
def page(visit: Visiting, address: str) -> Any:
    return visit(address).ready()


def words(page: Any) -> str:
    return str(page.locator(".pane .words").first.text_content())


# -- files -----------------------------------------------------------------------------------------------------


def test_files_of_the_page(address: str) -> None:
    """Each has its type and the policy, and is sent once."""
    assert {"/", "/page/app.js", "/page/look.css", "/page/icon.svg"} <= page_files.PATHS
    with httpx.Client(base_url=address) as client:
        for path in page_files.PATHS:
            answer = client.get(path)
            assert answer.status_code == 200
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["cache-control"] == "no-cache"
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            again = client.get(path, headers={"If-None-Match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert client.get("/page/app.js").headers["content-type"].startswith("text/javascript")
        assert client.get("/page/page.py").status_code == 404
        assert client.get("/page/../page.py").status_code == 404


def test_no_module_makes_markup_of_text() -> None:
    """The policy would stop it; here it is said at once, and where."""
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|https?://(?!www\.w3\.org)"
    )
    for file in (Path(page_files.__file__).parent / "page").iterdir():
        assert not forbidden.search(file.read_text(encoding="utf-8")), file.name


# -- writing ---------------------------------------------------------------------------------------------------


def test_writes_what_the_api_writes(page: Any, address: str) -> None:
    """Words, shades and spans are those of the API: the page finds the same spans while the text comes in."""
    pane = write(page)
    body = {"model": "tiny:knn", "prompt": "luto kin", "max_tokens": 40, "temperature": 0, "top_p": 0.95, "sources": 20}
    (choice,) = httpx.post(f"{address}/v1/completions", json=body, timeout=60).json()["choices"]
    given, written = len("luto kin"), choice["gnnlm"]["tokens"]
    assert words(page) == "luto kin" + choice["text"]
    shades = page.locator(".pane .word").evaluate_all("all => all.map(one => one.style.getPropertyValue('--share'))")
    assert shades[:given] == [""] * given
    assert [float(one) for one in shades[given:]] == pytest.approx([token["book"] for token in written], abs=6e-4)
    copied = page.locator(".pane .word").evaluate_all("all => all.map(one => one.classList.contains('copied'))")
    expected = {given + place for span in choice["gnnlm"]["spans"] for place in range(span["first"], span["last"] + 1)}
    assert expected  # otherwise this test says nothing
    assert {place for place, one in enumerate(copied) if one} == expected
    shown = pane.locator(".stats").inner_text().split("\n")
    assert shown[shown.index("tokens") + 1] == "40"
    assert shown[shown.index("searches") + 1] == f"{choice['gnnlm']['searches']:,}"


def test_streams_and_stops(page: Any) -> None:
    begin(page, "luto", 4000)  # sampled, a text may end by itself
    until(page, "document.querySelectorAll('.pane .word').length > 20")
    assert page.locator(".pane").get_attribute("aria-busy") == "true"
    page.click("#stop")
    page.wait_for_selector("#go:enabled")
    count = page.locator(".pane .word").count()
    assert 20 < count < 4000
    page.wait_for_timeout(300)
    assert page.locator(".pane .word").count() == count
    assert "stopped" in page.locator(".actions").inner_text()
    page.get_by_role("button", name="Go on").click()
    until(page, f"document.querySelectorAll('.pane .word').length > {count}")


def test_a_copied_word_opens_its_source(page: Any, address: str) -> None:
    """The words that are marked in the document are those of the text."""
    write(page)
    page.locator(".pane .word.copied").first.click()
    mark = page.locator("#sources .document mark")
    mark.wait_for()
    opened = "".join(page.locator(".pane .word.open").all_text_contents())
    assert opened
    assert mark.text_content() == opened
    name = page.locator("#sources .document-name").text_content()
    whole = httpx.get(f"{address}/v1/documents/text", params={"name": name}).json()["text"]
    assert page.locator("#sources .document").text_content() == whole
    box, inside = page.locator("#sources .document").bounding_box(), mark.bounding_box()
    assert box["y"] <= inside["y"] <= box["y"] + box["height"]  # in view


def test_a_source_marks_the_words_it_supports(page: Any, address: str) -> None:
    write(page)
    first = page.locator(".supporter").first
    name = first.get_attribute("data-source")
    first.click()
    body = {"model": "tiny:knn", "prompt": "luto kin", "max_tokens": 40, "temperature": 0, "top_p": 0.95, "sources": 20}
    tokens = httpx.post(f"{address}/v1/completions", json=body, timeout=60).json()["choices"][0]["gnnlm"]["tokens"]
    supported = [any(s["document"] == name and s["share"] >= 0.05 for s in token["sources"]) for token in tokens]
    marked = page.locator(".pane .word").evaluate_all("all => all.map(one => one.classList.contains('supported'))")
    assert marked[len("luto kin") :] == supported
    assert page.locator(".supporter").first.get_attribute("aria-pressed") == "true"
    page.locator(".supporter").first.click()
    assert page.locator(".word.supported").count() == 0


def test_alternatives_side_by_side_and_on_from_one(page: Any, address: str) -> None:
    write(page, predictor="gnn_knn")
    before = words(page)
    place = 12
    page.locator(".pane .word").nth(place).hover()
    page.wait_for_selector("#card .columns")
    assert page.locator("#card h3").all_text_contents() == ["base", "kNN", "GNN", "GNN+kNN"]
    ids = httpx.post(f"{address}/tokenize", json={"prompt": before[:place]}).json()["tokens"]
    found = httpx.post(f"{address}/v1/next", json={"model": "tiny", "prompt": ids, "top": 5}).json()
    texts = {one["id"]: one["text"] for one in found["data"]}
    for number, name in enumerate(found["predictors"]):
        shown = page.locator("#card .column").nth(number).locator(".token").all_text_contents()
        expected = [texts[one] for one in found["top"][name]]
        assert [seen(text) for text in shown[:5]] == expected
    other = next(one for one in found["top"]["gnn_knn"] if texts[one] != before[place] and texts[one].isalpha())
    row = found["top"]["gnn_knn"].index(other)
    page.locator("#card .column").nth(3).locator(".alternative").nth(row).click()
    page.wait_for_selector("#go:enabled")
    assert words(page).startswith(before[:place] + texts[other])
    assert page.locator(".pane .word.taken").text_content() == texts[other]
    assert page.evaluate("document.activeElement.dataset.place") == str(place)  # the keys are where the reader was
    assert page.locator("#card").is_hidden()
    page.get_by_role("button", name="Back to the text before").click()
    assert words(page) == before


def seen(text: str) -> str:
    """A token's text from what the page shows of it."""
    text = re.sub(r"<0x([01].|7F)>", lambda sign: chr(int(sign[1], 16)), text)
    return text.replace("·", " ").replace("↵", "\n").replace("⇥", "\t")


def test_two_predictors_side_by_side(page: Any, address: str) -> None:
    page.locator("#predictor input[value=knn]").check(force=True)
    page.select_option("#beside", "base")
    write(page)
    assert page.locator(".pane-title").all_text_contents() == ["kNN", "base"]
    body = {"model": "tiny:base", "prompt": "luto kin", "max_tokens": 40, "temperature": 0}
    text = httpx.post(f"{address}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
    assert page.locator(".pane .words").nth(1).text_content() == "luto kin" + text
    assert page.locator(".pane").nth(1).locator(".word.copied").count() == 0


def test_options_and_filters_reach_the_server(page: Any, address: str) -> None:
    sent: list[dict[str, Any]] = []
    page.on("request", lambda one: sent.append(json.loads(one.post_data)) if "completions" in one.url else None)
    page.locator("#options").evaluate("options => (options.open = true)")
    page.fill("#seed", "7")
    page.fill("#stops", "END\nx\\ny")
    page.get_by_role("textbox", name="Only documents").fill("doc*")
    page.get_by_role("textbox", name="Only documents").press("Enter")
    page.get_by_role("textbox", name="Without documents").fill("doc01.txt")
    page.get_by_role("button", name="Add to: Without documents").click()
    write(page, tokens=5, temperature="0.5")
    wanted = {"seed": 7, "stop": ["END", "x\ny"], "only": ["doc*"], "exclude": ["doc01.txt"], "temperature": 0.5}
    assert wanted.items() <= sent[-1].items()
    page.get_by_role("button", name="Look up all").click()
    write(page, tokens=5)
    assert "only" not in sent[-1]


# -- the other views -------------------------------------------------------------------------------------------


def test_scores_a_text(page: Any, address: str) -> None:
    page.click("nav a[href='#score']")
    text = "luto kin dosha \N{GRINNING FACE} é."
    page.fill("#score-text", text)
    page.click("#score-form .primary")
    page.wait_for_selector("#score-out .plot")
    found = httpx.post(f"{address}/v1/score", json={"model": "tiny", "input": text}, timeout=60).json()["data"][0]
    assert page.locator("#score-out .words").text_content() == text
    rows = page.locator("#score-out tbody tr").all_inner_texts()
    for name, row in zip(("base", "knn", "gnn", "gnn_knn"), rows, strict=True):
        assert f"{found['perplexity'][name]:.2f}" in row
    gains = [token["log_probs"]["gnn_knn"] - token["log_probs"]["base"] for token in found["tokens"]]
    shown = page.locator("#score-out .word").evaluate_all("all => all.map(one => one.classList.contains('gain'))")
    assert shown == [gain > 0.1 for gain in gains]
    assert page.locator("#score-out path.line").count() == 3
    page.locator("#score-out .word").first.hover()
    until(page, "document.querySelector('.detail').textContent.includes('GNN+kNN')")


def test_draws_the_graph_of_a_word(page: Any, address: str) -> None:
    write(page, tokens=10)
    page.locator(".pane .word").nth(6).hover()
    page.get_by_role("button", name="Show the graph").click()
    page.wait_for_selector("#graph-out .plot")
    ids = httpx.post(f"{address}/tokenize", json={"prompt": "luto k"}).json()["tokens"]
    found = httpx.post(f"{address}/v1/attention", json={"model": "tiny", "prompt": ids}).json()
    assert page.locator("#graph-out .edge.inter").count() == min(10, len(found["neighbors"]))
    assert page.locator("#graph-out tbody tr").count() == len(found["neighbors"])
    best = max(sum(layer[one] for layer in found["by_neighbor"]) for one in range(len(found["neighbors"])))
    page.locator("#graph-out summary").click()
    first = page.locator("#graph-out tbody tr").first.inner_text()
    assert f"{100 * best / len(found['by_neighbor']):.1f}"[:2] in first
    assert "not a cause" in page.locator("#graph-out").inner_text()
    page.locator("#graph-out tbody .link").first.click()
    page.wait_for_selector("#document mark")


def test_documents_are_found_opened_and_chosen(page: Any, address: str) -> None:
    page.click("nav a[href='#documents']")
    page.wait_for_selector("#documents-list li")
    found = httpx.get(f"{address}/v1/documents").json()
    assert page.locator("#documents-list .link").all_text_contents() == [one["name"] for one in found["data"]]
    page.fill("#search", "DOC01")
    until(page, "document.querySelectorAll('#documents-list li').length === 1")
    page.get_by_role("button", name="doc01.txt", exact=True).click()
    until(page, "document.querySelector('#document .document').textContent.length > 100")
    page.get_by_role("button", name="Look up only doc01.txt").click()
    assert "only" in page.locator("#filter").inner_text()
    page.click("nav a[href='#write']")
    write(page)
    assert set(page.locator(".supporter-name").all_text_contents()) == {"doc01.txt"}


def test_about_shows_the_report(page: Any, address: str) -> None:
    page.click("nav a[href='#about']")
    page.wait_for_selector("#about-out .plot")
    report = httpx.get(f"{address}/v1/report").json()
    rows = page.locator("#about-out tbody tr").all_inner_texts()
    assert len(rows) == len(report["rows"])
    for row, values in zip(rows, report["rows"].values(), strict=True):
        assert f"{values['ppl']:.2f}" in row
    assert page.locator("#about-out .whisker").count() == len(rows) - 1
    described = page.locator("#about-out svg").last.get_attribute("aria-label")
    assert f"step {report['history'][-1]['step']}:" in described


# -- text is text ----------------------------------------------------------------------------------------------


def test_markup_in_names_and_documents_does_nothing(page: Any) -> None:
    """`Visit.close` sees every dialog and every complaint of the policy."""
    page.click("nav a[href='#documents']")
    page.get_by_role("button", name=SCRIPT_NAME, exact=True).click()
    until(page, "document.querySelector('#document .document').textContent.startsWith('luto kin')")
    assert page.locator("#document .document-name").text_content() == SCRIPT_NAME
    page.get_by_role("button", name="markup.txt", exact=True).click()
    until(page, "document.querySelector('#document .document').textContent.startsWith('<img')")
    page.get_by_role("button", name=f"Look up only {SCRIPT_NAME}").click()
    page.get_by_role("button", name="Look up only markup.txt").click()
    assert SCRIPT_NAME in page.locator("#filter").inner_text()
    page.click("nav a[href='#write']")
    write(page, prompt="<b>bold</b> &amp; <script>al", tokens=60, predictor="gnn_knn")
    page.locator(".supporter").first.click()
    page.locator("#sources mark").wait_for()
    assert page.locator("main script, main b:not(.token), main img, #sources img").count() == 0
    assert "<script>al" in words(page)


def test_wide_characters_are_counted_as_the_server_counts_them(page: Any) -> None:
    page.get_by_role("link", name="Documents").click()
    page.get_by_role("button", name="Look up only markup.txt").click()
    page.get_by_role("link", name="Write").click()
    write(page, prompt="\N{GRINNING FACE} after a wi", tokens=8)
    assert words(page).startswith("\N{GRINNING FACE} after a wi")
    page.locator(".pane .word.copied").first.click()
    page.locator("#sources mark").wait_for()
    assert page.locator("#sources mark").text_content() == "".join(page.locator(".pane .word.open").all_text_contents())


# -- when things go wrong --------------------------------------------------------------------------------------


def test_refused_then_recovers(visit: Visiting, served: ServedRuns) -> None:
    """A field out of range, a full queue, and then it works again without a reload."""
    limits = Limits(max_tokens=50, queue=1)
    with serving(ServedRuns([fresh(one) for one in served]), limits) as (address, context):
        page = visit(address).ready()
        write(page, tokens=51)
        assert "at most 50 tokens" in page.get_by_role("alert").inner_text()
        held, begun = threading.Event(), threading.Event()
        blocked = context.worker.call(lambda: (begun.set(), held.wait(60)))
        assert begun.wait(30)
        waiting = context.worker.call(lambda: None)
        write(page, tokens=10)
        note = page.get_by_role("alert").inner_text()
        assert "too many requests" in note.lower()
        assert "2 seconds" in note
        held.set()
        blocked.result(30)
        waiting.result(30)
        page.get_by_role("button", name="Try again").click()
        page.wait_for_selector("#go:enabled")
        assert page.get_by_role("alert").count() == 0
        assert page.locator(".pane .word").count() == len("luto kin") + 10


def test_tries_again_from_the_prompt_if_nothing_was_read(page: Any) -> None:
    page.route("**/tokenize", lambda route: route.abort())
    write(page, tokens=5)
    assert "cannot be reached" in page.get_by_role("alert").inner_text()
    page.unroute("**/tokenize")
    page.get_by_role("button", name="Try again").click()
    until(page, "document.querySelectorAll('.pane .word').length === 13")
    assert words(page).startswith("luto kin")


def test_a_server_that_dies_half_way(visit: Visiting, run: Run) -> None:
    with Command(run.root, "--max-tokens", "4000") as server:
        page = visit(server.address).ready()
        begin(page, "luto", 4000)
        until(page, "document.querySelectorAll('.pane .word').length > 10")
        server.send_signal(signal.SIGKILL)
        page.wait_for_selector("#go:enabled")
        note = page.get_by_role("alert").inner_text()
        assert "half-way" in note
        assert "is kept" in note
        assert page.locator(".pane .word").count() > 10
        page.get_by_role("button", name="Try again").click()
        until(page, "document.querySelector('.pane .note').textContent.includes('cannot be reached')")


def test_asks_for_a_key(visit: Visiting, served: ServedRuns) -> None:
    with serving(ServedRuns([fresh(one) for one in served]), LIMITS, ("right-key-1",)) as (address, _):
        seen = visit(address)
        page = seen.page
        page.wait_for_selector("#key[open]")
        page.fill("#key-value", "wrong-key-1")
        page.keyboard.press("Enter")
        until(page, "document.querySelector('#key-trouble').textContent.includes('did not accept')")
        page.fill("#key-value", "right-key-1")
        page.keyboard.press("Enter")
        seen.ready()
        write(page, tokens=5)
        assert page.locator(".pane .word").count() == len("luto kin") + 5
        assert page.evaluate("[...Object.values(sessionStorage)]") == ["right-key-1"]
        assert "right-key-1" not in page.evaluate("JSON.stringify(localStorage) + document.cookie + location.href")


def test_documents_are_added_and_removed_with_a_key(visit: Visiting, run: Run, tmp_path: Path) -> None:
    root = shutil.copytree(run.root, tmp_path / "tiny")
    with serving(open_runs([root]), LIMITS, ("right-key-1",)) as (address, _):
        seen = visit(address)
        page = seen.page
        page.fill("#key-value", "right-key-1")
        page.keyboard.press("Enter")
        seen.ready()
        page.click("nav a[href='#documents']")
        page.wait_for_selector("#documents-list li")
        page.click("#add summary")
        for markup in ("<b>note</b>", "other"):
            page.fill("#add-name", markup)
            page.fill("#add-tags", "manual, new")
            page.fill("#add-text", "gal pomo sip tus <i>text</i> of its own.")
            page.click("#add-form button")
            until(page, "document.querySelector('#add-name').value === ''")
        assert "Generation 2: added 1, removed 0" in page.locator("#change-note").text_content()
        mine = page.locator("#documents-list li", has_text="<b>note</b>")
        mine.get_by_role("button", name="Look up only documents with the tag manual").click()
        assert "tag:manual" in page.locator("#filter").text_content()
        mine.locator(".link").click()
        until(page, "document.querySelector('#document .document').textContent.includes('<i>text</i>')")
        page.fill("#add-name", "other")
        page.fill("#add-text", "sip sip")
        page.click("#add-form button")
        until(page, "document.querySelector('#change-note').textContent.includes('use replace')")
        page.check("#add-replace")
        page.click("#add-form button")
        until(page, "document.querySelector('#change-note').textContent.startsWith('Generation 3')")
        mine.get_by_role("button", name="Remove <b>note</b>").click()
        until(page, "document.querySelector('#change-note').textContent.startsWith('Generation 4')")
        mine.wait_for(state="detached")  # the list is loaded again after the note


# -- for everybody ---------------------------------------------------------------------------------------------


def test_with_the_keyboard_alone(page: Any) -> None:
    def tab_to(selector: str, most: int = 40) -> None:
        for _ in range(most):
            page.keyboard.press("Tab")
            if page.evaluate("wanted => document.activeElement.matches(wanted)", selector):
                return
        raise AssertionError(f"{selector} cannot be reached with Tab")

    tab_to("#prompt")
    page.keyboard.press("Control+A")
    page.keyboard.type("luto kin")
    tab_to("#predictor input:checked")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.locator("#predictor input:checked").input_value() == "knn"
    tab_to("#go")
    page.keyboard.press("Enter")
    page.wait_for_selector("#go:enabled")
    page.locator("#prompt").focus()
    tab_to(".word")
    for _ in range(9):
        page.keyboard.press("ArrowRight")
    place = int(page.evaluate("document.activeElement.dataset.place"))
    assert place == 9
    assert "from the book" in page.evaluate("document.activeElement.getAttribute('aria-label')")
    page.wait_for_selector("#card .columns")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.className").startswith("alternative")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.dataset.place") == "9"
    assert page.locator("#card").is_hidden()
    page.keyboard.press("End")
    page.keyboard.press("Home")
    assert page.evaluate("document.activeElement.dataset.place") == "0"
    copied = page.locator(".pane .word.copied").first.get_attribute("data-place")
    for _ in range(int(copied)):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.locator("#sources mark").wait_for()
    tab_to(".supporter")
    page.keyboard.press("Space")
    assert page.locator(".word.supported").count() > 0
    assert page.evaluate("document.activeElement.className") == "supporter"  # the keys stay where they were


VIEWS = ("write", "score", "graph", "documents", "about")


def fill_views(page: Any) -> Iterator[str]:
    """Every view with something in it, one after another."""
    write(page, tokens=30)
    page.locator(".pane .word.copied").first.click()
    page.locator("#sources mark").wait_for()
    yield "write"
    page.locator(".pane .word").nth(10).hover()
    page.wait_for_selector("#card .columns")
    yield "card"
    page.keyboard.press("Escape")
    for view, ready in zip(
        VIEWS[1:], ("#score-out .plot", "#graph-out .plot", "#document .document", ".plot"), strict=True
    ):
        page.click(f"nav a[href='#{view}']")
        if view in ("score", "graph"):
            page.fill(f"#{view}-text", "luto kin dosha.")
            page.click(f"#{view}-form .primary")
        if view == "documents":
            page.locator("#documents-list .link").first.click()
        page.locator(f"#{view}").locator(ready.removeprefix(f"#{view} ")).first.wait_for()
        yield view


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_never_scrolls_sideways(visit: Visiting, address: str, dark: bool) -> None:
    options = {"viewport": {"width": 375, "height": 812}, "color_scheme": "dark" if dark else "light"}
    page = visit(address, **options).ready()
    for view in fill_views(page):
        assert page.evaluate("document.documentElement.scrollWidth") <= 375, view


def test_dark_by_the_system_and_by_the_switch(visit: Visiting, address: str) -> None:
    brightness = """() => {
        const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d");
        canvas.fillStyle = getComputedStyle(document.documentElement).backgroundColor;
        canvas.fillRect(0, 0, 1, 1);
        return canvas.getImageData(0, 0, 1, 1).data.slice(0, 3).reduce((a, b) => a + b) / 765;
    }"""
    seen = visit(address, color_scheme="dark")
    page = seen.ready()
    assert page.evaluate(brightness) < 0.2
    page.select_option("#theme", "light")
    assert page.evaluate(brightness) > 0.8
    page.reload()
    seen.ready()
    assert page.evaluate(brightness) > 0.8
    page.select_option("#theme", "auto")
    assert page.evaluate(brightness) < 0.2


@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing_serious(visit: Visiting, address: str, axe: str, dark: bool) -> None:
    page = visit(address, color_scheme="dark" if dark else "light", bypass_csp=True, reduced_motion="reduce").ready()
    page.evaluate(axe)
    for view in fill_views(page):
        assert not serious(page), view


def test_landmarks_and_one_heading_for_each_view(page: Any) -> None:
    for role in ("banner", "navigation", "main", "contentinfo", "complementary"):
        assert page.get_by_role(role).count() == 1, role
    for view in VIEWS:
        page.click(f"nav a[href='#{view}']")
        assert page.locator("h1:visible").count() == 1
        assert page.locator("nav [aria-current=page]").inner_text().lower() == view
