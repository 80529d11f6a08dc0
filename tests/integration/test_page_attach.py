"""What the page looks up for one text only: attached documents, and the text's own past."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from gnnlm.run import Run
from gnnlm.serve.limits import Limits
from gnnlm.serve.runs import ServedRuns
from tests.integration.browser import Visiting, serious, until, write
from tests.serve.conftest import fresh, serving

pytestmark = pytest.mark.integration
SENTENCE = "zubbel wozq mivvy <b>quazzle</b> frep. "
NOTES = SENTENCE * 6
NAME = "<i>notes</i>.txt"


@pytest.fixture
def page(visit: Visiting, open_address: str) -> Any:
    return visit(open_address).ready()


def file(name: str, content: str | bytes) -> dict[str, Any]:
    body = content if isinstance(content, bytes) else content.encode()
    return {"name": name, "mimeType": "text/plain", "buffer": body}


def choose(page: Any, *files: dict[str, Any], view: str = "write") -> None:
    """Attach files as a visitor does, with the picker."""
    with page.expect_file_chooser() as chooser:
        page.locator(f"#{view} .attach").get_by_role("button", name="Attach files").click()
    chooser.value.set_files(list(files))


def listed(page: Any, view: str = "write") -> list[str]:
    return [one.strip() for one in page.locator(f"#{view} .attachments .chip-name").all_text_contents()]


def wait_for(page: Any, count: int) -> None:
    until(page, f"document.querySelectorAll('#write .attachments li').length === {count}")


def bodies(page: Any, path: str) -> list[dict[str, Any]]:
    """What the page sends to a path from now on."""
    sent: list[dict[str, Any]] = []
    page.on("request", lambda one: sent.append(json.loads(one.post_data)) if one.url.endswith(path) else None)
    return sent


def contents(root: Path) -> dict[str, str]:
    files = (path for path in sorted(root.rglob("*")) if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_an_attached_file_is_cited_opened_and_nowhere_on_the_disk(page: Any, open_address: str, tiny_run: Run) -> None:
    before = contents(tiny_run.root)
    choose(page, file(NAME, NOTES))
    wait_for(page, 1)
    assert page.locator("#write .attachments li").inner_text().split("\n") == [NAME, f"{len(NOTES)} bytes", "×"]
    prompt = SENTENCE + SENTENCE[:12]
    write(page, prompt=prompt, tokens=24)
    body = {"model": "tiny:knn", "prompt": prompt, "max_tokens": 24, "temperature": 0, "sources": 20, "top_p": 0.95}
    attach = [{"name": NAME, "text": NOTES}]
    answer = httpx.post(f"{open_address}/v1/completions", json={**body, "attach": attach}, timeout=60).json()
    assert page.locator(".pane .words").text_content() == prompt + answer["choices"][0]["text"]
    cited = page.locator(f".supporter[data-source='attached:{NAME}']")
    assert cited.locator(".badge").text_content() == "attached"
    assert cited.locator(".supporter-name").text_content() == f"attached{NAME}"
    word = page.locator(".pane .word.copied.attached").first
    assert word.evaluate("one => getComputedStyle(one).display") == "inline"
    word.click()
    mark = page.locator("#sources .document mark")
    mark.wait_for()
    assert mark.text_content() == "".join(page.locator(".pane .word.open").all_text_contents())
    assert page.locator("#sources .document").text_content() == NOTES
    assert page.locator("#sources .document-name .badge").text_content() == "attached"
    assert f"source {NAME}, attached" in word.get_attribute("aria-label")
    page.keyboard.press("ArrowDown")  # what else could stand there
    until(page, "document.querySelector('#card .card-head')?.textContent.includes('notes</i>.txt, attached')")
    until(page, "document.activeElement.matches('#card .alternative')")  # the page scrolls there; only then click again
    assert page.locator("main i, main b:not(.token)").count() == 0
    page.locator("#write").get_by_role("button", name=f"Detach {NAME}").click()
    assert listed(page) == []
    cited.click()  # what was written keeps its sources
    assert page.locator("#sources .document").text_content() == NOTES
    assert contents(tiny_run.root) == before
    for path in tiny_run.root.rglob("*"):
        assert not path.is_file() or b"zubbel" not in path.read_bytes(), path


def test_attached_by_drop_and_paste_for_every_view(page: Any) -> None:
    drop = """([name, text]) => {
        const carried = new DataTransfer();
        carried.items.add(new File([text], name));
        for (const kind of ["dragover", "drop"]) {
            const event = new DragEvent(kind, { dataTransfer: carried, bubbles: true, cancelable: true });
            document.querySelector("#prompt").dispatchEvent(event);
            if (!event.defaultPrevented) throw new Error(`the browser would show the file at ${kind}`);
        }
    }"""
    page.evaluate(drop, ["dropped.txt", NOTES])
    wait_for(page, 1)
    box = page.locator("#write .attach")
    box.get_by_role("button", name="Paste a text").focus()
    page.keyboard.press("Enter")
    page.keyboard.type("gal pomo")
    box.get_by_role("button", name="Cancel").focus()
    page.keyboard.press("Enter")
    assert listed(page) == ["dropped.txt"]
    box.get_by_role("button", name="Paste a text").focus()
    page.keyboard.press("Enter")
    box.locator("textarea").fill("gal pomo")
    box.locator("textarea").focus()
    page.keyboard.press("Control+Enter")
    assert listed(page) == ["dropped.txt", "pasted text"]
    assert page.evaluate("document.activeElement.textContent") == "Paste a text"
    assert page.locator("section.pane").count() == 0  # the view's form was not sent
    page.evaluate(drop, ["dropped.txt", "sip"])
    until(page, "document.querySelector('#write .attach .note').textContent.includes('the same name: dropped.txt')")
    attach = [{"name": "dropped.txt", "text": "sip"}, {"name": "pasted text", "text": "gal pomo"}]
    sent = bodies(page, "/v1/score")
    page.click("nav a[href='#score']")
    assert listed(page, "score") == ["dropped.txt", "pasted text"]
    page.fill("#score-text", "gal pomo gal pomo")
    page.click("#score-form .primary")
    page.wait_for_selector("#score-out .plot")
    assert sent[-1]["attach"] == attach
    assert "own_past" not in sent[-1]
    sent = bodies(page, "/v1/attention")
    page.click("nav a[href='#graph']")
    page.fill("#graph-text", "gal p")
    page.click("#graph-form .primary")
    page.wait_for_selector("#graph-out .plot")
    assert sent[-1]["attach"] == attach
    page.locator("#graph-out summary").click()
    row = page.locator("#graph-out tbody tr", has=page.locator(".badge")).first
    row.locator(".link").click()
    until(page, "['sip', 'gal pomo'].includes(document.querySelector('#document .document').textContent)")
    page.click("nav a[href='#write']")
    page.locator("#write").get_by_role("button", name="Detach dropped.txt").focus()
    page.keyboard.press("Enter")
    assert listed(page) == ["pasted text"]
    assert page.evaluate("document.activeElement.textContent") == "Attach files"


def test_own_past_is_asked_for_and_cited(page: Any, tiny_run: Run) -> None:
    text = str(tiny_run.snapshot.streams["test"].documents[1].text)[:60] * 3  # past the model's window
    sent, following = bodies(page, "/v1/completions"), bodies(page, "/v1/next")
    write(page, prompt=text, tokens=40)
    assert "own_past" not in sent[-1]
    assert page.locator(".supporter[data-source='own:text']").count() == 0
    without = page.locator(".pane .word").evaluate_all("all => all.map(one => one.style.getPropertyValue('--share'))")
    page.locator("#write").get_by_label("Own past").check()
    write(page, prompt=text, tokens=40)
    assert sent[-1]["own_past"] is True
    shares = page.locator(".pane .word").evaluate_all("all => all.map(one => one.style.getPropertyValue('--share'))")
    assert shares != without
    own = page.locator(".supporter[data-source='own:text']")
    assert own.locator(".badge").text_content() == "this text"
    own.click()
    until(page, "document.querySelector('#sources mark') !== null")
    assert page.locator("#sources .document").text_content() == page.locator(".pane .words").text_content()
    assert page.get_by_role("button", name="Leave it out").count() == 0
    word = page.locator(".pane .word.copied.own").first
    word.click()
    opened = "".join(page.locator(".pane .word.open").all_text_contents())
    assert page.locator("#sources mark").text_content() == opened
    assert "source this text" in word.get_attribute("aria-label")
    page.keyboard.press("ArrowDown")  # what else could stand there
    page.wait_for_selector("#card .columns")
    assert following[-1]["own_past"] is True
    page.click("nav a[href='#score']")
    assert page.locator("#score").get_by_label("Own past").is_checked()  # one switch, in every view
    scored = bodies(page, "/v1/score")
    page.fill("#score-text", text)
    page.click("#score-form .primary")
    page.wait_for_selector("#score-out .plot")
    assert scored[-1]["own_past"] is True


def test_what_cannot_be_attached_is_said(visit: Visiting, served: ServedRuns) -> None:
    limits = Limits(max_attached=50, max_body=100_000)
    with serving(ServedRuns([fresh(one) for one in served]), limits) as (address, _):
        page = visit(address).ready()
        note = page.locator("#write .attach .note")
        choose(page, file("picture.png", b"\x89PNG\xff\x00"), file("wide.txt", b"a\x00b\x00"), file("empty.txt", ""))
        until(page, "!document.querySelector('#write .attach .note').hidden")
        assert note.get_attribute("role") == "alert"
        assert note.inner_text().split(". ") == [
            "Not attached: picture.png is not text in UTF-8",
            "Not attached: wide.txt is not text",
            "Not attached: empty.txt is empty.",
        ]
        assert listed(page) == []
        choose(page, file("fits.txt", "luto kin"), file("long.txt", "luto " * 11))
        wait_for(page, 2)
        assert note.is_hidden()
        write(page, tokens=5)
        alert = page.locator(".pane").get_by_role("alert")
        assert "at most 50 tokens of attached documents, got 63" in alert.inner_text()
        page.locator("#write").get_by_role("button", name="Detach long.txt").click()
        page.get_by_role("button", name="Try again").click()
        until(page, "document.querySelectorAll('.pane .word').length === 13")
        assert alert.count() == 0
        choose(page, file("huge.txt", "a" * 200_000))
        wait_for(page, 2)
        write(page, tokens=5)
        assert "larger than this server accepts (100,000 bytes)" in alert.inner_text()
        page.locator("#write").get_by_role("button", name="Detach huge.txt").click()
        choose(page, *(file(f"{number}.txt", "a") for number in range(64)))
        wait_for(page, 65)
        page.click("nav a[href='#score']")
        page.fill("#score-text", "luto")
        page.click("#score-form .primary")
        alert = page.locator("#score-out").get_by_role("alert")
        alert.wait_for()
        assert "at most 64" in alert.inner_text()


def test_a_filter_that_names_an_attached_document_goes_with_it(page: Any) -> None:
    choose(page, file("a.txt", NOTES))
    wait_for(page, 1)
    write(page, prompt=SENTENCE, tokens=12)
    page.locator(".supporter[data-source='attached:a.txt']").click()
    page.get_by_role("button", name="Look up only this").click()
    write(page, prompt=SENTENCE, tokens=12)
    assert page.locator(".supporter .badge").all_text_contents() == ["attached"]
    page.locator("#write").get_by_role("button", name="Detach a.txt").click()
    assert page.locator("#filter").is_hidden()
    write(page, prompt=SENTENCE, tokens=12)
    assert page.locator(".pane").get_by_role("alert").count() == 0
    page.get_by_role("textbox", name="Only documents").fill("doc*")
    page.get_by_role("textbox", name="Only documents").press("Enter")
    choose(page, file("a.txt", NOTES))
    wait_for(page, 1)
    assert "add attached:* to it" in page.locator("#write .attach").inner_text()


@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, 375)])
def test_for_everybody(visit: Visiting, open_address: str, axe: str, tiny_run: Run, dark: bool, width: int) -> None:
    options = {"color_scheme": "dark" if dark else "light", "viewport": {"width": width, "height": 812}}
    page = visit(open_address, bypass_csp=True, reduced_motion="reduce", **options).ready()
    page.evaluate(axe)
    choose(page, file("a-very-long-name-" * 8 + ".txt", NOTES), file("picture.png", b"\xff"))
    wait_for(page, 1)
    page.locator("#write").get_by_label("Own past").check()
    page.locator("#write").get_by_role("button", name="Paste a text").click()
    write(page, prompt=SENTENCE * 4, tokens=40)
    page.locator(".supporter", has=page.locator(".badge")).first.click()
    page.locator("#sources mark").wait_for()
    for view in ("write", "score", "graph"):
        page.click(f"nav a[href='#{view}']")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, view
        assert not serious(page), view
