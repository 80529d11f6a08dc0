"""Errors in the form of OpenAI's API."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping

from fastapi import Response

LOWEST = -9999.0  # stands for minus infinity, which JSON does not have
FAILED = "the server failed; see its log"


class ApiError(Exception):
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
        self.status = status
        self.message = " ".join(message.split())
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> bytes:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        text = json.dumps({"error": error}, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace")  # half of a surrogate pair becomes JSON's own escape

    def response(self) -> Response:
        return Response(self.body, self.status, self.headers, "application/json")


def queue_full() -> ApiError:
    message = "too many requests are waiting; try again in a moment"
    return ApiError(429, message, code="queue_full", headers={"Retry-After": "2"})


def shutting_down() -> ApiError:
    message = "the server is shutting down; try again later"
    return ApiError(503, message, code="shutting_down", headers={"Retry-After": "10"})


def unknown_model(name: str, known: Iterable[str]) -> ApiError:
    message = f"no model named {name[:200]!r}; there are {', '.join(known)}"
    return ApiError(404, message, param="model", code="model_not_found")


def finite(log_prob: float) -> float:
    """Return a log-probability that JSON can hold.

    >>> finite(-1.5), finite(-math.inf)
    (-1.5, -9999.0)
    """
    return LOWEST if math.isnan(log_prob) else max(LOWEST, log_prob)
