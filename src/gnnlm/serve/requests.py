"""The bodies of requests. A value that a field does not allow, or an unknown field, is answered with a 400."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from gnnlm.write.generate_options import OWN_PAST, GenerateOptions, TextOptions

MOST_NAMES = 256  # of documents in a filter
MOST_ATTACHED = 64  # documents of a request
MOST_STOPS = 16
LONGEST_STOP = 512  # characters
LONGEST_NAME = 1024
MOST_TOP = 20


def _prompt(value: Any) -> Any:
    """Check for a text, texts, token ids, or lists of token ids."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if all(type(one) is int for one in value) or all(isinstance(one, str) for one in value):
            return value
        if all(isinstance(one, list) and all(type(token) is int for token in one) for one in value):
            return value
    raise ValueError("expected a string, a list of strings, a list of token ids, or a list of lists of token ids")


def _one_prompt(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and all(type(token) is int for token in value)):
        return value
    raise ValueError("expected a string, or a list of token ids")


def _content(value: Any) -> Any:
    """Join parts of type text into one text."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        parts = [part for part in value if isinstance(part, dict) and part.keys() == {"type", "text"}]
        if len(parts) == len(value) and all(p["type"] == "text" and isinstance(p["text"], str) for p in parts):
            return "".join(part["text"] for part in parts)
    raise ValueError("expected a string, or a list of parts of type text; other parts are not supported")


def _names(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _stop_strings(value: Any) -> Any:
    value = _names(value)
    return tuple(value) if isinstance(value, list) else value


TokenId = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0})]  # the model's vocabulary is the bound
Prompt = Annotated[
    str
    | Annotated[list[str], Field(min_length=1)]
    | Annotated[list[TokenId], Field(min_length=1)]
    | Annotated[list[list[TokenId]], Field(min_length=1)],
    BeforeValidator(_prompt),
]
OnePrompt = Annotated[str | list[TokenId], BeforeValidator(_one_prompt)]
Content = Annotated[
    str,
    BeforeValidator(_content),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "additionalProperties": False,
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                    },
                },
            ]
        }
    ),
]
Name = Annotated[str, Field(max_length=LONGEST_NAME)]
NameList = Annotated[list[Name], BeforeValidator(_names), Field(min_length=1, max_length=MOST_NAMES)]
Stop = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)], ...],
    BeforeValidator(_stop_strings),
    Field(max_length=MOST_STOPS),
]


class Body(BaseModel):
    """Strict: no unknown fields, no numbers written as strings, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ModelBody(Body):
    model: str = Field(max_length=LONGEST_NAME, description="A run, or a run and a predictor: `mine`, `mine:knn`.")


class AttachedDocument(Body):
    name: str = Field(
        min_length=1, max_length=LONGEST_NAME, description="Cited, and named in filters, as `attached:` and this name."
    )
    text: str


class LookupFilter(Body):
    attach: Annotated[list[AttachedDocument], Field(min_length=1, max_length=MOST_ATTACHED)] | None = Field(
        None, description="Documents that this request looks up beside the store's; forgotten when it ends."
    )
    only: NameList | None = Field(None, description="Look up only documents with these names, globs or tags (`tag:T`).")
    exclude: NameList | None = Field(None, description="Do not look up documents with these names, globs or tags.")


class StreamOptions(Body):
    include_usage: bool = Field(False, description="Send one more chunk, with the number of tokens.")
    include_obfuscation: bool | None = Field(None, description="Accepted; nothing is obfuscated.")


def _nullable(schema: dict[str, Any]) -> None:
    """Let null stand for the default of every field, as it does in OpenAI's format."""
    for name, field in schema["properties"].items():
        if name not in schema["required"] and {"type": "null"} not in field.get("anyOf", []):
            about = {key: field.pop(key) for key in ("title", "description", "default") if key in field}
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}], **about}


class TextBody(ModelBody, LookupFilter, TextOptions):
    """What completions and chat completions share: the options of writing, and OpenAI's own fields."""

    model_config = ConfigDict(json_schema_extra=_nullable)

    temperature: float = Field(1.0, ge=0, le=100, description="0 takes the likeliest token each time.")
    n: int = Field(1, ge=1, le=128, description="Texts for each prompt.")
    stop: Stop = Field((), description="Texts that end the completion; they are not part of it.")
    stream: bool = Field(False, description="Send tokens as server-sent events.")
    stream_options: StreamOptions | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1, description="Equal seeds write equal texts.")
    frequency_penalty: float = Field(0.0, description="Not supported: only 0. See `repetition_penalty`.")
    presence_penalty: float = Field(0.0, description="Not supported: only 0. See `repetition_penalty`.")
    logit_bias: dict[str, float] = Field({}, description="Not supported: only an empty one.")
    user: str | None = Field(None, description="Accepted; not used, not logged.")
    sources: int | None = Field(
        None,
        ge=0,
        le=64,
        description="Show details of every token in `gnnlm`: its share of the book, and at most so many sources.",
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        required = {name for name, field in cls.model_fields.items() if field.is_required()}
        return {name: value for name, value in body.items() if value is not None or name in required}

    @field_validator("frequency_penalty", "presence_penalty")
    @classmethod
    def _no_penalty(cls, value: float) -> float:
        if value:
            raise ValueError("not supported; leave it at 0, or use repetition_penalty")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _no_bias(cls, value: dict[str, float]) -> dict[str, float]:
        if value:
            raise ValueError("not supported; leave it empty")
        return value

    @field_validator("stream_options")
    @classmethod
    def _only_streamed(cls, value: StreamOptions, info: ValidationInfo) -> StreamOptions:
        if not info.data.get("stream"):
            raise ValueError("only with stream set to true")
        return value

    def options(self, predictor: str | None) -> GenerateOptions:
        """Return the options of writing; without a seed, the seed is random."""
        seed = secrets.randbits(62) if self.seed is None else self.seed % 2**63
        values = self.model_dump(include=set(TextOptions.model_fields))
        return GenerateOptions.checked(predictor=predictor, seed=seed, **values)


class CompletionBody(TextBody):
    prompt: Prompt = Field(description="Texts or token ids to continue. An empty text starts one.")
    max_tokens: int = Field(16, ge=0, description="The most tokens to write; 0 only reads the prompt.")
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP, description="Log-probabilities of so many likely tokens.")
    echo: bool = Field(False, description="Put the prompt before the completion.")
    best_of: int | None = Field(None, ge=1, le=128, description="Write so many texts, and return the n likeliest.")
    suffix: str | None = Field(None, description="Not supported.")

    @field_validator("best_of")
    @classmethod
    def _at_least_n(cls, value: int, info: ValidationInfo) -> int:
        n = info.data.get("n", 1)
        if value < n:
            raise ValueError(f"expected at least n ({n}), got {value}")
        if value > n and info.data.get("stream"):
            raise ValueError("the best text is known only at the end; do not stream it")
        return value

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, value: str) -> str:
        raise ValueError("not supported: these models write from left to right")


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None


class ResponseFormat(Body):
    type: Literal["text"]


class ChatBody(TextBody):
    messages: list[Message] = Field(min_length=1, max_length=1024)
    max_tokens: int | None = Field(None, ge=1, description="The most tokens to write.")
    max_completion_tokens: int | None = Field(None, ge=1, description="The same, as newer clients call it.")
    logprobs: bool = Field(False, description="Log-probabilities of the written tokens.")
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP, description="And of so many likely ones.")
    response_format: ResponseFormat | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _with_logprobs(cls, value: int, info: ValidationInfo) -> int:
        if not info.data.get("logprobs"):
            raise ValueError("set logprobs to true as well")
        return value


class PredictorsBody(ModelBody, LookupFilter):
    predictors: list[str] | None = Field(
        None,
        min_length=1,
        max_length=8,
        description="base, knn, gnn, gnn_knn. Default: the model's, or all if it names none.",
    )


class ContextPair(Body):
    context: str
    continuation: str


class ScoreBody(PredictorsBody):
    input: str | ContextPair | Annotated[list[str | ContextPair], Field(min_length=1, max_length=256)] = Field(
        description="A text or several; a pair scores the continuation as it follows the context."
    )
    own_past: bool = Field(False, description=OWN_PAST)


class NeighborsBody(ModelBody, LookupFilter):
    input: str = Field(description="The text whose tokens are looked up.")
    k: int = Field(3, ge=1, le=1024, description="Neighbours of each token.")
    left: int = Field(8, ge=0, le=64, description="Tokens shown before a neighbour.")
    right: int = Field(8, ge=0, le=64, description="Tokens shown after it.")


class NextBody(PredictorsBody):
    prompt: OnePrompt = Field(description="The text or the token ids before the token.")
    top: int = Field(10, ge=1, le=100, description="Likeliest tokens of each predictor.")
    own_past: bool = Field(False, description=OWN_PAST)


class AttentionBody(ModelBody, LookupFilter):
    prompt: OnePrompt = Field(description="The text or the token ids before the token.")


class TokenizeBody(Body):
    model: str | None = Field(None, max_length=LONGEST_NAME, description="Default: the first run.")
    prompt: str
    add_special_tokens: bool = Field(False, description="Put the model's start token in front.")


class DetokenizeBody(Body):
    model: str | None = Field(None, max_length=LONGEST_NAME, description="Default: the first run.")
    tokens: list[TokenId] = Field(max_length=2**20)


class NewDocument(Body):
    name: str = Field(min_length=1, max_length=LONGEST_NAME, description="What it is cited by.")
    text: str = Field(min_length=1)


class DocumentsBody(ModelBody):
    documents: list[NewDocument] = Field(min_length=1, max_length=MOST_NAMES)
    tags: NameList | None = Field(None, description="Tags for all of them; filters take `tag:T`.")


class RemoveBody(ModelBody):
    names: NameList = Field(description="NameList of documents, globs, or tags (`tag:T`).")
