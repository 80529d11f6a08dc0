"""The command line. Wiring and words only: every command is a few calls into the pipeline."""

from __future__ import annotations

import json
import os
import signal
import sys
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gnnlm.artifact import human_bytes, is_disk_full
from gnnlm.cli_common import AsJson, ConfigPath, DataDir, Overrides, Rebuild, one_stage, open_config, out, size_of
from gnnlm.cli_lm import lm
from gnnlm.config import load_config
from gnnlm.errors import GnnlmError
from gnnlm.pipeline import Run
from gnnlm.progress import human_time, say, warn

app = typer.Typer(
    name="gnnlm",
    help="Open-book language models: a frozen LM, a folder of text, retrieval and a graph network.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(lm, name="lm")


@app.command()
def run(
    config: ConfigPath,
    set_: Overrides = None,
    data_dir: DataDir = None,
    rebuild: Rebuild = False,
    as_json: AsJson = False,
) -> None:
    """Run all stages: from text to the four rows."""
    made = open_config(config, set_, data_dir)
    made.build_all(rebuild=rebuild)
    show_report(made, as_json)


@app.command()
def corpus(config: ConfigPath, set_: Overrides = None, data_dir: DataDir = None, rebuild: Rebuild = False) -> None:
    """Read, split, clean and tokenize the text."""
    one_stage(open_config(config, set_, data_dir), "corpus", rebuild)


@app.command()
def encode(config: ConfigPath, set_: Overrides = None, rebuild: Rebuild = False) -> None:
    """Turn every position into a state of the frozen LM."""
    one_stage(open_config(config, set_), "encode", rebuild)


@app.command()
def codec(config: ConfigPath, set_: Overrides = None, rebuild: Rebuild = False) -> None:
    """Code the states that neighbour nodes have."""
    one_stage(open_config(config, set_), "codec", rebuild)


@app.command()
def index(config: ConfigPath, set_: Overrides = None, rebuild: Rebuild = False) -> None:
    """Index the train states for search."""
    one_stage(open_config(config, set_), "index", rebuild)


@app.command()
def search(config: ConfigPath, set_: Overrides = None, rebuild: Rebuild = False) -> None:
    """Find the neighbours of every position."""
    one_stage(open_config(config, set_), "search", rebuild)


@app.command()
def train(config: ConfigPath, set_: Overrides = None, rebuild: Rebuild = False) -> None:
    """Train the graph network."""
    one_stage(open_config(config, set_), "train", rebuild)


@app.command()
def cache(config: ConfigPath, set_: Overrides = None, rebuild: Rebuild = False) -> None:
    """Keep what the trained network reads of every row, so that scoring need not compute it."""
    one_stage(open_config(config, set_), "cache", rebuild)


@app.command()
def tune(config: ConfigPath, set_: Overrides = None, rebuild: Rebuild = False) -> None:
    """Choose k, T and lambda on valid."""
    one_stage(open_config(config, set_), "tune", rebuild)


@app.command(name="eval")
def eval_(config: ConfigPath, set_: Overrides = None, rebuild: Rebuild = False, as_json: AsJson = False) -> None:
    """Score test once and print the four rows."""
    made = open_config(config, set_)
    made.build("eval", rebuild)
    show_report(made, as_json)


@app.command()
def status(config: ConfigPath, set_: Overrides = None, as_json: AsJson = False) -> None:
    """Show what is done, stale or half-done, and how large it is."""
    made = open_config(config, set_)
    table = Table(title=str(made.root), title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("stage", "state", "size", "folder", "why"):
        table.add_column(column, justify="right" if column == "size" else "left")
    rows = {}
    for name, stage in made.stages.items():
        state, size, why = made.state(stage), size_of(made.path(name)), made.why_stale(stage)
        rows[name] = {"state": state, "bytes": size, "why": why}
        table.add_row(name, state, human_bytes(size) if size else "", stage.folder, why)
    out.print(table)
    if as_json:
        print(json.dumps(rows))


@app.command()
def compare(runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Finished run directories.")]) -> None:
    """Show the four rows of several runs beside each other."""
    from gnnlm.evaluate.report import comparison

    reports = {str(path): _report(Run(load_config(path), reading=True)) for path in runs}
    Console(highlight=False, width=max(out.width, 180)).print(comparison(reports))
    if len({(report["test_tokens"], report["rows"]["base"]["ppl"]) for report in reports.values()}) > 1:
        warn("these runs were not tested on the same text under the same base model")


@app.command()
def fork(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run to start from.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The new run directory.")],
    set_: Overrides = None,
) -> None:
    """Start another run from one that is there: what its changed config leaves valid is linked, not made again."""
    kept = Run(load_config(run)).fork(load_config(run, (f"run={json.dumps(str(new))}", *(set_ or ()))))
    say(f"{new}: kept {', '.join(kept) or 'nothing'}; the rest: gnnlm run {new}")


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--run", help="The run directory.")] = Path("runs/demo"),
    set_: Overrides = None,
    rebuild: Rebuild = False,
    as_json: AsJson = False,
) -> None:
    """The whole of it on Python's own documentation and a small pretrained model, in minutes."""
    with resources.as_file(resources.files("gnnlm") / "demo.yaml") as path:
        made = Run(load_config(path, (f"run={json.dumps(str(folder))}", *(set_ or ()))))
    made.build_all(rebuild=rebuild)
    show_report(made, as_json=False)
    show_examples(made, count=2)
    out.print(
        f"\nFigures: {made.path('eval')}/rows.png, training.png; the table as JSON and Markdown beside them.\n"
        "Next, your own text, a folder of .txt, .md, .rst or .jsonl files. Write mine.yaml:\n"
        "    run: runs/mine\n"
        "    corpus: {source: FOLDER}\n"
        "and run it: gnnlm run mine.yaml",
        markup=False,
    )
    if as_json:
        _print_json(made)


@app.command()
def plan(config: ConfigPath, set_: Overrides = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Show the disk, memory and time that a config will need, before anything starts."""
    from gnnlm.plan import Speed, amounts, describe, table_of
    from gnnlm.plan import plan as make_plan

    made = open_config(config, set_, data_dir)
    text, about = amounts(made), describe(made)
    needs = make_plan(made.config, about, text, Speed.measured(made.config.lm.device))
    whole = table_of(needs)
    title = (
        f"{made.root}: {text['train'].tokens:,} store tokens, width {about.width:,}, {about.parameters:,} parameters"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("stage", "disk", "memory", "time here, roughly"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for name, need in needs.items():
        table.add_row(name, human_bytes(need.disk), human_bytes(need.memory), human_time(need.seconds))
    table.add_row("all", human_bytes(whole["disk"]), human_bytes(whole["memory"]), human_time(whole["seconds"]))
    out.print(table)
    if as_json:
        print(json.dumps(whole))


def show_report(made: Run, as_json: bool) -> None:
    from gnnlm.evaluate.report import notes, rich_table

    report = _report(made)
    out.print(rich_table(report))
    for note in notes(report):
        out.print(note, soft_wrap=True, markup=False)
    if as_json:
        _print_json(made)


def show_examples(made: Run, count: int) -> None:
    from gnnlm.evaluate.examples import find_examples, render_example

    report, table = made.artifact("eval"), made.artifact("search")
    base, best = report.array("base.log_probs.npy"), report.array("gnn_knn.log_probs.npy")
    ids, similarity = table.array("test.ids.npy"), table.array("test.similarity.npy")
    streams = made.streams
    for example in find_examples(streams["test"], streams["train"], base, best, ids, similarity, count):
        out.print(render_example(example))


def _report(made: Run) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((made.artifact("eval").path / "report.json").read_text(encoding="utf-8"))
    return report


def _print_json(made: Run) -> None:
    print(json.dumps(_report(made)), flush=True)


class Interrupted(BaseException):
    """Ctrl-C or a polite kill. Not an Exception, so that nothing on the way takes it for a failure of its own."""


def _interrupt(*_: object) -> None:
    raise Interrupted


def main() -> None:
    """Entry point: every error is one line, and says what to do."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        app(standalone_mode=True)
    except GnnlmError as error:
        _fail(" ".join(str(error).split()))
    except Interrupted:
        _fail("interrupted; what was finished is kept: the same command goes on from there", code=130)
    except OSError as error:
        if is_disk_full(error):
            _fail("the disk is full; free some space and run the same command again: it goes on where it stopped")
        if error.filename is None:
            _unexpected(error)
        _fail(f"{error.filename}: {error.strerror}; check that it is there and that you may read and write it")
    except Exception as error:
        _unexpected(error)


def _unexpected(error: Exception) -> None:
    if os.environ.get("GNNLM_DEBUG"):
        raise error
    words = " ".join(str(error).split())[:300]
    _fail(f"unexpected {type(error).__name__}: {words} (this is a bug: GNNLM_DEBUG=1 shows where)")


def _fail(message: str, code: int = 1) -> None:
    sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)
