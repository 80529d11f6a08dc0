"""What a config field expects and what was given, worded from the types and limits of the fields.

Knows nothing of any particular field.
"""

from __future__ import annotations

import math
import reprlib
import types
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

SINGULAR = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
PLURAL = {int: "whole numbers", float: "numbers", str: "texts", bool: "values of true or false"}
COUNTS = {1: "one", 2: "two", 3: "three"}
MAX_INT_BITS = 1024  # Python does not print an integer of more than 4,300 digits


class _Shown(reprlib.Repr):
    """Shortens values, and writes them as YAML does."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 80
        self.maxlevel = self.maxdict = 4

    def repr_NoneType(self, value: None, level: int) -> str:
        return "null"

    def repr_bool(self, value: bool, level: int) -> str:
        return str(value).lower()

    def repr_int(self, value: int, level: int) -> str:
        if value.bit_length() <= MAX_INT_BITS:
            return super().repr_int(value, level)
        return f"a number of about {int(value.bit_length() * math.log10(2)):,} digits"


def show(value: object) -> str:
    """Return a value as a message shows it.

    >>> show(None), show("x"), show([True, 10**5000])
    ('null', "'x'", '[true, a number of about 5,000 digits]')
    """
    return _Shown().repr(value)


def expected(model: type[BaseModel], place: tuple[int | str, ...]) -> str:
    """Describe what the field at a place expects.

    >>> from gnnlm.config import Config
    >>> expected(Config, ("train", "betas"))
    'a list of two numbers'
    >>> expected(Config, ("corpus", "valid_share"))
    'a number above 0 and below 1'
    """
    annotation: Any = model
    limits: list[Any] = []
    for part in place:
        annotation = _without_null(annotation)
        if isinstance(part, int):
            items = get_args(annotation)
            annotation, limits = _unpacked(items[0 if items[-1] is Ellipsis else part])
        else:
            field = annotation.model_fields[part]
            annotation, limits = field.annotation, field.metadata
    plain = _without_null(annotation)
    return _describe(plain, limits) + ("" if plain is annotation else ", or null")


def _describe(annotation: Any, limits: Iterable[Any]) -> str:
    if get_origin(annotation) is Literal:
        *others, last = (str(choice) for choice in get_args(annotation))
        return f"{', '.join(others)} or {last}" if others else last
    if get_origin(annotation) is tuple:
        return _describe_list(get_args(annotation), limits)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a mapping of fields"
    return f"{SINGULAR[annotation]} {_range(limits)}".rstrip()


def _describe_list(items: tuple[Any, ...], limits: Iterable[Any]) -> str:
    item, each = _unpacked(items[0])
    if isinstance(item, type) and issubclass(item, BaseModel):
        what = f"mappings of {' and '.join(item.model_fields)}"
    else:
        what = PLURAL[item]
    if items[-1] is not Ellipsis:
        count = COUNTS[len(items)] + " "
    else:
        least, most = _limit(limits, "min_length"), _limit(limits, "max_length")
        count = f"{least} to {most:,} " if least is not None and most is not None else ""
    spread = _range(each) if items[-1] is Ellipsis else ""
    return f"a list of {count}{what}" + (f", each {spread}" if spread else "")


def _range(limits: Iterable[Any]) -> str:
    limits = list(limits)
    low, above, high, below = (_limit(limits, name) for name in ("ge", "gt", "le", "lt"))
    if low is not None and high is not None:
        return f"from {_number(low)} to {_number(high)}"
    words = {"at least": low, "above": above, "at most": high, "below": below}
    text = " and ".join(f"{word} {_number(limit)}" for word, limit in words.items() if limit is not None)
    return f"of {text}" if text.startswith("at") else text


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def _limit(limits: Iterable[Any], name: str) -> Any:
    return next((getattr(limit, name) for limit in limits if hasattr(limit, name)), None)


def _unpacked(annotation: Any) -> tuple[Any, list[Any]]:
    """Return the type and the limits of a list's items."""
    if get_origin(annotation) is not Annotated:
        return annotation, []
    kind, field = get_args(annotation)
    return kind, field.metadata


def _without_null(annotation: Any) -> Any:
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation
    (kind,) = (part for part in get_args(annotation) if part is not type(None))
    return kind
