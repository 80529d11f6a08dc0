"""Endpoints that do not write: models, scores, neighbours, next tokens, attention, documents, the report, tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool

from gnnlm.answers import Neighbour, Scores
from gnnlm.serve.api_errors import ApiError, finite, unknown_model
from gnnlm.serve.context import context_of, find_run, in_worker
from gnnlm.serve.requests import (
    LONGEST_NAME,
    AttentionBody,
    ContextPair,
    DetokenizeBody,
    NeighborsBody,
    NextBody,
    PredictorsBody,
    ScoreBody,
    TokenizeBody,
)
from gnnlm.serve.responses import (
    ERRORS,
    AttentionWeights,
    ContextToken,
    DetokenizedText,
    DocumentBody,
    DocumentList,
    ModelInfo,
    ModelList,
    NeighborList,
    NextToken,
    NextTokenList,
    ScoreList,
    TextScore,
    TokenIds,
    TokenizerInfo,
    TokenNeighbors,
    TokenScore,
    Usage,
)
from gnnlm.serve.runs import ServedRun

router = APIRouter(responses=ERRORS)
MOST_DOCUMENTS = 1000  # of one answer
MOST_NEIGHBORS = 64 * 1024  # of one answer
ModelName = Annotated[str | None, Query(max_length=LONGEST_NAME, description="Default: the first run.")]


# -- models ----------------------------------------------------------------------------------------------------


@router.get("/v1/models")
async def models(request: Request) -> ModelList:
    """List the models: every run, and every predictor of every run."""
    return ModelList(data=[_model(run, name) for run in context_of(request).runs for name in run.models])


@router.get("/v1/models/{model:path}")
async def one_model(request: Request, model: str) -> ModelInfo:
    """Describe one model."""
    runs = context_of(request).runs
    if model not in runs.models:
        raise unknown_model(model, runs.models)
    return _model(runs.find(model)[0], model)


def _model(run: ServedRun, name: str) -> ModelInfo:
    return ModelInfo(
        id=name,
        created=run.opened,
        run=run.name,
        predictor=run.book.predictors[-1] if name == run.name else name.rpartition(":")[2],
        documents=len(run.book.model.store.live),
        generation=run.book.generation,
        rows=len(run.book.model.index),
    )


# -- scores, neighbours, next tokens, attention ----------------------------------------------------------------


@router.post("/v1/score")
async def score(request: Request, body: ScoreBody) -> ScoreList:
    """Return the log-probability of every token of a text, under each predictor."""
    context = context_of(request)
    run, predictors = await _run_and_predictors(request, body)
    inputs = body.input if isinstance(body.input, list) else [body.input]
    texts = [(one.context, one.continuation) if isinstance(one, ContextPair) else one for one in inputs]
    for text in texts:
        ids, _ = await run_in_threadpool(run.tokenize, text if isinstance(text, str) else "".join(text))
        context.check_length(ids, "input")
    options = {"predictors": predictors, "only": body.only, "exclude": body.exclude, "own_past": body.own_past}

    def scored(text: str | tuple[str, str]) -> Scores:
        return run.book.score(text, **options)  # type: ignore[arg-type]

    found = [await in_worker(request, lambda text=text: scored(text)) for text in texts]  # type: ignore[misc]
    return ScoreList(
        model=body.model,
        data=[_text_score(number, scores) for number, scores in enumerate(found)],
        usage=Usage.of(sum(len(scores) for scores in found)),
    )


def _text_score(number: int, scores: Scores) -> TextScore:
    log_probs = {name: [finite(value) for value in values.tolist()] for name, values in scores.log_probs.items()}
    top1 = {name: values.tolist() for name, values in scores.top1.items()}
    perplexities = {name: scores.perplexity(name) for name in scores.log_probs}
    tokens = [
        TokenScore(
            text=text,
            id=token,
            start=start,
            end=end,
            log_probs={name: values[place] for name, values in log_probs.items()},
            top1={name: values[place] for name, values in top1.items()},
        )
        for place, (text, token, (start, end)) in enumerate(zip(scores.tokens, scores.ids, scores.offsets, strict=True))
    ]
    shown = {name: value if math.isfinite(value) else None for name, value in perplexities.items()}
    return TextScore(index=number, tokens=tokens, perplexity=shown)


@router.post("/v1/neighbors")
async def neighbors(request: Request, body: NeighborsBody) -> NeighborList:
    """For every token of a text, return the places in the store that are looked up to predict it."""
    run, _ = await find_run(request, body, body.attach)
    ids, starts = await run_in_threadpool(run.tokenize, body.input)
    context_of(request).check_length(ids, "input")
    if len(ids) * body.k > MOST_NEIGHBORS:
        message = f"k: at most {MOST_NEIGHBORS:,} neighbours in all, got {len(ids)} tokens times {body.k}"
        raise ApiError(400, message, param="k")
    found = await in_worker(
        request,
        lambda: run.book.neighbors(
            body.input, body.k, only=body.only, exclude=body.exclude, left=body.left, right=body.right
        ),
    )
    ends = [*starts[1:], len(body.input)]
    data = [
        TokenNeighbors(text=body.input[start:end], id=token, start=start, end=end, neighbors=_shown(line))
        for token, start, end, line in zip(ids, starts, ends, found, strict=True)
    ]
    return NeighborList(model=body.model, data=data)


def _shown(neighbours: Sequence[Neighbour]) -> list[Neighbour]:
    return [replace(one, similarity=finite(one.similarity)) for one in neighbours]


@router.post("/v1/next")
async def next_token(request: Request, body: NextBody) -> NextTokenList:
    """Return the likeliest next tokens under each predictor, side by side."""
    run, predictors = await _run_and_predictors(request, body)
    ids = await _prompt_ids(request, run, body.prompt)
    found = await in_worker(
        request,
        lambda: run.book.next(
            ids, predictors=predictors, top=1, only=body.only, exclude=body.exclude, own_past=body.own_past
        ),
    )
    names = list(found.log_probs)
    top = {name: np.argsort(-values, kind="stable")[: body.top].tolist() for name, values in found.log_probs.items()}
    every = dict.fromkeys(token for name in reversed(names) for token in top[name])
    data = [
        NextToken(
            id=token,
            text=run.book.model.lm.piece(token),
            log_probs={name: finite(float(found.log_probs[name][token])) for name in names},
        )
        for token in every
    ]
    return NextTokenList(model=body.model, predictors=names, top=top, data=data)


@router.post("/v1/attention")
async def attention(request: Request, body: AttentionBody) -> AttentionWeights:
    """Return the graph network's attention when it predicts the next token."""
    run, _ = await find_run(request, body, body.attach)
    ids = await _prompt_ids(request, run, body.prompt)
    seen = await in_worker(request, lambda: run.book.attention(ids, only=body.only, exclude=body.exclude))
    lm = run.book.model.lm
    return AttentionWeights(
        model=body.model,
        neighbors=_shown(seen.neighbours),
        by_neighbor=_nested(seen.by_neighbour()),
        by_slot=_nested(seen.weights.mean(1)[:, : len(seen.neighbours)]),
        by_context=_nested(seen.by_context()),
        context=[ContextToken(id=token, text=lm.piece(token)) for token in seen.context_ids],
    )


def _nested(values: npt.NDArray[np.float32]) -> Any:
    """An array as nested lists, with 0 in place of NaN."""
    return np.nan_to_num(values).tolist()


async def _prompt_ids(request: Request, run: ServedRun, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        ids, _ = await run_in_threadpool(run.tokenize, prompt)
    else:
        run.check_ids(prompt, "prompt")
        ids = prompt
    context_of(request).check_length(ids, "prompt")
    return ids


async def _run_and_predictors(request: Request, body: PredictorsBody) -> tuple[ServedRun, list[str] | None]:
    run, predictor = await find_run(request, body, body.attach)
    return run, body.predictors or (None if predictor is None else [predictor])


# -- documents and the report ----------------------------------------------------------------------------------


@router.get("/v1/documents")
async def documents(
    request: Request,
    model: ModelName = None,
    search: Annotated[str, Query(max_length=LONGEST_NAME, description="Part of a name, upper or lower case.")] = "",
    limit: Annotated[int, Query(ge=1, le=MOST_DOCUMENTS)] = 100,
    offset: Annotated[int, Query(ge=0, le=2**53)] = 0,
) -> DocumentList:
    """List the documents of the store, in its order."""
    context = context_of(request)
    run, _ = context.runs.find(model)
    wanted = search.casefold()
    found = [one for one in run.book.documents if wanted in one.name.casefold()]
    return DocumentList(
        model=run.name,
        generation=run.book.generation,
        changeable=bool(context.keys) and run.book.run is not None,
        total=len(found),
        data=found[offset : offset + limit],
    )


@router.get("/v1/documents/text")
async def document(
    request: Request, name: Annotated[str, Query(max_length=LONGEST_NAME)], model: ModelName = None
) -> DocumentBody:
    """Return the text of a document, and where its tokens begin."""
    run, _ = context_of(request).runs.find(model)
    if name not in run.book:
        raise ApiError(404, f"no document of {run.name} is named {name[:200]!r}", param="name", code="not_found")
    found = await run_in_threadpool(run.book.document, name)
    return DocumentBody(model=run.name, tokens=len(found.offsets) - 1, **asdict(found))


@router.get("/v1/report")
async def report(request: Request, model: ModelName = None) -> dict[str, Any]:
    """Return the run's report, as report.json has it, and the history of its training."""
    run, _ = context_of(request).runs.find(model)
    return run.report


# -- tokens ----------------------------------------------------------------------------------------------------


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeBody) -> TokenIds:
    """Return the tokens of a text."""
    context = context_of(request)
    run, _ = context.runs.find(body.model)
    ids, starts = await run_in_threadpool(run.tokenize, body.prompt)
    if body.add_special_tokens:
        ids = [run.book.model.lm.start_token, *ids]
        starts = [0, *starts]
    length = context.limits.max_prompt + context.limits.max_tokens
    return TokenIds(tokens=ids, count=len(ids), max_model_len=length, offsets=starts)


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeBody) -> DetokenizedText:
    """Return the text of some tokens."""
    run, _ = context_of(request).runs.find(body.model)
    run.check_ids(body.tokens, "tokens")
    return DetokenizedText(prompt=await run_in_threadpool(run.book.model.lm.detokenize, body.tokens))


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request, model: ModelName = None) -> TokenizerInfo:
    """Describe the tokenizer to clients that tokenize."""
    run, _ = context_of(request).runs.find(model)
    lm = run.book.model.lm
    tokenizer = getattr(lm, "tokenizer", None)
    ends = sorted(lm.end_tokens)
    return TokenizerInfo(
        tokenizer_class=type(lm if tokenizer is None else tokenizer).__name__,
        bos_token=lm.detokenize([lm.start_token]) or None,
        bos_token_id=lm.start_token,
        eos_token=getattr(tokenizer, "eos_token", None) or (lm.detokenize(ends[:1]) if ends else None),
        eos_token_ids=ends,
        pad_token=getattr(tokenizer, "pad_token", None),
        vocab_size=lm.vocab_size,
        add_bos_token=False,
        chat_template=getattr(tokenizer, "chat_template", None),
    )
