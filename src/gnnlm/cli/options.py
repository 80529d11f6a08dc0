"""The options that commands share, opening a run, and the console."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gnnlm.artifact import human_bytes
from gnnlm.config import load_config
from gnnlm.engine import HERE, using
from gnnlm.errors import ConfigError
from gnnlm.progress import say
from gnnlm.run import Run

out = Console(highlight=False, width=None if sys.stdout.isatty() else 100)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A config file, or a run directory.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Override a field, such as gnn.layers=2.")
]
Rebuild = Annotated[bool, typer.Option("--rebuild", help="Rebuild what is stale (made from other inputs) or damaged.")]
Finish = Annotated[
    bool,
    typer.Option(
        "--finish",
        help="End a half-done training now and keep its best step so far. To stop a running one: touch RUN/stop.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", metavar="DIR", help="The folder with the benchmark's files, or with the text."),
]
EngineName = Annotated[
    str,
    typer.Option(
        "--engine", envvar="GNNLM_ENGINE", help="local, or ray: on a Ray cluster, or on this machine if there is none."
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray-address", metavar="ADDRESS", help="The Ray cluster: host:port, or auto for the one running here."
    ),
]
StorageUrl = Annotated[
    str | None,
    typer.Option(
        "--storage",
        envvar="GNNLM_STORAGE",
        metavar="URL",
        help="An fsspec path that all machines can reach, where they do not share the run directory.",
    ),
]


@contextmanager
def engine_of(made: Run, name: str, address: str | None, storage: str | None) -> Iterator[None]:
    """Build the run with this engine within the block."""
    with using(name, address, storage) as engine:
        made.use(engine)
        try:
            yield
        finally:
            made.engine = HERE


def open_config(config: Path, overrides: list[str] | None, data_dir: Path | None = None) -> Run:
    """Return the run of a config; --data-dir defaults to the folder that was given when its corpus was built."""
    read = load_config(config, tuple(overrides or ()))
    folder = None if data_dir is None else str(data_dir)
    if folder is None and read.corpus.data_dir is None and (Path(read.run) / "corpus" / "manifest.json").is_file():
        with suppress(ConfigError):  # written by another version: the commands that need it report that
            folder = load_config(Path(read.run)).corpus.data_dir
    if folder is not None:
        read = load_config(config, (f"corpus.data_dir={json.dumps(folder)}", *(overrides or ())))
    return Run(read)


def one_stage(made: Run, name: str, rebuild: bool) -> None:
    artifact = made.build(name, rebuild)
    say(f"{name}: {artifact.path}, {human_bytes(made.bytes_of(name))}")
