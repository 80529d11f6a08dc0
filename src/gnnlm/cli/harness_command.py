"""gnnlm eval-harness: tasks of lm-evaluation-harness with a book."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from gnnlm.artifact.file_io import write_json
from gnnlm.cli.lookup_commands import Exclude, Only, RunPath
from gnnlm.cli.options import AsJson, out
from gnnlm.errors import ConfigError

# Modules that load torch are imported by the commands that need them: the others, and --help, start at once.


def eval_harness(
    run: RunPath,
    tasks: Annotated[str, typer.Option("--tasks", metavar="NAMES", help="Tasks of lm-eval, with commas between them.")],
    predictor: Annotated[
        str | None, typer.Option("--predictor", metavar="NAME", help="base, knn, gnn or gnn_knn. Default: the best.")
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option("--include-path", metavar="DIR", help="A folder with more tasks, as YAML.")
    ] = None,
    limit: Annotated[
        float | None, typer.Option("--limit", help="Examples of each task; below 1: a share of them. For trying out.")
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option("--num-fewshot", min=0, help="Examples before the question. Default: the task's.")
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Prompts that are written at once.")] = 8,
    only: Only = None,
    exclude: Exclude = None,
    cache: Annotated[
        Path | None,
        typer.Option("--cache", metavar="FILE", help="Keep answers here; the same command goes on from them."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", metavar="FILE", help="Write the results as JSON.")] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate on tasks of lm-evaluation-harness (pip install 'gnnlm[eval-harness]')."""
    if limit is not None and not limit > 0:
        raise ConfigError(f"--limit: expected a number above 0, got {limit:g}")
    from gnnlm.integrations.lm_eval import OpenBookLM, evaluate

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    lm = OpenBookLM(run, predictor, only, exclude, batch_size)
    found = evaluate(lm, names, include_path, limit, num_fewshot, cache)
    out.print(results_table(found))
    if output is not None:
        write_json(output, found)
    if as_json:
        print(json.dumps(found), flush=True)


def results_table(found: dict[str, Any]) -> Table:
    """Return a table with a line for each metric of each task."""
    title = f"{found['run']}, {found['predictor']}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("task", "examples", "n-shot", "filter", "metric", "value", "stderr"):
        table.add_column(column, justify="right" if column in ("examples", "n-shot", "value", "stderr") else "left")
    for task, values in found["results"].items():
        label = task
        for key, value in sorted(values.items()):
            metric, comma, name = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            error = values.get(f"{metric}_stderr,{name}")
            examples = found["n-samples"].get(task, {}).get("effective", "")
            shown = f"{error:.4f}" if isinstance(error, float) else ""
            number = f"{value:.4f}" if isinstance(value, float) else str(value)
            table.add_row(label, str(examples), str(found["n-shot"].get(task, "")), name, metric, number, shown)
            label = ""
    return table
