"""gnnlm serve: an HTTP server for finished runs."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Annotated

import typer

from gnnlm.cli.options import EngineName, RayAddress, StorageUrl
from gnnlm.engine import using
from gnnlm.errors import ConfigError

NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def serve(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Finished run directories.")],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="The port; 0 takes any free one.")] = 8000,
    host: Annotated[
        str, typer.Option("--host", help="The address to listen on. Anything but loopback is open to others.")
    ] = "127.0.0.1",
    api_keys: Annotated[
        Path | None,
        typer.Option("--api-keys", metavar="FILE", help="API keys, one a line; GNNLM_API_KEYS has them too."),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Texts that are written at once.")] = 16,
    queue: Annotated[int, typer.Option("--queue", min=1, help="Requests that may wait; more get a 429.")] = 128,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="The most tokens of a text.")] = 2048,
    max_prompt: Annotated[int, typer.Option("--max-prompt", min=1, help="The most tokens of a prompt.")] = 8192,
    max_attached: Annotated[
        int, typer.Option("--max-attached", min=1, help="The most tokens of the documents that a request attaches.")
    ] = 16_384,
    max_texts: Annotated[
        int, typer.Option("--max-texts", min=1, help="The most texts of a request: prompts times n.")
    ] = 128,
    max_seconds: Annotated[float, typer.Option("--max-seconds", help="The most time of a request.")] = 600.0,
    max_body: Annotated[int, typer.Option("--max-body", min=1, help="The most bytes of a request.")] = 4 * 2**20,
    grace: Annotated[
        float, typer.Option("--grace", help="Seconds that running requests get when the server is told to stop.")
    ] = 30.0,
    engine: EngineName = "local",
    ray_address: RayAddress = None,
    storage: StorageUrl = None,
) -> None:
    """Serve finished runs over HTTP, as OpenAI's API does, with a source for every token."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"gnnlm serve needs {', '.join(missing)}: pip install 'gnnlm[serve]'")
    from gnnlm.progress import say, warn
    from gnnlm.serve.limits import Limits, read_keys
    from gnnlm.serve.socket import address_of, bind, is_loopback

    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.WARNING)
    keys = read_keys(api_keys)
    limits = Limits(
        batch=batch,
        queue=queue,
        max_tokens=max_tokens,
        max_prompt=max_prompt,
        max_attached=max_attached,
        max_texts=max_texts,
        max_seconds=max_seconds,
        max_body=max_body,
        grace=grace,
    )
    with bind(host, port) as listening:
        if not is_loopback(listening) and not keys:
            warn(f"{host} can be reached by others, and there are no API keys: everybody may use this server")
        from gnnlm.serve.app import make_desk
        from gnnlm.serve.runs import open_runs
        from gnnlm.serve.server import serve as run_server

        with using(engine, ray_address, storage) as holding:
            opened = open_runs(runs, holding)
            for run in opened:
                say(f"{run.name}: {run.book!r}")
            run_server(
                make_desk(opened, limits, keys), listening, lambda: print(f"ready: {address_of(listening)}", flush=True)
            )
