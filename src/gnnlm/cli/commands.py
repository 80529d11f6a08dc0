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
from gnnlm.cli.analyze_command import analyze
from gnnlm.cli.doctor_command import doctor
from gnnlm.cli.document_commands import add, compact, documents, history, refit, remove, renew, replace, sync
from gnnlm.cli.generate_command import generate, write_two_sentences
from gnnlm.cli.harness_command import eval_harness
from gnnlm.cli.lm_commands import lm
from gnnlm.cli.lookup_commands import neighbors, score
from gnnlm.cli.options import (
    AsJson,
    ConfigPath,
    DataDir,
    EngineName,
    Overrides,
    RayAddress,
    Rebuild,
    StorageUrl,
    engine_of,
    open_config,
    out,
)
from gnnlm.cli.plan_command import plan
from gnnlm.cli.printed_reports import generation_line, open_report, print_json, show_demo_results, show_report
from gnnlm.cli.serve_command import serve
from gnnlm.cli.stage_commands import add_stage_commands
from gnnlm.config import load_config
from gnnlm.config.presets import preset_words
from gnnlm.progress import say
from gnnlm.run import Run

# Modules that load torch are imported by the commands that need them: the others, and --help, start at once.

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
app.command()(analyze)
app.command()(serve)
app.command()(eval_harness)
app.command()(plan)
for command in (add, remove, replace, sync, compact, refit, renew, documents, history):
    app.command()(command)
app.command()(doctor)


@app.command()
def run(
    config: ConfigPath,
    set_: Overrides = None,
    data_dir: DataDir = None,
    rebuild: Rebuild = False,
    force: Annotated[bool, typer.Option("--force", help="Run also what does not fit (see gnnlm plan).")] = False,
    engine: EngineName = "local",
    ray_address: RayAddress = None,
    storage: StorageUrl = None,
    as_json: AsJson = False,
) -> None:
    """Run every stage, from the text to the report."""
    made = open_config(config, set_, data_dir)
    made.force = force
    with engine_of(made, engine, ray_address, storage):
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
        state, size, why = made.state(stage, known), made.bytes_of(name), made.why(stage, known[name])
        rows[name] = {"state": state, "bytes": size, "why": why}
        table.add_row(name, state, human_bytes(size) if size else "", stage.folder, why)
    out.print(table)
    if (line := generation_line(made)) is not None:
        out.print(line, soft_wrap=True, markup=False)
    for line in preset_words(made.config):
        out.print(line, soft_wrap=True, markup=False)
    if as_json:
        print(json.dumps(rows))


@app.command()
def compare(runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Finished run directories.")]) -> None:
    """Compare finished runs side by side, with changes against the first on the test documents they share."""
    from gnnlm.evaluate.compare import ComparableRun, comparison, remarks

    finished = []
    for path in runs:
        made = Run(load_config(path), reading=True)
        lm = made.artifact("lm") if "lm" in made.stages else None
        scored, corpus = made.artifact("eval"), made.artifact("corpus")
        finished.append(ComparableRun.of(str(path), open_report(made), scored, corpus, lm))
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
    show_demo_results(made)
    out.print("\nWritten with the book (words are coloured by its share; under them, where they come from):")
    write_two_sentences(made.root, list(DEMO_PROMPTS))
    out.print(
        "\n"
        "Next, use your own text: a folder of .txt, .md, .rst or .jsonl files. Write mine.yaml:\n"
        "    run: runs/mine\n"
        "    corpus: {source: FOLDER}\n"
        "and run it: gnnlm run mine.yaml\n"
        f'Write with this book: gnnlm generate {folder} "Raise an error if"\n'
        f"Its tables and figures: gnnlm analyze {folder}\n"
        f"In the browser: gnnlm serve {folder}, and open the printed address.",
        markup=False,
    )
    if as_json:
        print_json(made)
