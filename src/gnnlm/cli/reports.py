"""What commands print of a finished run."""

from __future__ import annotations

import json
from typing import Any

from gnnlm.cli.options import out
from gnnlm.run import Run


def show_report(made: Run, as_json: bool) -> None:
    from gnnlm.evaluate.report import notes, rich_table

    report = read_report(made)
    out.print(rich_table(report))
    for note in notes(report):
        out.print(note, soft_wrap=True, markup=False)
    if as_json:
        print_json(made)


def show_examples(made: Run, count: int) -> None:
    from gnnlm.evaluate.examples import find_examples, render_example

    report, table = made.artifact("eval"), made.artifact("search")
    base, best = report.array("base.log_probs.npy"), report.array("gnn_knn.log_probs.npy")
    ids, similarity = table.array("test.ids.npy"), table.array("test.similarity.npy")
    streams = made.streams
    for example in find_examples(streams["test"], streams["train"], base, best, ids, similarity, count):
        out.print(render_example(example))


def read_report(made: Run) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(made.artifact("eval").text("report.json"))
    return report


def print_json(made: Run) -> None:
    print(json.dumps(read_report(made)), flush=True)
