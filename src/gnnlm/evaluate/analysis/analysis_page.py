"""The page: all parts of an analysis in one self-contained HTML file.

Nothing in it asks for anything from elsewhere: style and script are part of the file and the only ones that its content
security policy lets run; figures are images of their own. All text is escaped, whoever wrote it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

from gnnlm import __version__
from gnnlm.evaluate.analysis.figure import svg_of
from gnnlm.evaluate.analysis.overview import report_section, summary_of
from gnnlm.evaluate.analysis.section import AnalysisSection, Figure
from gnnlm.evaluate.report import Report
from gnnlm.evaluate.report_tables import headline
from gnnlm.evaluate.table import Cell, Column, MarkedText, Table

DOTS = 96  # CSS pixels per inch
SHORT = 32  # a text cell of at most so many characters stays on one line
WIDE = 1.4  # a figure this many times wider than high scrolls on a phone instead of shrinking beyond reading


@dataclass(frozen=True)
class MissingPart:
    """A part that is not on the page: why, and the command that makes it (empty if nothing does)."""

    name: str
    title: str
    why: str
    command: str


def page_of(
    name: str, report: Report | None, sections: Sequence[AnalysisSection], absent: Sequence[MissingPart]
) -> str:
    """The page as HTML."""
    style, script = _resource("page.css"), _resource("page.js")
    shown = [*([] if report is None else [report_section(report)]), *sections]
    contents = [("summary", "Summary"), *((section.name, section.title) for section in shown)]
    contents += [("absent", "Not made")] if absent else []
    links = "\n".join(f'<li><a href="#{escape(at)}">{escape(title)}</a></li>' for at, title in contents)
    summary = "\n".join(f"<p>{escape(sentence)}</p>" for sentence in summary_of(report, sections))
    body = "\n".join(_NumberedHtml().sections(shown))
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_policy(style, script)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>Analysis of {escape(name)}</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the summary</a>
<div class="frame">
<header>
<h1>Analysis of {escape(name)}</h1>
<p>{escape("No report yet" if report is None else headline(report))}</p>
</header>
<nav aria-labelledby="contents"><h2 id="contents">Contents</h2>
<ol>
{links}
</ol></nav>
<main id="main">
<section class="summary" id="summary" aria-labelledby="summary-title"><h2 id="summary-title">Summary</h2>
{summary or "<p>No part has been made yet.</p>"}
</section>
{body}
{_absent(absent)}
</main>
<footer>Made by gnnlm {escape(__version__)} from the run {escape(name)}. Click a column's heading to sort a table.
<span class="quiet" id="status" role="status"></span></footer>
</div>
<script>{script}</script>
</body>
</html>
"""
    return page.encode("utf-8", "backslashreplace").decode()  # names of files may hold what is no text


def _resource(name: str) -> str:
    return resources.files("gnnlm.evaluate.analysis").joinpath(name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """Only this style and this script, and images that are part of the page."""
    allowed = {kind: f"'sha256-{_base64(hashlib.sha256(text.encode()).digest())}'"
               for kind, text in (("style", style), ("script", script))}  # fmt: skip
    return (
        f"default-src 'none'; img-src data:; style-src {allowed['style']}; script-src {allowed['script']}; "
        "base-uri 'none'; form-action 'none'"
    )


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


class _NumberedHtml:
    """Writes sections as HTML, and numbers tables and figures through the page."""

    def __init__(self) -> None:
        self.tables = self.figures = 0

    def sections(self, sections: Sequence[AnalysisSection]) -> list[str]:
        return [self._section(section) for section in sections]

    def _section(self, section: AnalysisSection) -> str:
        name = escape(section.name)
        # the report's notes are many: below its rows, in small type
        notes = section.name == "report"
        look = ' class="notes"' if notes else ""
        sentences = [f"<p{look}>{escape(sentence)}</p>" for sentence in section.sentences]
        figures = [self._figure(section, figure) for figure in section.figures]
        tables = [self._table(section, table) for table in section.tables]
        inside = "\n".join([*tables, *figures, *sentences] if notes else [*sentences, *figures, *tables])
        return (
            f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{escape(section.title)}</h2>\n'
            f"{inside}\n</section>"
        )

    def _figure(self, section: AnalysisSection, figure: Figure) -> str:
        self.figures += 1
        anchor = escape(f"figure-{section.name}-{figure.name}")
        wide, high = (round(DOTS * inches) for inches in figure.figure.get_size_inches())
        source = _base64(svg_of(figure.figure).encode())
        return (
            f'<figure id="{anchor}"><figcaption><b>Figure {self.figures}.</b> {escape(figure.caption)}{_link(anchor)}'
            f'</figcaption><div class="box picture" tabindex="0" role="group" aria-label="{escape(figure.caption)}">'
            f'<img class="{"wide" if wide > WIDE * high else "tall"}" width="{wide}" height="{high}" '
            f'alt="{escape(figure.alternative)}" src="data:image/svg+xml;base64,{source}"></div></figure>'
        )

    def _table(self, section: AnalysisSection, table: Table) -> str:
        self.tables += 1
        anchor = escape(f"table-{section.name}-{table.name}")
        head = "".join(
            f'<th scope="col" class="{"t" if column.is_text else "n"}"><span>{escape(column.name.strip())}</span></th>'
            for column in table.columns
        )
        body = "\n".join(f"<tr>{_cells(table.columns, row)}</tr>" for row in table.rows)
        kind = "sorts" if table.sorts and len(table.rows) > 1 else "fixed"
        csv = f"data:text/csv;charset=utf-8;base64,{_base64(table.csv().encode())}"
        download = f'<a download="{escape(table.name)}.csv" href="{csv}">CSV</a>'
        return (
            f'<figure id="{anchor}"><figcaption id="{anchor}-caption"><b>Table {self.tables}.</b> '
            f"{escape(table.caption)}{_link(anchor)}{download}</figcaption>"
            f'<div class="box" tabindex="0" role="group" aria-labelledby="{anchor}-caption">'
            f'<table class="{kind}" aria-labelledby="{anchor}-caption">'
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div></figure>"
        )


def _link(anchor: str) -> str:
    return f'<a href="#{anchor}" aria-label="Link to this">#</a>'


def _cells(columns: Sequence[Column], row: Sequence[Cell]) -> str:
    """The cells of a row; the first one heads it. Numbers keep all their digits, for sorting."""
    cells = []
    for at, (column, cell) in enumerate(zip(columns, row, strict=True)):
        shown = column.show(cell)
        look = "n" if not column.is_text else "s" if len(shown) <= SHORT else "t"
        value = "" if cell is None or isinstance(cell, str) else f' data-v="{float(cell)!r}"'
        tag, scope = ("td", "") if at else ("th", ' scope="row"')
        cells.append(f'<{tag}{scope} class="{look}"{value}>{_text(shown)}</{tag}>')
    return "".join(cells)


def _text(shown: str) -> str:
    if not isinstance(shown, MarkedText):
        return escape(shown)
    tag = "u" if shown.mark == "_" else "b"
    return f"{escape(shown.before)}<{tag}>{escape(shown.part)}</{tag}>{escape(shown.after)}"


def _absent(absent: Sequence[MissingPart]) -> str:
    if not absent:
        return ""
    entries = "\n".join(
        f"<dt>{escape(part.title)}</dt><dd>{escape(part.why)}"
        + (f"; <code>{escape(part.command)}</code>" if part.command else "")
        + "</dd>"
        for part in absent
    )
    title = '<h2 id="absent-title">Not made</h2>'
    return f'<section id="absent" aria-labelledby="absent-title">{title}\n<dl>\n{entries}\n</dl></section>'
