"""YAML for configs: plain values only, bounded in size, and every mistake named with its line.

Aliases, tags and repeated keys are refused, and a date is text. Events are read one at a time, so a file that is too
deep or too long is refused before it is built in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from gnnlm.errors import ConfigError

MAX_BYTES = 256 * 1024
MAX_DEPTH = 20
MAX_VALUES = 10_000
MAX_DIGITS = 400  # characters in a number
PLAIN = {f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float")}


class _Loader(yaml.SafeLoader):
    """Reads null, true, false and numbers; everything else without brackets is text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag in PLAIN]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_yaml(file: Path) -> Any:
    """Return the value that a YAML file holds."""
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; check the path and its permissions") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{file} is larger than {MAX_BYTES // 1024} KB; expected a config, which is a few kilobytes")
    try:
        return parse_yaml(data.decode("utf-8"), str(file))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not UTF-8 text (byte 0x{data[error.start]:02x} at offset {error.start}); save it as UTF-8"
        ) from error


def parse_yaml(text: str, origin: str, lines: bool = True) -> Any:
    """Return the value that a YAML text holds; `origin` says in messages where the text comes from, `lines` which line.

    >>> parse_yaml("gnn: {layers: 2, preset: paper}", "a.yaml")
    {'gnn': {'layers': 2, 'preset': 'paper'}}
    >>> parse_yaml("seed: 1\\nseed: 2", "a.yaml")
    Traceback (most recent call last):
    ...
    gnnlm.errors.ConfigError: a.yaml, line 2: seed is given twice (first on line 1); keep one of them
    """
    return _Parser(text, origin, lines).document()


def dump_yaml(value: Any) -> str:
    """Return a value as YAML that `parse_yaml` reads back."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Quotes the line breaks that only YAML knows; PyYAML would read them back as spaces."""


def _represent(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = '"' if any(character in text for character in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent)


def _joined(text: str) -> str:
    """Join the two halves as which JSON writes a character beyond U+FFFF."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


class _Parser:
    """Builds plain values from the events of one YAML document."""

    def __init__(self, text: str, origin: str, lines: bool) -> None:
        self._origin = origin
        self._lines = lines
        self._values = 0
        try:
            self._loader = _Loader(text)
        except yaml.reader.ReaderError as error:
            line = text[: error.position].count("\n")
            raise self._error(
                line, f"the character U+{ord(text[error.position]):04X} is not allowed in YAML; remove it"
            ) from error

    def document(self) -> Any:
        self._next()  # the stream starts
        if isinstance(self._next(), yaml.StreamEndEvent):
            return None
        value = self._value(self._next(), "", 0)
        self._next()  # the document ends
        end = self._next()
        if not isinstance(end, yaml.StreamEndEvent):
            raise self._error(end.start_mark.line, "a second document starts here (---); expected one")
        return value

    def _next(self) -> Any:
        try:
            return self._loader.get_event()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            words = ": ".join(part for part in (error.context, error.problem) if part)
            raise self._invalid(mark.line if mark else self._loader.line, words) from error
        except Exception as error:  # PyYAML lets some of Python's own errors through, of escapes and directives
            raise self._invalid(self._loader.line, "a character code or a directive that makes no sense") from error

    def _value(self, event: Any, name: str, depth: int) -> Any:
        line = event.start_mark.line
        self._values += 1
        if self._values > MAX_VALUES:
            raise self._error(line, f"more than {MAX_VALUES:,} values; a config has a few hundred")
        if depth > MAX_DEPTH:
            raise self._error(line, f"values are nested more than {MAX_DEPTH} deep; a config has 4 levels")
        if event.anchor is not None:
            raise self._error(line, "anchors and aliases (&name, *name) are not supported; write the value out, or "
                                    "put text that starts with & or * in quotes")  # fmt: skip
        if getattr(event, "tag", None) is not None:
            raise self._error(line, "tags such as !!int are not supported; write the plain value, or put text that "
                                    "starts with ! in quotes")  # fmt: skip
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(name, depth)
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(name, depth)
        return self._scalar(event)

    def _sequence(self, name: str, depth: int) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := self._next(), yaml.SequenceEndEvent):
            items.append(self._value(event, f"{name}.{len(items)}", depth + 1))
        return items

    def _mapping(self, name: str, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        places: dict[str, int] = {}
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            line = event.start_mark.line
            if not isinstance(event, yaml.ScalarEvent):
                raise self._error(line, "expected the name of a field before the colon, got a list or a mapping")
            self._value(event, name, depth)  # counted, and refused if it has a tag or an anchor
            key = _joined(event.value)
            place = f"{name}.{key}".lstrip(".")
            if key in places:
                first = f" (first on line {places[key] + 1})" if self._lines else ""
                raise self._error(line, f"{place[:200]} is given twice{first}; keep one of them")
            places[key] = line
            found[key] = self._value(self._next(), place, depth + 1)
        return found

    def _scalar(self, event: Any) -> Any:
        text: str = event.value
        tag = self._loader.resolve(yaml.ScalarNode, text, event.implicit)
        if tag not in PLAIN:
            return _joined(text)
        if len(text) > MAX_DIGITS:
            raise self._error(event.start_mark.line, f"a number of {len(text):,} characters; write a shorter one")
        try:
            return self._loader.construct_object(yaml.ScalarNode(tag, text))
        except (ValueError, OverflowError) as error:
            raise self._error(event.start_mark.line, f"{text!r} is not a number; put text in quotes") from error

    def _invalid(self, line: int, problem: str) -> ConfigError:
        words = " ".join(problem.split())[:200]
        return self._error(line, f"not valid YAML ({words}); check indentation, brackets and quotes there")

    def _error(self, line: int, words: str) -> ConfigError:
        place = f", line {line + 1}" if self._lines else ""
        return ConfigError(f"{self._origin}{place}: {words}")
