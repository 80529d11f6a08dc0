"""The ASGI application: endpoints and error handlers, behind the checks of `middleware`."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from gnnlm import __version__
from gnnlm.errors import ConfigError, CorpusError, GnnlmError
from gnnlm.serve import document_routes, lookup_routes, static_page, writing_routes
from gnnlm.serve.api_errors import FAILED, ApiError
from gnnlm.serve.context import ServerContext, context_of
from gnnlm.serve.middleware import RequestGuard
from gnnlm.serve.responses import ERRORS, ServerState

log = logging.getLogger("gnnlm.serve")
states = APIRouter()
ABOUT = """Open-book language models with OpenAI's wire format, and sources for every token.

A model is a predictor of a run: `mine` is the best predictor of the run `mine`; `mine:base`, `mine:knn`, `mine:gnn` and
`mine:gnn_knn` name one. Fields that OpenAI's API does not have are described with the others."""


def make_app(context: ServerContext, loopback: bool = False) -> ASGIApp:
    """Return the application of a server; with `loopback` and without keys, it accepts only this machine's names."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        context.worker.start()
        yield
        context.worker.stop()

    app = FastAPI(
        title="gnnlm",
        version=__version__,
        description=ABOUT,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        exception_handlers={
            ApiError: _api_error,
            GnnlmError: _gnnlm_error,
            RequestValidationError: _validation_error,
            HTTPException: _http_error,
            Exception: _unexpected_error,
        },
    )
    app.state.context = context
    for router in (writing_routes.router, lookup_routes.router, document_routes.router, static_page.router, states):
        app.include_router(router)
    app.openapi = lambda: _schema(app)  # type: ignore[method-assign]
    known = {"/openapi.json", *static_page.PATHS, *_schema(app)["paths"]}
    return RequestGuard(app, context, known, loopback)


@states.get("/healthz")
async def healthz() -> ServerState:
    """Whether the process is alive."""
    return ServerState(status="ok")


@states.get("/readyz", responses={503: ERRORS[503]})
async def readyz(request: Request) -> ServerState:
    """Whether requests are accepted."""
    if not context_of(request).worker.ready:
        raise ApiError(503, "the server accepts no requests now", code="not_ready")
    return ServerState(status="ready")


@states.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Counts and times, for Prometheus."""
    found = context_of(request).metrics
    return Response(found.text(), media_type=found.content_type)


def _schema(app: FastAPI) -> dict[str, Any]:
    """Return the generated schema, without status 422, which this server never answers."""
    schema = FastAPI.openapi(app)
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    return schema


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _gnnlm_error(request: Request, error: Exception) -> Response:
    refused = isinstance(error, ConfigError | CorpusError)  # by the book: the request is wrong, not the server
    return ApiError(400 if refused else 500, str(error)).response()


async def _validation_error(request: Request, error: Exception) -> Response:
    """Answer with the first error of a body or query."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        why = str(first.get("ctx", {}).get("error", ""))
        return ApiError(400, f"the body is not JSON: {why}").response()
    place = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    if not place:
        return ApiError(400, "expected a JSON object, with the header Content-Type: application/json").response()
    name = ".".join(place)[:200]
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "this field does not exist or is not supported"
    return ApiError(400, f"{name}: {message}"[:1000], param=name).response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {404: f"no such path: {request.url.path[:200]}", 405: "this path does not take that method"}
    message = messages.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _unexpected_error(request: Request, error: Exception) -> Response:
    log.error("a request failed", exc_info=error)
    return ApiError(500, FAILED).response()
