"""The choice of an engine: this process, or Ray."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from gnnlm.engine.engine_protocol import Engine
from gnnlm.engine.local import HERE
from gnnlm.errors import EngineError

ENGINES = ("local", "ray")


@contextmanager
def using(name: str, address: str | None = None, storage: str | None = None) -> Iterator[Engine]:
    """Yield the engine of this name and close it at the end of the block."""
    if name not in ENGINES:
        raise EngineError(f"expected an engine named {' or '.join(ENGINES)}, got {name!r}")
    if name == "local":
        if address is not None or storage is not None:
            raise EngineError("--ray-address and --storage are for the ray engine; add --engine ray")
        yield HERE
        return
    if importlib.util.find_spec("ray") is None:
        raise EngineError("--engine ray needs Ray; install it: pip install 'gnnlm[cluster]'")
    from gnnlm.engine.ray import RayEngine

    with RayEngine(address, storage) as engine:
        yield engine
