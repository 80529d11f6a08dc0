"""What a server allows, and who may use it."""

from __future__ import annotations

import hmac
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from gnnlm.errors import ConfigError

KEYS_VARIABLE = "GNNLM_API_KEYS"
SHORTEST_KEY = 8  # characters


class Limits(BaseModel):
    """Bounds on what one request, and all requests together, may take; those with a description are options."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    batch: int = Field(16, description="Texts that are written at once.")
    queue: int = Field(128, description="Requests that may wait; more get a 429.")
    max_tokens: int = Field(2048, description="The most tokens of a text.")
    max_prompt: int = Field(8192, description="The most tokens of a prompt.")
    max_attached: int = Field(16_384, description="The most tokens of the documents that a request attaches.")
    max_texts: int = Field(128, description="The most texts of a request: prompts times n.")
    max_seconds: float = Field(600.0, description="The most time of a request, with the time that it waits.")
    max_body: int = Field(4 * 2**20, description="The most bytes of a request.")
    grace: float = Field(30.0, description="Seconds that running requests get when the server is told to stop.")
    read_seconds: float = 20.0  # for a request's headers, and again for its body
    send_seconds: float = 30.0  # that a client may take to accept a piece of the answer
    connections: int = 1024  # open at once

    @field_validator("*")
    @classmethod
    def _check(cls, value: float, info: ValidationInfo) -> float:
        if not 0 < value < math.inf:
            raise ConfigError(f"{info.field_name}: expected a number above 0, got {value}")
        return value


LIMIT_OPTIONS = [name for name, field in Limits.model_fields.items() if field.description]


@dataclass(frozen=True)
class ApiKeys:
    """The API keys that are accepted; without any, everybody who reaches the server may use it."""

    keys: tuple[bytes, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.keys)

    def __repr__(self) -> str:
        return f"<{len(self.keys)} API keys>"

    def accept(self, authorization: str) -> bool:
        """Whether a header `Bearer KEY` has one of the keys; all keys are compared, in constant time."""
        scheme, _, given = authorization.partition(" ")
        found = [hmac.compare_digest(key, given.strip().encode("latin-1", "replace")) for key in self.keys]
        return any(found) and scheme.lower() == "bearer"


def read_keys(file: Path | None) -> ApiKeys:
    """ApiKeys from a file, one a line (# begins a comment), and from the environment, separated by commas or spaces."""
    found: list[str] = []
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise ConfigError(f"--api-keys {file}: cannot be read ({why}); name a text file, one key a line") from error
        found = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
        if not found:
            raise ConfigError(f"--api-keys {file}: no keys in it; write one key a line")
    return checked_keys([*found, *os.environ.get(KEYS_VARIABLE, "").replace(",", " ").split()])


def checked_keys(keys: Sequence[str]) -> ApiKeys:
    """ApiKeys that can be sent in a header and are not guessed at once."""
    for number, key in enumerate(keys, 1):
        if len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                f"API key {number}: expected at least {SHORTEST_KEY} ASCII characters without spaces; a good one is "
                "printed by: openssl rand -hex 24"
            )
    return ApiKeys(tuple(key.encode() for key in keys))
