"""Test tokens with their probabilities and neighbours, as the tables of several parts show them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gnnlm.evaluate.analysis.section import Cell, Marked, Table, text
from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.evaluate.examples import NEAREST, Example, example_at, flat, parts_of


def token_example(subject: Subject, token: int, count: int = NEAREST) -> Example:
    """The test token of a number, with its probability under every predictor and its nearest rows."""
    probabilities = {name: math.exp(scores[token]) for name, scores in subject.scores.items()}
    test, position = subject.parts.streams["test"], int(subject.positions_N[token])
    return example_at(subject.test, test, subject.parts.store, position, probabilities, count)


def example_table(name: str, caption: str, examples: Sequence[dict[str, Any]]) -> Table:
    """Examples in the paper's form: the input with its gold token, and below it what was extracted for it.

    `examples` are what `Example.as_dict` gave, perhaps with a `note`.
    """
    rows: list[list[Cell]] = []
    for number, values in enumerate(examples, start=1):
        example = Example.of({key: values[key] for key in ("query", "probabilities", "neighbours")})
        note = f"{values['note']}; " if values.get("note") else ""
        rows.append(
            [f"{number}. Input", Marked(*parts_of(example.query)), flat(example.query.document), note + example.remark]
        )
        for place, found in enumerate(example.neighbours, start=1):
            remark = f"similarity {found.similarity:.3f}{', right' if found.right else ''}"
            marked = Marked(*parts_of(found.passage), mark="_")
            rows.append([f"{number}. Extracted {place}", marked, flat(found.passage.document), remark])
    return Table(name, caption, [text("example"), text("text"), text("document"), text("remark")], rows, sorts=False)
