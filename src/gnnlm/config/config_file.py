"""Reading a config: a YAML file, `--set a.b=c` overrides, and errors that name the field.

An unknown key is refused with the nearest right name. Knows nothing of what the stages do with the values.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gnnlm.config.config_model import Config, field_names
from gnnlm.config.messages import expected, show
from gnnlm.config.paths import expand_run
from gnnlm.config.plain_yaml import dump_yaml, parse_yaml, read_yaml
from gnnlm.errors import ConfigError

MAX_COMPLAINTS = 5


def load_config(path: Path, overrides: tuple[str, ...] = ()) -> Config:
    """Read a YAML config (or the `config.yaml` of a run directory) and apply `a.b=value` overrides."""
    try:
        is_run = path.is_dir()
        file = path / "config.yaml" if is_run else path
        found = file.is_file()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; check the path") from error
    if not found:
        wanted = "a run directory with a config.yaml" if is_run else "a config file or a run directory"
        raise ConfigError(f"{path}: expected {wanted}, found none; check the path")
    values = read_yaml(file)
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected a mapping of fields, such as run: runs/mine (got {show(values)})")
    if is_run:
        values["run"] = str(path)  # a run that was moved keeps its identity
    expand_run(values, Path(str(values.get("run"))))
    for override in overrides:
        _override(values, override)
    return parse_config(values, f"{file} with --set" if overrides else str(file))


def parse_config(values: dict[str, Any], origin: str = "config") -> Config:
    """Validate plain values; an error names every wrong field and, for a typo, the nearest right name.

    >>> parse_config({"run": "runs/x", "gnn": {"layer": 2}})
    Traceback (most recent call last):
    ...
    gnnlm.errors.ConfigError: config: unknown key gnn.layer; did you mean gnn.layers?
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        found = error.errors(include_url=False)
        # a list whose items are wrong is also reported as too short: only the items matter
        wrong = {e["loc"][:length] for e in found for length in range(len(e["loc"]))}
        found = [e for e in found if not (e["type"] == "too_short" and e["loc"] in wrong)]
        complaints = [_complaint(e) for e in found[:MAX_COMPLAINTS]]
        if len(found) > MAX_COMPLAINTS:
            complaints.append(f"and {len(found) - MAX_COMPLAINTS} more")
        raise ConfigError(f"{origin}: {'; '.join(complaints)}") from error


def changed(config: Config, changes: Mapping[str, Any], origin: str = "config") -> Config:
    """Return the config with other values for some fields, named with dots, validated as a whole."""
    values = config.model_dump(mode="json")
    for field, value in changes.items():
        *sections, leaf = field.split(".")
        here = values
        for section in sections:
            here = here[section]
        here[leaf] = value
    return parse_config(values, origin)


def dump_config(config: Config) -> str:
    """Return the config as YAML, every field written out."""
    return dump_yaml(config.model_dump(mode="json"))


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set expects name=value, such as gnn.layers=2 (got {show(override)})")
    *sections, leaf = key.strip().split(".")
    here = values
    for section in sections:
        below = here.setdefault(section, {})
        if not isinstance(below, dict):
            raise ConfigError(f"--set {key}: {section} is not a section of fields (it is {show(below)})")
        here = below
    here[leaf] = parse_yaml(text, f"--set {key}", lines=False)


def _complaint(error: Any) -> str:
    """Word one mistake for a reader of YAML; Pydantic's messages are about Python types."""
    place, got = error["loc"], error["input"]
    if error["type"] == "missing" and isinstance(place[-1], int):
        place = place[:-1]  # a list of fixed length that is too short: `got` is the list
    name = ".".join(_printable(part) for part in place)
    if error["type"] in ("extra_forbidden", "invalid_key"):
        near = difflib.get_close_matches(name, field_names(), n=1, cutoff=0.5)
        return f"unknown key {name}" + (f"; did you mean {near[0]}?" if near else "; remove it")
    if error["type"] == "value_error":  # raised by a check of ours
        return f"{name}: {error['ctx']['error']}" if name else str(error["ctx"]["error"])
    wanted = expected(Config, place)
    if error["type"] == "missing" and place == error["loc"]:
        return f"{name} is missing: expected {wanted}"
    quotes = "; put it in quotes" if wanted.startswith("text") and isinstance(got, bool | int | float) else ""
    words = f"expected {wanted} (got {show(got)}){quotes}"
    return f"{name}: {words}" if name else words


def _printable(part: int | str) -> str:
    text = str(part)
    return text if text.isprintable() and len(text) <= 100 else show(text)
