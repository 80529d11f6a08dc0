"""gnnlm doctor: whether a finished run can be trusted."""

from __future__ import annotations

import json

import typer
from rich.table import Table

from gnnlm.cli.lookup_commands import RunPath
from gnnlm.cli.options import AsJson, out
from gnnlm.config import load_config
from gnnlm.run import Run

# Modules that load torch are imported by the commands that need them: the others, and --help, start at once.


def doctor(run: RunPath, as_json: AsJson = False) -> None:
    """Check every byte of a run, its index, its neighbour tables, and what its index costs.

    The index is compared with exact search on some valid positions. Exit status 1: the run cannot be trusted. If
    documents were added or removed, it says whether mix, index or GNN should be fitted again (gnnlm refit).
    """
    from gnnlm.run.doctor import examine

    found = examine(Run(load_config(run), reading=True))
    if found.recall:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for column in ("recall of", *(f"{int(k):,} nearest" for k in found.recall)):
            table.add_column(column, justify="left" if column == "recall of" else "right")
        segments = found.facts.get("segments", [])
        lines = {"the index": found.recall, **{f"segment {n}": each for n, each in enumerate(segments)}}
        for name, values in lines.items():
            table.add_row(name, *(f"{value:.3f}" for value in values.values()))
        out.print(table)
    for drift in found.drift:
        out.print(drift.line(found.run.root), soft_wrap=True, markup=False)
    for problem in found.problems:
        out.print(f"problem: {problem}", soft_wrap=True, markup=False)
    if found.ok:
        out.print("The run can be trusted.")
    if as_json:
        print(json.dumps(found.as_dict()))
    if not found.ok:
        raise typer.Exit(1)
