"""What commands print about a finished run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from gnnlm.cli.options import out
from gnnlm.run import Run

if TYPE_CHECKING:
    from gnnlm.evaluate.report import Report


def show_report(made: Run, as_json: bool) -> None:
    from gnnlm.evaluate.report_tables import (
        headline,
        notes,
        passage_headline,
        passage_notes,
        passage_table,
        report_table,
    )

    report = open_report(made)
    out.print(report_table(report).rich(headline(report)))
    for note in notes(report):
        out.print(note, soft_wrap=True, markup=False)
    if report.passages is not None:
        out.print(passage_table(report.passages).rich(passage_headline(report.passages)))
        for note in passage_notes(report.passages):
            out.print(note, soft_wrap=True, markup=False)
    figures = "rows.png" if report.training is None else "rows.png, training.png"
    out.print(
        f"Report and figures: {made.path('eval')}/report.md, report.json, {figures}", soft_wrap=True, markup=False
    )
    if (line := generation_line(made)) is not None:
        out.print(line, soft_wrap=True, markup=False)
    if as_json:
        print_json(made)


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
    if now is None:
        return None
    line = f"serves generation {now.number}: {now.documents:,} documents, {now.rows:,} rows"
    kinds = [name for name, stage in made.stages.items() if stage.part or name in now.refitted]
    there = all((made.path(name) / "manifest.json").is_file() for name in kinds)
    found = {name: read_manifest(made.path(name)).fingerprint for name in kinds} if there else {}
    if found != dict(now.trained):
        return f"{line}; stale, made before the run was rebuilt: gnnlm renew {made.root}"
    return f"{line} (the report is of generation 0, the run as it was built)"


def show_examples(made: Run, count: int) -> None:
    from gnnlm.evaluate.examples import find_examples, render_choice, render_example

    scores, parts = made.artifact("eval"), made.snapshot
    best = open_report(made).predictors[-1]
    base, gained = (scores.array(f"{name}.log_probs.npy") for name in ("base", best))
    text, stream, seed = parts.searched("test"), parts.streams["test"], made.config.seed
    examples = find_examples(text, stream, parts.store, base, gained, count, seed)
    out.print("\n" + render_choice(examples), soft_wrap=True, markup=False)
    for example in examples.sample:
        out.print(render_example(example))


def open_report(made: Run) -> Report:
    from gnnlm.evaluate.report import read_report

    return read_report(made.artifact("eval"))


def print_json(made: Run) -> None:
    print(json.dumps(open_report(made).as_json()), flush=True)
