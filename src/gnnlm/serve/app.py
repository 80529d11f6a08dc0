"""The application: endpoints, errors, and the guard before them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from gnnlm import __version__
from gnnlm.errors import ConfigError, CorpusError, GnnlmError
from gnnlm.serve import document_routes, lookup_routes, static_page, writing_routes
from gnnlm.serve.api_errors import Problem
from gnnlm.serve.context import Desk, desk_of
from gnnlm.serve.limits import Keys, Limits
from gnnlm.serve.metrics import Metrics
from gnnlm.serve.middleware import Guard
from gnnlm.serve.responses import ERRORS, ServerState
from gnnlm.serve.runs import Runs
from gnnlm.serve.worker import Worker

log = logging.getLogger("gnnlm.serve")
ABOUT = """Open-book language models with OpenAI's wire format, and a source for every token.

A model is a predictor of a run: `mine` is the best one of the run `mine`, `mine:base`, `mine:knn`, `mine:gnn` and
`mine:gnn_knn` are each of them. Fields that OpenAI's API does not have are described with the others."""


def make_desk(runs: Runs, limits: Limits | None = None, keys: Keys | None = None) -> Desk:
    limits, metrics = limits or Limits(), Metrics()
    return Desk(runs, Worker(limits, metrics, runs.move_on), limits, keys or Keys(), metrics)


def make_app(desk: Desk, loopback: bool = False) -> ASGIApp:
    """The application of a server. `loopback`: it is meant for this machine only."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        desk.worker.start()
        yield
        desk.worker.stop()

    app = FastAPI(
        title="gnnlm", version=__version__, description=ABOUT, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.desk = desk
    app.include_router(writing_routes.router)
    app.include_router(lookup_routes.router)
    app.include_router(document_routes.router)
    app.include_router(static_page.router)
    _add_states(app)
    app.add_exception_handler(Problem, _problem)
    app.add_exception_handler(GnnlmError, _ours)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unexpected)
    app.openapi = lambda: _schema(app)  # type: ignore[method-assign]
    known = {getattr(route, "path", "") for route in app.routes} | set(_schema(app)["paths"])
    return Guard(app, desk, lambda path: _label(path, known), loopback)


def _add_states(app: FastAPI) -> None:
    @app.get("/healthz")
    async def healthz() -> ServerState:
        """Whether the process is alive."""
        return ServerState(status="ok")

    @app.get("/readyz", responses={503: ERRORS[503]})
    async def readyz(request: Request) -> ServerState:
        """Whether requests are taken."""
        if not desk_of(request).worker.ready:
            raise Problem(503, "the server takes no requests now", code="not_ready")
        return ServerState(status="ready")

    @app.get("/metrics", response_class=Response)
    async def metrics(request: Request) -> Response:
        """Counts and times, for Prometheus."""
        found = desk_of(request).metrics
        return Response(found.text(), media_type=found.content_type)


def _label(path: str, known: set[str]) -> str:
    """A path as metrics show it: made-up ones are one."""
    if path.startswith("/v1/models/"):
        return "/v1/models/{model}"
    return path if path in known else "other"


def _schema(app: FastAPI) -> dict[str, Any]:
    """The framework's schema, without the 422 that this server never answers."""
    schema = FastAPI.openapi(app)
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    return schema


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return error.response()


async def _ours(request: Request, error: Exception) -> Response:
    """A request that the book refuses is the client's mistake; anything else is not."""
    refused = isinstance(error, (ConfigError, CorpusError))
    return Problem(400 if refused else 500, str(error)).response()


async def _invalid(request: Request, error: Exception) -> Response:
    """The first thing that is wrong with a body, in one line."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    name, message = ".".join(place)[:200], str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "this field does not exist or is not supported"
    if first["type"] == "json_invalid":
        why = str(first.get("ctx", {}).get("error", ""))
        return Problem(400, f"the body is not JSON: {why}").response()
    if not place:
        return Problem(400, "expected a JSON object, with the header Content-Type: application/json").response()
    return Problem(400, f"{name}: {message}"[:1000], param=name).response()


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {404: f"no such path: {request.url.path[:200]}", 405: "this path does not take that method"}
    return Problem(
        error.status_code, message.get(error.status_code, str(error.detail)), headers=error.headers
    ).response()


async def _unexpected(request: Request, error: Exception) -> Response:
    log.error("an answer failed", exc_info=error)
    return Problem(500, "the server made a mistake; its log has more").response()
