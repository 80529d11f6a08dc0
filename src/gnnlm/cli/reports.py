"""What commands print about a finished run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from gnnlm.cli.options import out
from gnnlm.run import Run

if TYPE_CHECKING:
    from gnnlm.evaluate.report import Report


def show_report(made: Run, as_json: bool) -> None:
    from gnnlm.evaluate.tables import notes, passage_notes, rich_passages, rich_table

    report = open_report(made)
    out.print(rich_table(report))
    for note in notes(report):
        out.print(note, soft_wrap=True, markup=False)
    if report.passages is not None:
        out.print(rich_passages(report.passages))
        for note in passage_notes(report.passages):
            out.print(note, soft_wrap=True, markup=False)
    figures = "rows.png" if report.training is None else "rows.png, training.png"
    out.print(
        f"Report and figures: {made.path('eval')}/report.md, report.json, {figures}", soft_wrap=True, markup=False
    )
    if as_json:
        print_json(made)


def show_examples(made: Run, count: int) -> None:
    from gnnlm.evaluate.examples import find_examples, render_choice, render_example

    scores, parts = made.artifact("eval"), made.parts
    best = open_report(made).predictors[-1]
    base, gained = (scores.array(f"{name}.log_probs.npy") for name in ("base", best))
    text, stream, seed = parts.searched("test"), parts.streams["test"], made.config.seed
    examples = find_examples(text, stream, parts.store, base, gained, count, seed)
    out.print("\n" + render_choice(examples), soft_wrap=True, markup=False)
    for example in examples.drawn:
        out.print(render_example(example))


def open_report(made: Run) -> Report:
    from gnnlm.evaluate.report import read_report

    return read_report(made.artifact("eval"))


def print_json(made: Run) -> None:
    print(json.dumps(open_report(made).as_json()), flush=True)
