"""What commands print about a finished run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from gnnlm.cli.options import out
from gnnlm.run import Run

if TYPE_CHECKING:
    from gnnlm.evaluate.report import Report

ROWS = (
    "base is the frozen model. +kNN mixes in the tokens that followed similar states in the store, +GNN lets a graph "
    "network read the text around them, +GNN+kNN does both. The lower the perplexity (ppl), the better."
)


def show_report(made: Run, as_json: bool) -> None:
    """Print the rows of the report, and all its notes."""
    from gnnlm.evaluate.report_tables import notes, passage_headline, passage_notes, passage_table

    report = open_report(made)
    _show_rows(report)
    for note in notes(report):
        _print_line(note)
    if report.passages is not None:
        out.print(passage_table(report.passages).rich(passage_headline(report.passages)))
        for note in passage_notes(report.passages):
            _print_line(note)
    figures = "rows.png" if report.training is None else "rows.png, training.png"
    _print_line(f"Report and figures: {made.path('eval')}/report.md, report.json, {figures}")
    if (line := generation_line(made)) is not None:
        _print_line(line)
    if as_json:
        print_json(made)


def show_demo_results(made: Run) -> None:
    """Print the report on half a screen: its rows, what they mean, whether the gain is significant, an example."""
    from gnnlm.predict.predictor import LABELS

    report = open_report(made)
    last = report.predictors[-1]
    row = report.rows[last]
    _show_rows(report)
    _print_line(ROWS)
    _print_line(f"The change of {LABELS[last]}, {row.change_words}, {row.significance}.")
    _print_line(f"More, with notes on every figure: {made.path('eval')}/report.md")
    _show_example(made)


def _show_rows(report: Report) -> None:
    from gnnlm.evaluate.report_tables import headline, report_table

    out.print(report_table(report).rich(headline(report)))


def _print_line(text: str) -> None:
    out.print(text, soft_wrap=True, markup=False)


def show_current(made: Run, as_json: bool) -> None:
    """The perplexity of test with the generation that the run serves now, beside the report's."""
    from gnnlm.library.library import Library

    made.reading = True
    found = Library(made).evaluate()
    built = {name: row.ppl for name, row in open_report(made).rows.items()} if made.path("eval").is_dir() else {}
    out.print(f"test perplexity at generation {found.generation}, {found.test_tokens:,} tokens", markup=False)
    for name, value in found.perplexity.items():
        was = built.get(name)
        before = "" if was is None else f" (report, generation 0: {was:.3f})"
        out.print(f"  {name} {value:.3f}{before}", soft_wrap=True, markup=False)
    if found.left_out:
        out.print(f"left out, for they share text with valid or test: {', '.join(found.left_out)}", soft_wrap=True)
    if as_json:
        print(json.dumps(found.as_json()))


def generation_line(made: Run) -> str | None:
    """What the run serves now, if documents have come or gone since it was built."""
    from gnnlm.artifact import read_manifest
    from gnnlm.generation import read_current

    now = read_current(made.root)
    if not now.number:
        return None
    line = f"serves generation {now.number}: {now.documents:,} documents, {now.rows:,} rows"
    kinds = [name for name, stage in made.stages.items() if stage.part or name in now.refitted]
    there = all((made.path(name) / "manifest.json").is_file() for name in kinds)
    found = {name: read_manifest(made.path(name)).fingerprint for name in kinds} if there else {}
    if found != dict(now.trained):
        return f"{line}; stale, made before the run was rebuilt: gnnlm renew {made.root}"
    return f"{line} (the report is of generation 0, the run as it was built)"


def _show_example(made: Run) -> None:
    """Print a test word that the book clearly helped, drawn at random, with its neighbours."""
    from gnnlm.evaluate.examples import find_examples, render_choice, render_example

    scores, snapshot = made.artifact("eval"), made.snapshot
    best = open_report(made).predictors[-1]
    base, gained = (scores.array(f"{name}.log_probs.npy") for name in ("base", best))
    text, stream = snapshot.searched("test"), snapshot.streams["test"]
    examples = find_examples(text, stream, snapshot.store, base, gained, 1, made.config.seed)
    _print_line("\n" + render_choice(examples))
    for example in examples.sample:
        out.print(render_example(example))


def open_report(made: Run) -> Report:
    from gnnlm.evaluate.report import read_report

    return read_report(made.artifact("eval"))


def print_json(made: Run) -> None:
    print(json.dumps(open_report(made).as_json()), flush=True)
