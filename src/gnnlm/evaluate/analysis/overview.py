"""The top of the page: a summary of about five sentences, computed, and the rows of the report."""

from __future__ import annotations

from collections.abc import Sequence

from gnnlm.evaluate.analysis.section import AnalysisSection, Figure
from gnnlm.evaluate.change import short
from gnnlm.evaluate.plots import rows_figure
from gnnlm.evaluate.report import EARLY, FEW_DOCUMENTS, Report
from gnnlm.evaluate.report_tables import notes, passage_notes, passage_table, report_table
from gnnlm.predict.predictor import LABELS

SENTENCES = 5  # of the summary
FIRST = ("where", "recall", "growth")  # the parts whose sentence says most to somebody who knows only the rows


def summary_of(report: Report | None, sections: Sequence[AnalysisSection]) -> list[str]:
    """The report's sentences, then the most telling one of each section, as far as there is room."""
    said = [] if report is None else [_main(report), *_beginnings(report), *_doubts(report)]
    ordered = sorted(sections, key=lambda section: FIRST.index(section.name) if section.name in FIRST else len(FIRST))
    depth = max((len(section.summary) for section in sections), default=0)
    offered = [section.summary[level] for level in range(depth) for section in ordered if level < len(section.summary)]
    return said + offered[: max(0, SENTENCES - len(said))]


def _main(report: Report) -> str:
    last = report.predictors[-1]
    found = [
        f"{LABELS[name]} {short(report.rows[name].ppl)} ({_change(report, name)})"
        for name in report.predictors
        if name != "base"
    ]
    return (
        f"On {report.test_tokens:,} test tokens of {report.test_documents} documents the base model has perplexity "
        f"{short(report.rows['base'].ppl)}; {', '.join(found)}. The change of {LABELS[last]} "
        f"{report.rows[last].significance}."
    )


def _change(report: Report, name: str) -> str:
    """A change as it stands within brackets."""
    return report.rows[name].change_words.replace(" (", ", ").removesuffix(")")


def _beginnings(report: Report) -> list[str]:
    """How the gain is shared between the beginnings of documents and the rest."""
    last = report.predictors[-1]
    early, late = report.rows[last].early_gain, report.rows[last].late_gain
    tokens = report.early_tokens
    if not tokens or tokens == report.test_tokens or early is None or late is None:
        return []
    there = early / tokens
    elsewhere = late / (report.test_tokens - tokens)
    if there <= 0 and elsewhere <= 0:
        return [
            f"The book helps neither in the first {EARLY} tokens of documents ({there:+.3f} nats a token with "
            f"{LABELS[last]}) nor after them ({elsewhere:+.3f})."
        ]
    place = f"in the first {EARLY} tokens of a document"
    if elsewhere >= there:
        place = f"after the first {EARLY} tokens"
        there, elsewhere = elsewhere, there
    return [
        f"The book helps most {place}: {LABELS[last]} brings {there:+.3f} nats a token there and {elsewhere:+.3f} "
        f"elsewhere; beginnings are {100 * tokens / report.test_tokens:.0f}% of the tokens."
    ]


def _doubts(report: Report) -> list[str]:
    if report.test_documents >= FEW_DOCUMENTS:
        return []
    count = "one document" if report.test_documents == 1 else f"{report.test_documents} documents"
    return [f"Test has only {count}: intervals are too narrow, and other text may give other figures."]


def report_section(report: Report) -> AnalysisSection:
    """The rows of the report with their paired intervals, and the report's notes."""
    tables = [report_table(report)]
    sentences = notes(report)
    if report.passages is not None:
        tables.append(passage_table(report.passages))
        sentences = [*sentences, *passage_notes(report.passages)]
    changes = "; ".join(f"{LABELS[name]} {_change(report, name)}" for name in report.predictors if name != "base")
    figure = Figure("rows", "Change of test perplexity against base", f"Changes: {changes}.", rows_figure(report))
    return AnalysisSection(sentences, tables, [figure], name="report", title="The report")
