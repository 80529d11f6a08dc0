"""What can go wrong with a request, in the form that OpenAI's clients understand."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import Response

LOWEST = -9999.0  # stands for minus infinity, which JSON does not have


class Problem(Exception):
    """An answer that is an error: `{"error": {"message", "type", "param", "code"}}`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, " ".join(message.split()), param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return json_response(self.body, self.status, self.headers)


def busy() -> Problem:
    """The queue is full."""
    message = "too many requests are waiting; try again in a moment"
    return Problem(429, message, code="queue_full", headers={"Retry-After": "2"})


def leaving() -> Problem:
    """The server is shutting down."""
    message = "the server is shutting down; try another one, or again later"
    return Problem(503, message, code="shutting_down", headers={"Retry-After": "10"})


def unknown_model(name: str, known: Iterable[str]) -> Problem:
    message = f"no model named {name[:200]!r}; there are {', '.join(known)}"
    return Problem(404, message, param="model", code="model_not_found")


def encoded(value: Any) -> bytes:
    """JSON in UTF-8; what UTF-8 cannot hold (half of a surrogate pair in a document's name) is escaped.

    >>> encoded({"a": "\u00e9"}) == '{"a":"\u00e9"}'.encode(), encoded("\\ud800")
    (True, b'"\\\\ud800"')
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encoded(value), status, dict(headers or {}), "application/json")


def finite(log_prob: float) -> float:
    """A log-probability that JSON can hold.

    >>> finite(-1.5), finite(-math.inf)
    (-1.5, -9999.0)
    """
    return max(LOWEST, log_prob) if not math.isnan(log_prob) else LOWEST
