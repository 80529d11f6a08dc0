"""Examples of what is looked up, in the form of the paper's last table: clear gains and as many clear losses.

Any other test token is found by its document and the offset of a character (`token_at`).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence

from gnnlm.errors import CorpusError
from gnnlm.evaluate.analysis.part import AnalysisPart
from gnnlm.evaluate.analysis.section import AnalysisSection, PartResult
from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.evaluate.examples import LEFT, NEAREST, RULE, Example, clear_changes, draw_apart, example_at, flat, parts_of
from gnnlm.evaluate.table import Cell, MarkedText, Table, text
from gnnlm.predict.bootstrap import Ints
from gnnlm.predict.predictor import LABELS

COUNT = 5  # of gains, and of losses
NAMED = 5  # documents named in an error message


class ExamplesResult(PartResult):
    """How many test words there are and how many of them are clear gains and losses; some of each, drawn at random."""

    predictor: str
    words: int
    gains: int
    losses: int
    drawn_gains: list[Example]
    drawn_losses: list[Example]


def token_example(subject: Subject, token: int, count: int = NEAREST) -> Example:
    """The test token of a number, with its probability under every predictor and its nearest rows."""
    probabilities = {name: math.exp(scores[token]) for name, scores in subject.scores.items()}
    test = subject.snapshot.streams["test"]
    position = int(subject.positions_N[token])
    return example_at(subject.test, test, subject.snapshot.store, position, probabilities, count)


def example_table(name: str, caption: str, examples: Sequence[Example], notes: Sequence[str] = ()) -> Table:
    """Examples in the paper's form: the input with its gold token, and below it what was extracted for it.

    `notes` has a remark on each example, or none at all.
    """
    rows: list[list[Cell]] = []
    for number, example in enumerate(examples, start=1):
        note = f"{notes[number - 1]}; " if notes else ""
        query = MarkedText(*parts_of(example.query))
        rows.append([f"{number}. Input", query, flat(example.query.document), note + example.remark])
        for place, found in enumerate(example.neighbours, start=1):
            remark = f"similarity {found.similarity:.3f}{', right' if found.right else ''}"
            passage = MarkedText(*parts_of(found.passage), mark="_")
            rows.append([f"{number}. Extracted {place}", passage, flat(found.passage.document), remark])
    columns = [
        text("example", lambda row: row[0]),
        text("text", lambda row: row[1]),
        text("document", lambda row: row[2]),
        text("remark", lambda row: row[3]),
    ]
    return Table(name, caption, columns, rows, sorts=False)


def measure(subject: Subject) -> ExamplesResult:
    clear = clear_changes(subject.snapshot.streams["test"], subject.scores["base"], subject.scores[subject.best])

    def draw(tokens: Ints) -> list[Example]:
        drawn = draw_apart(tokens, subject.document_N, COUNT, subject.seed)
        return [token_example(subject, token) for token in drawn]

    return ExamplesResult(
        predictor=subject.best,
        words=len(clear.words),
        gains=len(clear.gains),
        losses=len(clear.losses),
        drawn_gains=draw(clear.gains),
        drawn_losses=draw(clear.losses),
    )


def show(result: ExamplesResult) -> AnalysisSection:
    finding = (
        f"Of {result.words:,} test words, {result.gains:,} are clear gains of {LABELS[result.predictor]} ({RULE}) and "
        f"{result.losses:,} clear losses (the same, down)."
    )
    sides = (("gains", result.drawn_gains), ("losses", result.drawn_losses))
    return AnalysisSection(
        [
            finding,
            f"Up to {COUNT} of each are drawn at random, no two of one document, among words with at least {LEFT} "
            "tokens before them. The input ends with its gold token; of what was extracted, the next token is "
            "underlined. Any other position: gnnlm analyze RUN --at DOCUMENT:CHARACTER.",
        ],
        [
            example_table(f"examples_{side}", f"Clear {side}, drawn at random", examples)
            for side, examples in sides
            if examples
        ],
        summary=[finding],
    )


def token_at(subject: Subject, place: str) -> int:
    """The number of the test token at DOCUMENT:CHARACTER: a document's name, and an offset into its text."""
    test = subject.snapshot.streams["test"]
    document, colon, offset = place.rpartition(":")
    if not colon or not document or not (offset.isascii() and offset.isdigit()):
        raise CorpusError(
            f"expected DOCUMENT:CHARACTER, a test document and an offset into its text, such as "
            f"{test.names[0]}:0 (got {place!r})"
        )
    if document not in test.names:
        near = difflib.get_close_matches(document, test.names, n=NAMED, cutoff=0.4) or test.names[:NAMED]
        raise CorpusError(
            f"no test document is named {document!r}; there are {len(test.names)}, such as {', '.join(near)}"
        )
    position = test.position_at(test.names.index(document), int(offset))
    if position is None:
        length = len(test.documents[test.names.index(document)].text)
        raise CorpusError(f"{document} has {length:,} characters in test; expected an offset below that (got {offset})")
    return position - int(test.document_of(position))  # every earlier document has one position more than tokens


PART = AnalysisPart(
    "examples",
    "Examples",
    ExamplesResult,
    lambda m: measure(m.subject),
    show,
    lambda subject: 1 + subject.report.test_tokens / 5e4,
)
