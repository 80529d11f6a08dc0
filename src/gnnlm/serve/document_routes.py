"""Changing the documents of a run over HTTP: added, replaced, removed. Only on a server with API keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request, Response

from gnnlm.errors import ArtifactError
from gnnlm.library.library import Library
from gnnlm.library.results import Change
from gnnlm.serve import responses
from gnnlm.serve.api_errors import Problem, json_response
from gnnlm.serve.context import Desk, desk_of, in_worker
from gnnlm.serve.lookup_routes import ModelName
from gnnlm.serve.requests import DocumentsBody, RemoveBody

CLOSED: dict[int | str, dict[str, Any]] = {
    403: {
        "model": responses.ErrorBody,
        "description": "The server has no API keys, so its documents cannot be changed.",
    },
    409: {"model": responses.ErrorBody, "description": "Another process is changing the run."},
}
router = APIRouter(responses={**responses.ERRORS, **CLOSED})


@router.post("/v1/documents", responses={200: {"model": responses.ChangeOut}})
async def add(request: Request, body: DocumentsBody) -> Response:
    """Add documents. Other text under a name that is there is refused; the same text is no change."""
    return await _change(request, body.model, lambda library: library.add_texts(_texts(body), tags=body.tags or ()))


@router.put("/v1/documents", responses={200: {"model": responses.ChangeOut}})
async def replace(request: Request, body: DocumentsBody) -> Response:
    """Replace documents by others of the same names; their tags stay."""
    return await _change(request, body.model, lambda library: library.replace_texts(_texts(body), tags=body.tags or ()))


@router.post("/v1/documents/remove", responses={200: {"model": responses.ChangeOut}})
async def remove(request: Request, body: RemoveBody) -> Response:
    """Remove documents: no request that comes after this one finds them."""
    return await _change(request, body.model, lambda library: library.remove(body.names))


@router.get("/v1/history", responses={200: {"model": responses.HistoryOut}})
async def history(request: Request, model: ModelName = None) -> Response:
    """Every generation of a run's store, the first first."""
    desk = desk_of(request)
    library = _library(desk, model)
    found = await in_worker(request, library.history)
    data = [each.summary() for each in found]
    return json_response({"object": "list", "model": desk.runs.find(model)[0].name, "data": data})


async def _change(request: Request, model: str, work: Callable[[Library], Change]) -> Response:
    desk = desk_of(request)
    if not desk.keys:
        message = "documents can be changed only on a server with API keys; start it with --api-keys"
        raise Problem(403, message, code="no_keys")
    library = _library(desk, model)

    def changed() -> Change:
        made = work(library)
        desk.runs.move_on()
        return made

    try:
        made = await in_worker(request, changed)
    except ArtifactError as error:
        raise Problem(409, str(error), code="conflict") from error
    shown: dict[str, Any] = {"object": "change", "model": desk.runs.find(model)[0].name, **made.as_json()}
    return json_response({**shown, "overlapping": list(made.overlapping)})


def _library(desk: Desk, model: str | None) -> Library:
    run, _ = desk.runs.find(model)
    if run.book.run is None:
        raise Problem(400, f"{run.name} was not opened from a run directory", param="model")
    return Library(run.book.run)


def _texts(body: DocumentsBody) -> dict[str, str]:
    texts = {document.name: document.text for document in body.documents}
    if len(texts) < len(body.documents):
        raise Problem(400, "documents: expected one document of each name", param="documents")
    return texts
