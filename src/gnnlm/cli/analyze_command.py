"""gnnlm analyze: every table and figure of the paper's analysis, for a finished run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from gnnlm.cli.lookup_commands import RunPath
from gnnlm.cli.options import AsJson, out
from gnnlm.config import load_config
from gnnlm.errors import ConfigError
from gnnlm.progress import human_time
from gnnlm.run import Run

if TYPE_CHECKING:
    from gnnlm.evaluate.analysis.subject import Subject
    from gnnlm.run.analyze import AnalysisStep

SHOWN = 8  # neighbours of a token that is asked for


def analyze(
    run: RunPath,
    part: Annotated[
        list[str] | None, typer.Option("--part", metavar="NAME", help="Make only this part; may be repeated.")
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            metavar="DOCUMENT:CHARACTER",
            help="Print the test token at this offset of a document's text, with its neighbours; make no part.",
        ),
    ] = None,
    train: Annotated[
        bool, typer.Option("--train", help="Also make the parts that train: forks of the run with one thing changed.")
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps", min=1, metavar="N", help="Training steps of each fork. Default: a third of the run's own."
        ),
    ] = None,
    component: Annotated[
        list[str] | None,
        typer.Option(
            "--component",
            metavar="NAME",
            help="With --train, change only this component (presets, window, layers, inter, updates, context, codec, "
            "copying, leakage), or only this fork, such as layers-2; may be repeated.",
        ),
    ] = None,
    others: Annotated[
        list[Path] | None,
        typer.Option(
            "--with",
            metavar="RUN",
            help="Another finished run, such as a fine-tuned one, among the alternatives; may be repeated.",
        ),
    ] = None,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Make anew what is done, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make the paper's tables and figures for a run, as one page; what is done is found done."""
    from gnnlm.run.analyze import Analysis, AnalysisOptions, asked_parts

    asked = AnalysisOptions(train, steps, tuple(component or ()), tuple(others or ()))
    analysis = Analysis(Run(load_config(run), reading=True), asked)
    if at is not None:
        if part or train or rebuild:
            raise ConfigError("--at prints one test token and makes no part; leave out --part, --train and --rebuild")
        _print_at(analysis.subject, at, as_json)
        return
    planned = analysis.plan(asked_parts(part, asked))
    out.print(_plan_table(planned))
    results = analysis.build(planned, rebuild)
    out.print(f"Page: {analysis.page}", markup=False, soft_wrap=True)
    if as_json:
        print(json.dumps(results))


def _print_at(subject: Subject, at: str, as_json: bool) -> None:
    from gnnlm.evaluate.analysis.gain_examples import token_at, token_example
    from gnnlm.evaluate.examples import render_example

    example = token_example(subject, token_at(subject, at), SHOWN)
    out.print(render_example(example), soft_wrap=True)
    if as_json:
        print(json.dumps(asdict(example)))


def _plan_table(steps: list[AnalysisStep]) -> Table:
    table = Table(title="What will be made", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("part", "state", "time here, roughly"):
        table.add_column(column, justify="right" if column.startswith("time") else "left", overflow="fold")
    for step in steps:
        table.add_row(step.name, step.words, human_time(step.seconds) if step.seconds else "")
        for name, seconds in step.forks:
            table.add_row(f"  {name}", "to train", human_time(seconds) if seconds else "")
    table.add_row("all", "", human_time(sum(step.seconds for step in steps)))
    return table
