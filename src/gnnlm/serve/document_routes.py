"""Endpoints that add, replace and remove documents of a run; only on a server with API keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request

from gnnlm.errors import ArtifactError
from gnnlm.library.library import Library
from gnnlm.library.results import Change
from gnnlm.serve.api_errors import ApiError
from gnnlm.serve.context import ServerContext, context_of, in_worker
from gnnlm.serve.lookup_routes import ModelName
from gnnlm.serve.requests import DocumentsBody, RemoveBody
from gnnlm.serve.responses import ERRORS, ErrorBody, GenerationList, GenerationSummary, StoreChange

CHANGE_ERRORS: dict[int | str, dict[str, Any]] = {
    403: {"model": ErrorBody, "description": "The server has no API keys, so its documents cannot be changed."},
    409: {"model": ErrorBody, "description": "Another process is changing the run."},
}
router = APIRouter(responses={**ERRORS, **CHANGE_ERRORS})


@router.post("/v1/documents")
async def add(request: Request, body: DocumentsBody) -> StoreChange:
    """Add documents. A name that exists with another text is refused; with the same text, nothing changes."""
    return await _change(request, body.model, lambda library: library.add_texts(_texts(body), tags=body.tags or ()))


@router.put("/v1/documents")
async def replace(request: Request, body: DocumentsBody) -> StoreChange:
    """Replace documents by others of the same names; their tags stay."""
    return await _change(request, body.model, lambda library: library.replace_texts(_texts(body), tags=body.tags or ()))


@router.post("/v1/documents/remove")
async def remove(request: Request, body: RemoveBody) -> StoreChange:
    """Remove documents. Later requests do not find them."""
    return await _change(request, body.model, lambda library: library.remove(body.names))


@router.get("/v1/history")
async def history(request: Request, model: ModelName = None) -> GenerationList:
    """List the generations of a run's store, oldest first."""
    context = context_of(request)
    library = _library(context, model)
    found = await in_worker(request, library.history)
    data = [GenerationSummary(**each.summary()) for each in found]
    return GenerationList(model=context.runs.find(model)[0].name, data=data)


async def _change(request: Request, model: str, work: Callable[[Library], Change]) -> StoreChange:
    context = context_of(request)
    if not context.keys:
        message = "documents can be changed only on a server with API keys; start it with --api-keys"
        raise ApiError(403, message, code="no_keys")
    library = _library(context, model)

    def changed() -> Change:
        made = work(library)
        context.runs.refresh()
        return made

    try:
        made = await in_worker(request, changed)
    except ArtifactError as error:
        raise ApiError(409, str(error), code="conflict") from error
    name = context.runs.find(model)[0].name
    return StoreChange(model=name, **made.as_json(), overlapping=list(made.overlapping))


def _library(context: ServerContext, model: str | None) -> Library:
    run, _ = context.runs.find(model)
    if run.book.run is None:
        raise ApiError(400, f"{run.name} was not opened from a run directory", param="model")
    return Library(run.book.run)


def _texts(body: DocumentsBody) -> dict[str, str]:
    texts = {document.name: document.text for document in body.documents}
    if len(texts) < len(body.documents):
        raise ApiError(400, "documents: expected one document of each name", param="documents")
    return texts
