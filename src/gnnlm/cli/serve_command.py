"""gnnlm serve: an HTTP server for finished runs."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from gnnlm.cli.model_options import with_options
from gnnlm.cli.options import EngineName, RayAddress, StorageUrl
from gnnlm.engine import using
from gnnlm.errors import ConfigError
from gnnlm.progress import say, warn
from gnnlm.serve.limits import LIMIT_OPTIONS, Limits, read_keys
from gnnlm.serve.socket import address_of, bind, is_loopback

NEEDED = ("fastapi", "uvicorn", "prometheus_client")


@with_options(Limits, LIMIT_OPTIONS)
def serve(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Finished run directories.")],
    *,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="The port; 0 takes any free one.")] = 8000,
    host: Annotated[
        str, typer.Option("--host", help="The address to listen on. Anything but loopback is open to others.")
    ] = "127.0.0.1",
    api_keys: Annotated[
        Path | None,
        typer.Option("--api-keys", metavar="FILE", help="API keys, one a line; GNNLM_API_KEYS has them too."),
    ] = None,
    engine: EngineName = "local",
    ray_address: RayAddress = None,
    storage: StorageUrl = None,
    **limits: Any,
) -> None:
    """Serve finished runs over HTTP, as OpenAI's API does, with a source for every token."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"gnnlm serve needs {', '.join(missing)}: pip install 'gnnlm[serve]'")
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.WARNING)
    keys = read_keys(api_keys)
    checked = Limits(**limits)
    with bind(host, port) as listening:
        if not is_loopback(listening) and not keys:
            warn(f"{host} can be reached by others, and there are no API keys: everybody may use this server")
        # imported late, because they load fastapi and torch: a port in use is reported at once
        from gnnlm.serve.context import ServerContext
        from gnnlm.serve.runs import open_runs
        from gnnlm.serve.server import serve as run_server

        with using(engine, ray_address, storage) as holder:
            context = ServerContext.of(open_runs(runs, holder), checked, keys)
            for line in context.runs.descriptions():
                say(line)
            run_server(context, listening, lambda: print(f"ready: {address_of(listening)}", flush=True))
