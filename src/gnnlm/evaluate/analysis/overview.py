"""The top of the page: a summary of about five sentences, computed, and the rows of the report."""

from __future__ import annotations

from collections.abc import Sequence

from gnnlm.evaluate.analysis.section import Cell, Figure, Section, Table, change, number, percent, perplexity, text
from gnnlm.evaluate.plots import rows_figure
from gnnlm.evaluate.report import EARLY, FEW_DOCUMENTS, PassageComparison, Report
from gnnlm.evaluate.report_tables import PASSAGE_LABELS, change_words, notes, passage_headline, passage_notes, short
from gnnlm.predict.predictor import LABELS

SENTENCES = 5  # of the summary
FIRST = ("where", "recall", "growth")  # the parts whose sentence says most to somebody who knows only the rows


def summary_of(report: Report | None, sections: Sequence[Section]) -> list[str]:
    """What was found: the report's sentences, then the most telling one of each section, as far as there is room."""
    said = [] if report is None else [_main(report), *_beginnings(report), *_doubts(report)]
    ordered = sorted(sections, key=lambda section: FIRST.index(section.name) if section.name in FIRST else len(FIRST))
    depth = max((len(section.summary) for section in sections), default=0)
    offered = [section.summary[level] for level in range(depth) for section in ordered if level < len(section.summary)]
    return said + offered[: max(0, SENTENCES - len(said))]


def _main(report: Report) -> str:
    base, last = report.rows["base"], report.predictors[-1]
    found = [
        f"{LABELS[name]} {short(report.rows[name].ppl)} ({_change(report, name)})"
        for name in report.predictors
        if name != "base"
    ]
    row, words = report.rows[last], "cannot be told from chance: it has no interval"
    if row.change_low is not None and row.change_high is not None:
        sure = not row.change_low <= 0 <= row.change_high
        words = "is significant: its interval leaves out 0" if sure else "is not significant: its interval holds 0"
    return (
        f"On {report.test_tokens:,} test tokens of {report.test_documents} documents the base model has perplexity "
        f"{short(base.ppl)}; {', '.join(found)}. The change of {LABELS[last]} {words}."
    )


def _change(report: Report, name: str) -> str:
    row = report.rows[name]
    return change_words(row.change, row.change_low, row.change_high).replace(" (", ", ").removesuffix(")")


def _beginnings(report: Report) -> list[str]:
    """How the gain is shared between the beginnings of documents and the rest."""
    last = report.predictors[-1]
    early, late = report.rows[last].early_gain, report.rows[last].late_gain
    tokens = sum(min(document.tokens, EARLY) for document in report.documents)
    if not tokens or tokens == report.test_tokens or early is None or late is None:
        return []
    each, rest = early / tokens, late / (report.test_tokens - tokens)
    if each <= 0 and rest <= 0:
        return [f"The book helps neither in the first {EARLY} tokens of documents ({each:+.3f} nats a token with "
                f"{LABELS[last]}) nor after them ({rest:+.3f})."]  # fmt: skip
    place = f"in the first {EARLY} tokens of a document" if each > rest else f"after the first {EARLY} tokens"
    there, elsewhere = (each, rest) if each > rest else (rest, each)
    return [
        f"The book helps most {place}: {LABELS[last]} brings {there:+.3f} nats a token there and {elsewhere:+.3f} "
        f"elsewhere; beginnings are {100 * tokens / report.test_tokens:.0f}% of the tokens."
    ]


def _doubts(report: Report) -> list[str]:
    if report.test_documents >= FEW_DOCUMENTS:
        return []
    count = "one document" if report.test_documents == 1 else f"{report.test_documents} documents"
    return [f"Test has only {count}: intervals are too narrow, and other text may give other figures."]


def report_section(report: Report) -> Section:
    """The rows of the report with their paired intervals, and the report's notes."""
    columns = [
        text("model"),
        perplexity(),
        text("95%"),
        text("change, 95%"),
        perplexity("ppl/word"),
        number("bits/byte", 3),
        percent("helped", 0),
        percent("hurt", 0),
        number("tok/s", 0),
    ]
    rows: list[list[Cell]] = []
    for name in report.predictors:
        r, first = report.rows[name], name == "base"
        rows.append(
            [
                LABELS[name],
                "inf" if r.ppl is None else r.ppl,
                f"{short(r.ppl_95[0])}-{short(r.ppl_95[1])}",
                "" if first else change(r.change, r.change_low, r.change_high),
                "inf" if r.ppl_word is None else r.ppl_word,
                "inf" if r.bits_per_byte is None else r.bits_per_byte,
                "" if first else r.helped,
                "" if first else r.hurt,
                r.tokens_per_second,
            ]
        )
    tables = [Table("rows", "The rows of the report", columns, rows)]
    said = notes(report)
    if report.passages is not None:
        tables.append(_passages(report.passages))
        said = [*said, *passage_notes(report.passages)]
    changes = "; ".join(f"{LABELS[name]} {_change(report, name)}" for name in report.predictors if name != "base")
    figure = Figure("rows", "Change of test perplexity against base", f"Changes: {changes}.", rows_figure(report))
    return Section("report", "The report", said, tables, [figure])


def _passages(found: PassageComparison) -> Table:
    columns = [text("model"), perplexity(), text("change, 95%"), number("tok/s", 1)]
    rows: list[list[Cell]] = [
        [
            PASSAGE_LABELS[name],
            "inf" if row.ppl is None else row.ppl,
            "" if name == "base" else change(row.change, row.change_low, row.change_high),
            row.tokens_per_second,
        ]
        for name, row in found.rows.items()
    ]
    return Table("passages", passage_headline(found), columns, rows)
