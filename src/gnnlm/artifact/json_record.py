"""JSON records: what identifies a value, and a checksum that a record carries of itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """Return a value as it comes back from a JSON file.

    >>> plain({"a": (1, 2)})
    {'a': [1, 2]}
    """
    return json.loads(json.dumps(value))


def fingerprint(value: object) -> str:
    """Return sixteen hex digits that identify a JSON value.

    >>> fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    True
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with its checksum."""
    return {**record, "checksum": fingerprint(record)}


def unsealed(record: object) -> dict[str, Any] | None:
    """Return a record without its checksum; None if the checksum does not fit.

    >>> unsealed({"a": 1, "checksum": fingerprint({"a": 1})}), unsealed({"a": 2, "checksum": fingerprint({"a": 1})})
    ({'a': 1}, None)
    """
    if not isinstance(record, dict):
        return None
    rest = {name: value for name, value in record.items() if name != "checksum"}
    try:
        return rest if record.get("checksum") == fingerprint(rest) else None
    except UnicodeEncodeError:  # half a surrogate pair
        return None


def parse_json(text: bytes) -> Any:
    """Return the value of a JSON text; None if the text is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def read_json(file: Path) -> Any:
    """Return the value in a JSON file; None if the file is missing or no JSON."""
    try:
        return parse_json(file.read_bytes())
    except OSError:
        return None
