"""Everything but writing: models, scores, neighbours, next tokens, attention, documents, the report, tokens."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from gnnlm.answers import Neighbour, Scores
from gnnlm.serve import openai, responses
from gnnlm.serve.api_errors import Problem, finite, json_response, unknown_model
from gnnlm.serve.context import desk_of, found_run, in_worker
from gnnlm.serve.requests import (
    LONGEST_NAME,
    AttentionBody,
    DetokenizeBody,
    NeighborsBody,
    NextBody,
    Pair,
    Predictors,
    ScoreBody,
    TokenizeBody,
)
from gnnlm.serve.runs import Served

router = APIRouter(responses=responses.ERRORS)
MOST_DOCUMENTS = 1000  # of one answer
ModelName = Annotated[str | None, Query(max_length=LONGEST_NAME, description="Default: the first run.")]


# -- models ----------------------------------------------------------------------------------------------------


@router.get("/v1/models", responses={200: {"model": responses.ModelList}})
async def models(request: Request) -> Response:
    """The models: every run, and every predictor of every run."""
    data = [_model(run, name) for run in desk_of(request).runs for name in run.models]
    return json_response({"object": "list", "data": data})


@router.get("/v1/models/{model:path}", responses={200: {"model": responses.ModelOut}})
async def one_model(request: Request, model: str) -> Response:
    """One model."""
    runs = desk_of(request).runs
    if model not in runs.models:
        raise unknown_model(model, runs.models)
    return json_response(_model(runs.find(model)[0], model))


def _model(run: Served, name: str) -> dict[str, Any]:
    predictor = run.book.predictors[-1] if name == run.name else name.rpartition(":")[2]
    return {
        "id": name,
        "object": "model",
        "created": run.opened,
        "owned_by": "gnnlm",
        "run": run.name,
        "predictor": predictor,
        "documents": len(run.book.model.store.live),
        "generation": run.book.generation,
        "rows": len(run.book.model.index),
    }


# -- scores, neighbours, next tokens, attention ----------------------------------------------------------------


@router.post("/v1/score", responses={200: {"model": responses.ScoreList}})
async def score(request: Request, body: ScoreBody) -> Response:
    """The log-probability of every token of a text, under each predictor."""
    desk = desk_of(request)
    run, predictors = await _run_and_predictors(request, body)
    texts = body.input if isinstance(body.input, list) else [body.input]
    plain = [(text.context, text.continuation) if isinstance(text, Pair) else text for text in texts]
    for text in plain:
        desk.check_length(
            (await run_in_threadpool(run.tokenize, text if isinstance(text, str) else "".join(text)))[0], "input"
        )
    found: list[Scores] = []
    for text in plain:  # one by one: other requests are answered in between
        found.append(
            await in_worker(
                request,
                lambda text=text: run.book.score(  # type: ignore[misc]
                    text, predictors=predictors, only=body.only, exclude=body.exclude, own_past=body.own_past
                ),
            )
        )
    data = [_scores(number, scores) for number, scores in enumerate(found)]
    count = sum(len(scores) for scores in found)
    return json_response({"object": "list", "model": body.model, "data": data, "usage": openai.usage(count, 0)})


def _scores(number: int, scores: Scores) -> dict[str, Any]:
    tokens = [
        {
            "text": text,
            "id": token,
            "start": start,
            "end": end,
            "log_probs": {name: finite(float(values[place])) for name, values in scores.log_probs.items()},
            "top1": {name: bool(values[place]) for name, values in scores.top1.items()},
        }
        for place, (text, token, (start, end)) in enumerate(zip(scores.tokens, scores.ids, scores.offsets, strict=True))
    ]
    perplexity = {name: scores.perplexity(name) for name in scores.log_probs}
    shown = {name: value if math.isfinite(value) else None for name, value in perplexity.items()}
    return {"object": "score", "index": number, "tokens": tokens, "perplexity": shown}


@router.post("/v1/neighbors", responses={200: {"model": responses.NeighborList}})
async def neighbors(request: Request, body: NeighborsBody) -> Response:
    """For every token of a text, the places in the store that are looked up to predict it."""
    desk = desk_of(request)
    run, _ = await found_run(request, body, body.attach)
    ids, starts = await run_in_threadpool(run.tokenize, body.input)
    desk.check_length(ids, "input")
    if len(ids) * body.k > 64 * 1024:
        raise Problem(
            400, f"k: at most {64 * 1024:,} neighbours in all, got {len(ids)} tokens times {body.k}", param="k"
        )
    options = {"only": body.only, "exclude": body.exclude, "left": body.left, "right": body.right}
    found = await in_worker(request, lambda: run.book.neighbors(body.input, body.k, **options))  # type: ignore[arg-type]
    ends = [*starts[1:], len(body.input)]
    data = [
        {
            "text": body.input[start:end],
            "id": token,
            "start": start,
            "end": end,
            "neighbors": [_neighbour(one) for one in line],
        }
        for token, start, end, line in zip(ids, starts, ends, found, strict=True)
    ]
    return json_response({"object": "list", "model": body.model, "data": data})


def _neighbour(neighbour: Neighbour) -> dict[str, Any]:
    return {**asdict(neighbour), "similarity": finite(neighbour.similarity)}


@router.post("/v1/next", responses={200: {"model": responses.NextOut}})
async def next_token(request: Request, body: NextBody) -> Response:
    """The likeliest next tokens under each predictor, side by side."""
    run, predictors = await _run_and_predictors(request, body)
    ids = await _prompt(request, run, body.prompt)
    found = await in_worker(
        request,
        lambda: run.book.next(
            ids, predictors=predictors, top=1, only=body.only, exclude=body.exclude, own_past=body.own_past
        ),
    )
    names = list(found.log_probs)
    top = {name: np.argsort(-values, kind="stable")[: body.top].tolist() for name, values in found.log_probs.items()}
    every = list(dict.fromkeys(token for name in reversed(names) for token in top[name]))
    data = [
        {
            "id": token,
            "text": run.book.model.lm.piece(token),
            "log_probs": {name: finite(float(found.log_probs[name][token])) for name in names},
        }
        for token in every
    ]
    return json_response({"object": "next", "model": body.model, "predictors": names, "top": top, "data": data})


@router.post("/v1/attention", responses={200: {"model": responses.AttentionOut}})
async def attention(request: Request, body: AttentionBody) -> Response:
    """Where the graph network looks to predict the next token."""
    run, _ = await found_run(request, body, body.attach)
    ids = await _prompt(request, run, body.prompt)
    seen = await in_worker(request, lambda: run.book.attention(ids, only=body.only, exclude=body.exclude))
    lm = run.book.model.lm
    return json_response(
        {
            "object": "attention",
            "model": body.model,
            "neighbors": [_neighbour(one) for one in seen.neighbours],
            "by_neighbor": _plain(seen.by_neighbour()),
            "by_slot": _plain(seen.weights.mean(1)[:, : len(seen.neighbours)]),
            "by_context": _plain(seen.by_context()),
            "context": [{"id": token, "text": lm.piece(token)} for token in seen.context_ids],
        }
    )


def _plain(values: Any) -> Any:
    return np.nan_to_num(values).tolist()


async def _prompt(request: Request, run: Served, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        ids, _ = await run_in_threadpool(run.tokenize, prompt)
    else:
        run.check_ids(prompt, "prompt")
        ids = prompt
    desk_of(request).check_length(ids, "prompt")
    return ids


async def _run_and_predictors(request: Request, body: Predictors) -> tuple[Served, list[str] | None]:
    run, predictor = await found_run(request, body, body.attach)
    return run, body.predictors or (None if predictor is None else [predictor])


# -- documents and the report ----------------------------------------------------------------------------------


@router.get("/v1/documents", responses={200: {"model": responses.DocumentList}})
async def documents(
    request: Request,
    model: ModelName = None,
    search: Annotated[str, Query(max_length=LONGEST_NAME, description="Part of a name, upper or lower case.")] = "",
    limit: Annotated[int, Query(ge=1, le=MOST_DOCUMENTS)] = 100,
    offset: Annotated[int, Query(ge=0, le=2**53)] = 0,
) -> Response:
    """The documents of the store, in its order."""
    desk = desk_of(request)
    run, _ = desk.runs.find(model)
    wanted = search.casefold()
    found = [one for one in run.book.documents if wanted in one.name.casefold()]
    data = [asdict(one) for one in found[offset : offset + limit]]
    about = {"generation": run.book.generation, "changeable": bool(desk.keys) and run.book.run is not None}
    return json_response({"object": "list", "model": run.name, **about, "total": len(found), "data": data})


@router.get("/v1/documents/text", responses={200: {"model": responses.DocumentTextOut}})
async def document(
    request: Request, name: Annotated[str, Query(max_length=LONGEST_NAME)], model: ModelName = None
) -> Response:
    """One document: its text, and where its tokens begin."""
    run, _ = desk_of(request).runs.find(model)
    if name not in run.book:
        raise Problem(404, f"no document of {run.name} is named {name[:200]!r}", param="name", code="not_found")
    found = await run_in_threadpool(run.book.document, name)
    shown = {"object": "document", "model": run.name, "tokens": len(found.offsets) - 1, **asdict(found)}
    return json_response(shown)


@router.get("/v1/report")
async def report(request: Request, model: ModelName = None) -> Response:
    """The run's report, as report.json has it, and the history of its training."""
    return json_response(desk_of(request).runs.find(model)[0].report)


# -- tokens ----------------------------------------------------------------------------------------------------


@router.post("/tokenize", responses={200: {"model": responses.Tokens}})
async def tokenize(request: Request, body: TokenizeBody) -> Response:
    """The tokens of a text."""
    desk = desk_of(request)
    run, _ = desk.runs.find(body.model)
    ids, starts = await run_in_threadpool(run.tokenize, body.prompt)
    if body.add_special_tokens:
        ids, starts = [run.book.model.lm.start_token, *ids], [0, *starts]
    length = desk.limits.max_prompt + desk.limits.max_tokens
    return json_response({"tokens": ids, "count": len(ids), "max_model_len": length, "offsets": starts})


@router.post("/detokenize", responses={200: {"model": responses.Detokenized}})
async def detokenize(request: Request, body: DetokenizeBody) -> Response:
    """The text of some tokens."""
    run, _ = desk_of(request).runs.find(body.model)
    run.check_ids(body.tokens, "tokens")
    return json_response({"prompt": await run_in_threadpool(run.book.model.lm.detokenize, body.tokens)})


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request, model: ModelName = None) -> Response:
    """What a client must know of the tokenizer; `bos_token` is what the model reads before every text."""
    run, _ = desk_of(request).runs.find(model)
    lm = run.book.model.lm
    tokenizer = getattr(lm, "tokenizer", None)
    ends = sorted(lm.end_tokens)
    eos = getattr(tokenizer, "eos_token", None) or (lm.detokenize(ends[:1]) if ends else None)
    return json_response(
        {
            "tokenizer_class": type(tokenizer).__name__ if tokenizer is not None else type(lm).__name__,
            "bos_token": lm.detokenize([lm.start_token]) or None,
            "bos_token_id": lm.start_token,
            "eos_token": eos,
            "eos_token_ids": ends,
            "pad_token": getattr(tokenizer, "pad_token", None),
            "vocab_size": lm.vocab_size,
            "add_bos_token": False,
            "chat_template": getattr(tokenizer, "chat_template", None),
        }
    )
