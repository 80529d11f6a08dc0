"""The commands of the whole pipeline: run, status, compare, fork, demo and plan."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from gnnlm import __version__
from gnnlm.artifact import State, human_bytes
from gnnlm.cli.lm import lm
from gnnlm.cli.options import AsJson, ConfigPath, DataDir, Overrides, Rebuild, open_config, out, size_of
from gnnlm.cli.reports import open_report, print_json, show_examples, show_report
from gnnlm.cli.stages import add_stage_commands
from gnnlm.cli.use import neighbors, score
from gnnlm.cli.write import generate, write_two_sentences
from gnnlm.config import load_config
from gnnlm.config.presets import preset_words
from gnnlm.progress import human_time, say
from gnnlm.run import Run

app = typer.Typer(
    name="gnnlm",
    help="Open-book language models: a frozen LM, a folder of text, retrieval and a graph network.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(lm, name="lm")


DEMO_PROMPTS = ("Wait for the process to exit and", "Abstract base class for")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"gnnlm {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


add_stage_commands(app)
app.command()(score)
app.command()(neighbors)
app.command()(generate)


@app.command()
def run(
    config: ConfigPath,
    set_: Overrides = None,
    data_dir: DataDir = None,
    rebuild: Rebuild = False,
    as_json: AsJson = False,
) -> None:
    """Run every stage, from the text to the report."""
    made = open_config(config, set_, data_dir)
    made.build_all(rebuild=rebuild)
    show_report(made, as_json)


@app.command()
def status(config: ConfigPath, set_: Overrides = None, as_json: AsJson = False) -> None:
    """Show the state and the size of every stage, why a stage is stale or damaged, and what the preset sets."""
    made = open_config(config, set_)
    table = Table(title=str(made.root), title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("stage", "state", "size", "folder", "why"):
        table.add_column(column, justify="right" if column == "size" else "left")
    rows, known = {}, dict[str, State]()
    for name, stage in made.stages.items():
        state, size, why = made.state(stage, known), size_of(made.path(name)), made.why(stage, known[name])
        rows[name] = {"state": state, "bytes": size, "why": why}
        table.add_row(name, state, human_bytes(size) if size else "", stage.folder, why)
    out.print(table)
    for line in preset_words(made.config):
        out.print(line, soft_wrap=True, markup=False)
    if as_json:
        print(json.dumps(rows))


@app.command()
def compare(runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Finished run directories.")]) -> None:
    """Compare finished runs side by side, with changes against the first on the test documents they share."""
    from gnnlm.evaluate.compare import Finished, comparison, remarks

    finished = []
    for path in runs:
        made = Run(load_config(path), reading=True)
        lm = made.artifact("lm") if "lm" in made.stages else None
        scored, corpus = made.artifact("eval"), made.artifact("corpus")
        finished.append(Finished.of(str(path), open_report(made), scored, corpus, lm))
    Console(highlight=False, markup=False, width=1000).print(comparison(finished))
    for remark in remarks(finished):
        out.print(remark, soft_wrap=True, markup=False)


@app.command()
def fork(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run to start from.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The new run directory.")],
    set_: Overrides = None,
) -> None:
    """Start a new run from an existing one; stages that the changed config leaves valid are linked, not rebuilt."""
    kept = Run(load_config(run)).fork(load_config(run, (f"run={json.dumps(str(new))}", *(set_ or ()))))
    say(f"{new}: kept {', '.join(kept) or 'nothing'}; build the rest with gnnlm run {new}")


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--run", help="The run directory.")] = Path("runs/demo"),
    set_: Overrides = None,
    rebuild: Rebuild = False,
    as_json: AsJson = False,
) -> None:
    """Run the whole pipeline on Python's own documentation with a small pretrained model, in minutes."""
    with resources.as_file(resources.files("gnnlm") / "demo.yaml") as path:
        made = Run(load_config(path, (f"run={json.dumps(str(folder))}", *(set_ or ()))))
    made.build_all(rebuild=rebuild)
    show_report(made, as_json=False)
    show_examples(made, count=2)
    out.print("\nWritten with the book (words are coloured by its share; under them, where they come from):")
    write_two_sentences(made.root, list(DEMO_PROMPTS))
    out.print(
        "\n"
        "Next, use your own text: a folder of .txt, .md, .rst or .jsonl files. Write mine.yaml:\n"
        "    run: runs/mine\n"
        "    corpus: {source: FOLDER}\n"
        "and run it: gnnlm run mine.yaml\n"
        f'Write with this book: gnnlm generate {folder} "Raise an error if"',
        markup=False,
    )
    if as_json:
        print_json(made)


@app.command()
def plan(config: ConfigPath, set_: Overrides = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Estimate the disk, memory and time that the remaining stages need."""
    from gnnlm.run.plan import amounts, describe, done_stages, table_of
    from gnnlm.run.plan import plan as make_plan
    from gnnlm.run.speed import Speed

    made = open_config(config, set_, data_dir)
    text, about = amounts(made), describe(made)
    needs = make_plan(made.config, about, text, Speed.measured(made.config.lm.device))
    whole = table_of(needs, done_stages(made))
    title = (
        f"{made.root}: {text['train'].tokens:,} store tokens, width {about.width:,}, {about.parameters:,} parameters"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("stage", "disk", "memory", "time here, roughly"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for name, need in whole["stages"].items():
        if need["done"]:
            table.add_row(name, f"{human_bytes(need['there'])} on disk", "-", "done")
        else:
            table.add_row(name, human_bytes(need["disk"]), human_bytes(need["memory"]), human_time(need["seconds"]))
    table.add_row("remaining", human_bytes(whole["disk"]), human_bytes(whole["memory"]), human_time(whole["seconds"]))
    out.print(table)
    if as_json:
        print(json.dumps(whole))
