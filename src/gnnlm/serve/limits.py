"""What a server allows, and who may use it."""

from __future__ import annotations

import hmac
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from gnnlm.errors import ConfigError

KEYS_VARIABLE = "GNNLM_API_KEYS"
SHORTEST_KEY = 8  # characters


@dataclass(frozen=True)
class Limits:
    """Bounds on what one request, and all requests together, may take."""

    batch: int = 16  # texts that are written at once
    queue: int = 128  # requests that may wait
    max_tokens: int = 2048  # that one text may ask for
    max_prompt: int = 8192  # tokens of one prompt or text
    max_attached: int = 16_384  # tokens of the documents that a request attaches
    max_texts: int = 128  # of one request: prompts times n or best_of
    max_seconds: float = 600.0  # for one request, waiting included
    max_body: int = 4 * 2**20  # bytes
    read_seconds: float = 20.0  # for a request's headers, and again for its body
    send_seconds: float = 30.0  # that a client may take to accept a piece of the answer
    connections: int = 1024  # open at once
    grace: float = 30.0  # seconds that running requests get when the server shuts down

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not 0 < value < float("inf"):
                raise ConfigError(f"{each.name}: expected a number above 0, got {value}")


@dataclass(frozen=True)
class Keys:
    """The API keys that are accepted; without any, everybody who reaches the server may use it."""

    keys: tuple[bytes, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.keys)

    def __repr__(self) -> str:
        return f"<{len(self.keys)} API keys>"

    def accept(self, authorization: str) -> bool:
        """Whether a header `Bearer KEY` has one of the keys; takes the same time whichever it is."""
        scheme, _, given = authorization.partition(" ")
        found = [hmac.compare_digest(key, given.strip().encode("latin-1", "replace")) for key in self.keys]
        return any(found) and scheme.lower() == "bearer"


def read_keys(file: Path | None) -> Keys:
    """Keys from a file, one a line (# begins a comment), and from the environment, separated by commas or spaces."""
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


def checked_keys(keys: Sequence[str]) -> Keys:
    """Keys that can be sent in a header and are not guessed at once."""
    for number, key in enumerate(keys, 1):
        if len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                f"API key {number}: expected at least {SHORTEST_KEY} ASCII characters without spaces; a good one is "
                "printed by: openssl rand -hex 24"
            )
    return Keys(tuple(key.encode() for key in keys))
