"""The bodies of answers, for the OpenAPI schema."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorObject


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The request makes no sense, or goes beyond a limit."},
    401: {"model": ErrorBody, "description": "No API key, or a wrong one."},
    404: {"model": ErrorBody, "description": "No such model, document or path."},
    408: {"model": ErrorBody, "description": "The request did not arrive in time."},
    413: {"model": ErrorBody, "description": "The body is too large."},
    429: {"model": ErrorBody, "description": "Too many requests are waiting; see Retry-After."},
    503: {"model": ErrorBody, "description": "The server is shutting down, or the request took too long."},
}


class SourceOut(BaseModel):
    """A place in the store that voted for a token; `start` and `end` are characters of the document."""

    document: str
    start: int
    end: int
    before: str
    token: str
    after: str
    similarity: float
    share: float = Field(description="Its exact share in the token's probability, before temperature and filters.")
    position: int


class TokenOut(BaseModel):
    text: str
    id: int
    log_prob: float
    base_log_prob: float = Field(description="What the base model alone thinks of it.")
    book: float = Field(description="The share of all sources together; the rest is the model's own.")
    sources: list[SourceOut]


class SpanOut(BaseModel):
    """Tokens first..last of the text, which follow one passage of a document word for word."""

    text: str
    first: int
    last: int
    document: str
    start: int
    end: int
    share: float
    tokens: int
    characters: int


class Details(BaseModel):
    """What an open book adds, if `sources` is set. In a stream, spans come with the last chunk of a text."""

    tokens: list[TokenOut]
    spans: list[SpanOut] | None = None
    steps: int = Field(description="Steps so far; in a stream, up to this chunk. So are the counts below.")
    drafted: int
    accepted: int
    searches: int
    seconds: float


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Logprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int] = Field(description="Characters of the returned text.")


class Choice(BaseModel):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: str | None = Field(description="`stop` or `length`; null in a stream until the end.")
    gnnlm: Details | None = None


class Completion(BaseModel):
    """With `stream`, server-sent events of this form, without `usage` unless it is asked for."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None


class ChatMessage(BaseModel):
    role: str
    content: str
    refusal: str | None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage | None = None
    delta: dict[str, str] | None = None
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    gnnlm: Details | None = None


class Chat(BaseModel):
    """With `stream`, server-sent events with `delta` in place of `message`."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None


class ModelOut(BaseModel):
    id: str
    object: str
    created: int
    owned_by: str
    run: str
    predictor: str
    documents: int
    generation: int
    rows: int


class ModelList(BaseModel):
    object: str
    data: list[ModelOut]


class ScoredToken(BaseModel):
    text: str
    id: int
    start: int
    end: int
    log_probs: dict[str, float]
    top1: dict[str, bool] = Field(description="Whether it was the likeliest token.")


class ScoreOut(BaseModel):
    index: int
    tokens: list[ScoredToken]
    perplexity: dict[str, float | None]


class ScoreList(BaseModel):
    object: str
    model: str
    data: list[ScoreOut]
    usage: Usage


class NeighborOut(BaseModel):
    document: str
    similarity: float
    position: int
    start: int
    end: int
    before: str
    token: str
    after: str


class NeighborsOf(BaseModel):
    text: str
    id: int
    start: int
    end: int
    neighbors: list[NeighborOut]


class NeighborList(BaseModel):
    object: str
    model: str
    data: list[NeighborsOf]


class Candidate(BaseModel):
    id: int
    text: str
    log_probs: dict[str, float]


class NextOut(BaseModel):
    """Every token that is among the likeliest of some predictor, with its log-probability under all of them."""

    object: str
    model: str
    predictors: list[str]
    top: dict[str, list[int]] = Field(description="The ids of each predictor's likeliest tokens, likeliest first.")
    data: list[Candidate]


class ContextToken(BaseModel):
    id: int
    text: str


class AttentionOut(BaseModel):
    """Where the graph network looks to predict the next token. Attention is shown as attention, never as cause."""

    object: str
    model: str
    neighbors: list[NeighborOut]
    by_neighbor: list[list[float]] = Field(description="[layers][neighbours]: mean over heads; sums to one.")
    by_slot: list[list[list[float]]] = Field(description="[layers][neighbours][slots of a neighbour's window].")
    by_context: list[list[float]] = Field(description="[layers][tokens of `context`]: mean over heads; sums to one.")
    context: list[ContextToken] = Field(description="The last tokens, which the network also reads.")


class DocumentOut(BaseModel):
    name: str
    tokens: int
    tags: list[str]


class DocumentList(BaseModel):
    object: str
    model: str
    generation: int = Field(description="The generation of the store; 0 is the run as it was built.")
    changeable: bool = Field(description="Whether this server lets documents be added and removed.")
    total: int
    data: list[DocumentOut]


class ChangeOut(BaseModel):
    object: str
    model: str
    generation: int
    added: int
    removed: int
    rows: int = Field(description="The rows that can be found now.")
    seconds: float
    overlapping: list[str] = Field(description="Added documents that share text with the run's valid or test split.")


class GenerationOut(BaseModel):
    generation: int
    made: str
    by: str
    added: int
    removed: int
    documents: int
    rows: int
    segments: int


class HistoryOut(BaseModel):
    object: str
    model: str
    data: list[GenerationOut]


class DocumentTextOut(BaseModel):
    object: str
    model: str
    name: str
    tokens: int
    text: str
    offsets: list[int] = Field(description="Where each token begins, in characters, then where the last one ends.")


class Tokens(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int
    offsets: list[int]


class Detokenized(BaseModel):
    prompt: str


class State(BaseModel):
    status: str
