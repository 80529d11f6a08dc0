"""The bodies of responses. `/openapi.json` is generated from these models.

Fields that are not set are left out of completions and chat completions: `gnnlm`, `usage`, `spans`, and what a chunk of
a stream does not repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal

from pydantic import BaseModel, Field

from gnnlm.answers import Neighbour, StoredDocument
from gnnlm.write.written_text import Span, Token


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorObject


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The request is not valid, or exceeds a limit."},
    401: {"model": ErrorBody, "description": "The API key is missing or wrong."},
    404: {"model": ErrorBody, "description": "There is no such model, document or path."},
    408: {"model": ErrorBody, "description": "The request did not arrive in time."},
    413: {"model": ErrorBody, "description": "The body is too large."},
    429: {"model": ErrorBody, "description": "Too many requests are waiting; see Retry-After."},
    503: {"model": ErrorBody, "description": "The server is shutting down, or the request took too long."},
}


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int = 0) -> Usage:
        total = prompt_tokens + completion_tokens
        return cls(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, total_tokens=total)


# -- completions and chat completions --------------------------------------------------------------------------


class CopiedSpan(BaseModel):
    """Tokens `first` to `last` of the text, which follow one passage of a document word for word.

    `start` and `end` are characters of the document. `share` is the mean share of the passage in these tokens.
    """

    text: str
    first: int
    last: int
    document: str
    start: int
    end: int
    share: float
    tokens: int
    characters: int

    @classmethod
    def of(cls, span: Span) -> CopiedSpan:
        return cls(**asdict(span), tokens=span.tokens, characters=span.end - span.start)


class OpenBookDetails(BaseModel):
    """What an open book adds to a choice if `sources` is set. In a stream, spans come with the last chunk of a text."""

    tokens: Sequence[Token]
    steps: int = Field(description="Steps so far; in a stream, up to this chunk. The same holds for the counts below.")
    drafted: int
    accepted: int
    searches: int
    seconds: float
    spans: list[CopiedSpan] | None = None


class CompletionLogprobs(BaseModel):
    """Lists with one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int] = Field(description="Where each token begins, in characters of the returned text.")


class CompletionChoice(BaseModel):
    index: int
    finish_reason: str | None = Field(description="`stop` or `length`; null in a stream until the end.")
    logprobs: CompletionLogprobs | None
    text: str
    gnnlm: OpenBookDetails | None = None


class Completion(BaseModel):
    """With `stream`, server-sent events of this form, without `usage` unless it is asked for."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ChatMessage(BaseModel):
    role: str
    content: str
    refusal: str | None


class ChatDelta(BaseModel):
    """What a chunk of a stream adds to a message."""

    role: str | None = None
    content: str | None = None


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]
    refusal: None = Field(description="Always null.")


class ChatChoice(BaseModel):
    index: int
    finish_reason: str | None = Field(description="`stop` or `length`; null in a stream until the end.")
    logprobs: ChatLogprobs | None
    message: ChatMessage | None = None
    delta: ChatDelta | None = None
    gnnlm: OpenBookDetails | None = None


class ChatCompletion(BaseModel):
    """With `stream`, server-sent events with `delta` in place of `message`."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None


# -- models, scores, lookups -----------------------------------------------------------------------------------


class ModelInfo(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["gnnlm"] = "gnnlm"
    run: str
    predictor: str
    documents: int
    generation: int
    rows: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelInfo]


class TokenScore(BaseModel):
    text: str
    id: int
    start: int
    end: int
    log_probs: dict[str, float]
    top1: dict[str, bool] = Field(description="Whether the token was the likeliest one.")


class TextScore(BaseModel):
    object: Literal["score"] = "score"
    index: int
    tokens: list[TokenScore]
    perplexity: dict[str, float | None]


class ScoreList(BaseModel):
    object: Literal["list"] = "list"
    model: str
    data: list[TextScore]
    usage: Usage


class TokenNeighbors(BaseModel):
    text: str
    id: int
    start: int
    end: int
    neighbors: list[Neighbour]


class NeighborList(BaseModel):
    object: Literal["list"] = "list"
    model: str
    data: list[TokenNeighbors]


class NextToken(BaseModel):
    id: int
    text: str
    log_probs: dict[str, float]


class NextTokenList(BaseModel):
    """Every token that is among the likeliest of some predictor, with its log-probability under all of them."""

    object: Literal["next"] = "next"
    model: str
    predictors: list[str]
    top: dict[str, list[int]] = Field(description="The ids of each predictor's likeliest tokens, likeliest first.")
    data: list[NextToken]


class ContextToken(BaseModel):
    id: int
    text: str


class AttentionWeights(BaseModel):
    """Where the graph network looks to predict the next token. Attention is not a cause of the prediction."""

    object: Literal["attention"] = "attention"
    model: str
    neighbors: list[Neighbour]
    by_neighbor: list[list[float]] = Field(description="[layers][neighbours]: mean over heads; sums to one.")
    by_slot: list[list[list[float]]] = Field(description="[layers][neighbours][slots of a neighbour's window].")
    by_context: list[list[float]] = Field(description="[layers][tokens of `context`]: mean over heads; sums to one.")
    context: list[ContextToken] = Field(description="The last tokens of the text, which the network also reads.")


# -- documents -------------------------------------------------------------------------------------------------


class DocumentList(BaseModel):
    object: Literal["list"] = "list"
    model: str
    generation: int = Field(description="The generation of the store; 0 is the run as it was built.")
    changeable: bool = Field(description="Whether documents can be added and removed on this server.")
    total: int
    data: list[StoredDocument]


class DocumentBody(BaseModel):
    object: Literal["document"] = "document"
    model: str
    tokens: int
    name: str
    text: str
    offsets: list[int] = Field(description="Where each token begins, in characters, then where the last one ends.")


class StoreChange(BaseModel):
    object: Literal["change"] = "change"
    model: str
    generation: int
    added: int
    removed: int
    rows: int = Field(description="The rows that can be found now.")
    seconds: float
    overlapping: list[str] = Field(description="Added documents that share text with the run's valid or test split.")


class GenerationSummary(BaseModel):
    generation: int
    made: str
    by: str
    added: int
    removed: int
    documents: int
    rows: int
    segments: int


class GenerationList(BaseModel):
    object: Literal["list"] = "list"
    model: str
    data: list[GenerationSummary]


# -- tokens and state ------------------------------------------------------------------------------------------


class TokenIds(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int
    offsets: list[int]


class DetokenizedText(BaseModel):
    prompt: str


class TokenizerInfo(BaseModel):
    tokenizer_class: str
    bos_token: str | None = Field(description="What the model reads before every text.")
    bos_token_id: int
    eos_token: str | None
    eos_token_ids: list[int]
    pad_token: str | None
    vocab_size: int
    add_bos_token: bool
    chat_template: str | None


class ServerState(BaseModel):
    status: str
