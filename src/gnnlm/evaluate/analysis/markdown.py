"""The analysis as Markdown; figures are the files of the parts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gnnlm.evaluate.analysis.analysis_page import MissingPart
from gnnlm.evaluate.analysis.overview import report_section, summary_of
from gnnlm.evaluate.analysis.section import AnalysisSection
from gnnlm.evaluate.report import Report
from gnnlm.evaluate.report_tables import headline
from gnnlm.evaluate.table import MarkedText, Table


def markdown_of(
    name: str, report: Report | None, sections: Sequence[AnalysisSection], absent: Sequence[MissingPart]
) -> str:
    """The same as the page; the report's own figure is in the run's report folder."""
    lines = [f"# Analysis of {literal(name)}", ""]
    if report is not None:
        lines += [literal(headline(report)), ""]
    lines += _paragraphs(summary_of(report, sections))
    for section in [*([] if report is None else [report_section(report)]), *sections]:
        lines += [f"## {literal(section.title)}", "", *_paragraphs(section.sentences)]
        for figure in section.figures:
            file = "../report/rows.png" if section.name == "report" else f"{section.name}/{figure.name}.png"
            lines += [f"![{literal(figure.alternative)}]({file})", "", f"*{literal(figure.caption)}*", ""]
        for table in section.tables:
            lines += [f"{literal(table.caption)}:", "", *_table(table), ""]
    if absent:
        lines += ["## Not made", ""]
        lines += [
            f"- {literal(part.title)}: {literal(part.why)}" + (f"; `{part.command}`" if part.command else "")
            for part in absent
        ]
    text = "\n".join(lines).rstrip("\n") + "\n"
    return text.encode("utf-8", "backslashreplace").decode()


def _paragraphs(sentences: Sequence[str]) -> list[str]:
    return [line for sentence in sentences for line in (literal(sentence), "")]


def _table(table: Table) -> list[str]:
    head = "| " + " | ".join(literal(column.name.strip()) for column in table.columns) + " |"
    rule = "|" + "".join("---|" if column.is_text else "--:|" for column in table.columns)
    return [head, rule, *("| " + " | ".join(_cell(cell) for cell in row) + " |" for row in table.cells())]


def _cell(cell: str) -> str:
    if not isinstance(cell, MarkedText):
        return literal(cell)
    return f"{literal(cell.before)}{cell.mark}{literal(cell.part)}{cell.mark}{literal(cell.after)}"


def literal(text: str) -> str:
    r"""Text that Markdown shows as it is, on one line.

    >>> print(literal("a|b <i>\n*c*"))
    a\|b &lt;i> \*c\*
    """
    flat = " ".join(text.split("\n")).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", flat)
