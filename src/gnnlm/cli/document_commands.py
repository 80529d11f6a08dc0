"""The commands that change the store of a finished run, and those that list its documents and its history."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from gnnlm.cli.lookup_commands import RunPath
from gnnlm.cli.options import AsJson, out
from gnnlm.datastore.filter import open_documents
from gnnlm.errors import ArtifactError
from gnnlm.library.results import Change, ErasureChange
from gnnlm.progress import say

if TYPE_CHECKING:
    from gnnlm.library.library import Library

# Modules that load torch are imported by the commands that need them: the others, and --help, start at once.

Paths = Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files or folders of text.")]
Tags = Annotated[
    list[str] | None, typer.Option("--tag", metavar="TAG", help="Tag the documents; filters take tag:TAG.")
]


def add(run: RunPath, paths: Paths, tag: Tags = None, as_json: AsJson = False) -> None:
    """Add documents to the store of a finished run. Only they are encoded; nothing is trained again."""
    _show(_library(run).add(paths, tags=tag or ()), as_json)


def replace(run: RunPath, paths: Paths, tag: Tags = None, as_json: AsJson = False) -> None:
    """Replace documents of the store by files of the same names. Their tags stay."""
    _show(_library(run).replace(paths, tags=tag or ()), as_json)


def remove(
    run: RunPath,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of documents, globs, or tag:TAG.")],
    as_json: AsJson = False,
) -> None:
    """Remove documents: no search, citation or draft finds them from now on. compact --erase deletes them for good."""
    _show(_library(run).remove(names), as_json)


def sync(
    run: RunPath,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to follow.")],
    watch: Annotated[bool, typer.Option("--watch", help="Go on until interrupted.")] = False,
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between two looks at the folder.")] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Make the store follow a folder: add files that are new, replace changed ones, remove those that are gone."""
    library = _library(run)
    seen = _snapshot(folder)
    _show(library.sync(folder), as_json)
    if watch:
        say(f"sync: watching {folder}; stop with Ctrl-C")
    while watch:
        time.sleep(every)
        now = _snapshot(folder)
        if now != seen:
            seen = now
            _show(library.sync(folder), as_json)


def compact(
    run: RunPath,
    erase: Annotated[
        bool,
        typer.Option("--erase", help="Delete every file that holds removed documents, and search for what is left."),
    ] = False,
    wait: Annotated[
        float, typer.Option("--wait", min=0, help="Seconds to wait for readers of older generations.")
    ] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Merge small segments and leave out removed documents. Nothing is encoded again."""

    change = _library(run).compact(erase=erase, wait=wait)
    if isinstance(change, ErasureChange):
        _show_erased(change)
    _show(change, as_json)
    if isinstance(change, ErasureChange) and change.found:
        raise ArtifactError(
            f"text of erased documents is left in {change.found[0]}"
            + (f" (and {len(change.found) - 1} more files)" if len(change.found) > 1 else "")
            + "; delete what you do not need of them, and run the same command again"
        )


def refit(
    run: RunPath,
    part: Annotated[
        str,
        typer.Option(
            "--part", metavar="PART", help="What is fitted again: mix, index or gnn (which fits the mix too)."
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Fit the mix, the index or the GNN again with the store as it is now. gnnlm doctor says when."""
    change = _library(run).refit(part)
    done = f"fitted {', '.join(change.stages)} again" if change.stages else f"the {part} fits, nothing was done"
    words = f"generation {change.generation}: {done}; {change.rows:,} rows, {change.seconds:.1f} s"
    out.print(words, markup=False, soft_wrap=True)
    if as_json:
        print(json.dumps(change.as_json()), flush=True)


def renew(run: RunPath, as_json: AsJson = False) -> None:
    """After a rebuild, or damage: make added segments again from their text, with what the run has trained."""
    _show(_library(run).renew(), as_json)


def documents(
    run: RunPath,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A name, a glob, or tag:TAG. Default: all.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the documents that can be looked up, with their tokens and tags."""
    found = _library(run).documents()
    if name is not None:
        tags: dict[str, list[int]] = {}
        for number, entry in enumerate(found):
            for tag in entry.tags:
                tags.setdefault(tag, []).append(number)
        found = [found[n] for n in open_documents([entry.name for entry in found], name, tags=tags)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("document", "tokens", "tags", "segment"):
        table.add_column(column, justify="right" if column == "tokens" else "left", overflow="fold")
    for entry in found:
        table.add_row(Text(entry.name), f"{entry.tokens:,}", Text(", ".join(entry.tags)), entry.segment)
    out.print(table)
    if as_json:
        listed = [{"name": e.name, "tokens": e.tokens, "tags": list(e.tags), "segment": e.segment} for e in found]
        print(json.dumps({"documents": listed}))


def history(run: RunPath, as_json: AsJson = False) -> None:
    """Show every generation of the store: when it was made, by what, and what came and went."""
    found = _library(run).history()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("generation", "made", "by", "added", "removed", "documents", "rows", "segments"):
        table.add_column(column, justify="left" if column in ("made", "by") else "right")
    rows = []
    for each in found:
        row = each.summary()
        rows.append(row)
        table.add_row(*(f"{value:,}" if isinstance(value, int) else str(value) for value in row.values()))
    out.print(table)
    if as_json:
        print(json.dumps({"generations": rows}))


def _library(run: Path) -> Library:
    from gnnlm.library.library import Library

    return Library(run)


def _show(change: Change, as_json: bool) -> None:
    out.print(
        f"generation {change.generation}: added {len(change.added):,}, removed {len(change.removed):,}; "
        f"{change.rows:,} rows, {change.seconds:.1f} s",
        markup=False,
        soft_wrap=True,
    )
    if as_json:
        print(json.dumps(change.as_json()), flush=True)


def _show_erased(change: ErasureChange) -> None:
    out.print(
        f"erased {len(change.erased):,} documents; searched {change.searched:,} bytes for text, tokens and states: "
        f"{'nothing is left' if not change.found else f'found in {len(change.found)} files'}",
        markup=False,
        soft_wrap=True,
    )
    if change.may_remember:
        out.print("What was made from them and may remember them:")
    for line in (*change.found, *change.may_remember):
        out.print(f"  {line}", markup=False, soft_wrap=True)


def _snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the size and the time of each file of a folder."""
    found = {}
    for path in folder.rglob("*"):
        try:
            status = path.stat()
        except OSError:  # gone in the meantime
            continue
        found[str(path)] = status.st_size, status.st_mtime_ns
    return found
