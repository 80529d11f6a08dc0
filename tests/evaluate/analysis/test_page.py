"""The page: computed sentences, escaped text, a policy that lets nothing else in."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from gnnlm.evaluate.analysis.analysis_page import MissingPart, page_of
from gnnlm.evaluate.analysis.figure import axes_of
from gnnlm.evaluate.analysis.markdown import markdown_of
from gnnlm.evaluate.analysis.overview import summary_of
from gnnlm.evaluate.analysis.section import AnalysisSection, Figure
from gnnlm.evaluate.report import DocumentRow, Report
from gnnlm.evaluate.table import MarkedText, Table, number, text
from tests.evaluate.reports import make_report

EVIL = "<script>alert('x')</script> \"q\" & | *b* \ud800"


def report_of(low: float = -0.2, high: float = -0.1, early: float = 30.0, late: float = 50.0) -> Report:
    """Two documents of 100 tokens: 128 of 200 tokens are in beginnings."""
    report = make_report(
        {
            "base": {"ppl": 20.0},
            "knn": {"ppl": 17.0, "change": -0.15, "change_low": low, "change_high": high, "early_gain": early,
                    "late_gain": late},
        }
    )  # fmt: skip
    documents = [DocumentRow(name=name, tokens=100, ppl={"base": 20.0}) for name in "ab"]
    return report.model_copy(update={"documents": documents, "test_tokens": 200, "test_documents": 12})


def section_of(words: str = "found", name: str = "part", *summary: str) -> AnalysisSection:
    figure, (panel,) = axes_of()
    panel.plot([0, 1], [1, 2])
    columns = [text("name", lambda row: row[0]), number("n", lambda row: row[1])]
    return AnalysisSection(
        [f"Sentence {words}"],
        [Table.of("t", f"Caption {words}", [(words, 1.25), ("b", None), ("c", 0.1)], *columns)],
        [Figure("f", f"Figure {words}", f"Alternative {words}", figure)],
        summary,
        name,
        f"Title {words}",
    )


def test_the_summary_says_what_the_report_says() -> None:
    main, beginnings = summary_of(report_of(), [])
    assert "perplexity 20.00; +kNN 17.00 (-15.0%, -20.0 to -10.0)" in main
    assert "significant: its interval leaves out 0" in main
    assert "not significant: its interval holds 0" in summary_of(report_of(high=0.01), [])[0]
    # 30 nats over 128 tokens against 50 over 72
    assert "most after the first 64 tokens" in beginnings
    assert "+0.694 nats a token there and +0.234 elsewhere; beginnings are 64% of the tokens" in beginnings
    assert "most in the first 64 tokens of a document" in summary_of(report_of(late=1.0), [])[1]
    assert "helps neither" in summary_of(report_of(early=-1.0, late=-1.0), [])[1]


def test_few_documents_are_a_sentence_of_the_summary() -> None:
    report = report_of().model_copy(update={"test_documents": 2})
    assert any("Test has only 2 documents" in sentence for sentence in summary_of(report, []))


def test_the_summary_has_about_five_sentences_one_of_each_section_first() -> None:
    sections = [section_of("x", name, f"{name} first", f"{name} second") for name in ("a", "recall", "b", "where")]
    assert summary_of(None, sections) == ["where first", "recall first", "a first", "b first", "where second"]
    assert summary_of(report_of(), sections)[2:] == ["where first", "recall first", "a first"]


class Parsed(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def all(self, tag: str) -> list[dict[str, Any]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_text_is_never_markup() -> None:
    absent = [MissingPart("more", EVIL, EVIL, EVIL)]
    parsed = Parsed(page_of(EVIL, report_of(), [section_of(EVIL, "part", EVIL)], absent))
    assert len(parsed.all("script")) == 1
    assert parsed.all("img")[1]["alt"] == f"Alternative {EVIL}".replace("\ud800", "\\ud800")
    markdown = markdown_of(EVIL, report_of(), [section_of(EVIL, "part", EVIL)], absent)
    assert "<script" not in markdown.replace(f"`{EVIL}`".replace("\ud800", "\\ud800"), "")
    (row,) = [line for line in markdown.splitlines() if line.startswith("| &lt;script")]
    assert len(re.findall(r"(?<!\\)\|", row)) == 3


def test_the_policy_allows_this_style_and_this_script_alone() -> None:
    page = page_of("run", None, [section_of()], [])
    (policy,) = [meta["content"] for meta in Parsed(page).all("meta") if "http-equiv" in meta]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    for kind in ("style", "script"):
        (inside,) = re.findall(f"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert rules[f"{kind}-src"] == f"'sha256-{digest}'"
    assert "style=" not in re.sub(r"base64,[\w+/=]+", "", page)


def test_every_link_leads_to_something_on_the_page() -> None:
    parsed = Parsed(
        page_of("run", report_of(), [section_of(name="a"), section_of(name="b")], [MissingPart("c", "", "", "")])
    )
    names = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert len(names) == len(set(names))
    links = [link["href"] for link in parsed.all("a")]
    assert {link[1:] for link in links if link.startswith("#")} <= set(names)
    assert {"figure-a-f", "table-b-t", "absent"} <= {link[1:] for link in links}
    assert all(link.startswith(("#", "data:text/csv;")) for link in links)
    assert {label for _, a in parsed.tags if (label := a.get("aria-labelledby"))} <= set(names)


def test_cells_keep_their_digits_for_sorting() -> None:
    cells = [cell.get("data-v") for cell in Parsed(page_of("run", None, [section_of()], [])).all("td")]
    assert cells == ["1.25", None, "0.1"]


@pytest.mark.parametrize("command", ["", "gnnlm run 'a b'"])
def test_what_was_not_made_is_listed_with_its_command(command: str) -> None:
    page = page_of(
        "run", None, [], [MissingPart("recall", "Neighbour quality", "needs the stage eval (missing)", command)]
    )
    assert "No report yet" in page
    assert "needs the stage eval (missing)" in page
    assert ("<code>" in page) == bool(command)
    assert "gnnlm run &#x27;a b&#x27;" in page or not command


def test_a_marked_part_is_shown_and_escaped() -> None:
    table = Table.of("t", "c", [MarkedText("a<", "b<", "c*"), "d"], text("passage", lambda row: row), sorts=False)
    section = AnalysisSection([], [table], name="part", title="Part")
    page = page_of("run", None, [section], [])
    assert "a&lt;<b>b&lt;</b>c*" in page
    assert not [t for t in Parsed(page).all("table") if "sorts" in t["class"]]
    assert "| a&lt;**b&lt;**c\\* |" in markdown_of("run", None, [section], [])
