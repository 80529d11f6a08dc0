"""Reading a config: a YAML file, `--set a.b=c` overrides, and complaints that name the field.

An unknown key is refused with the nearest right name. Knows nothing of what the stages do with the values.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from gnnlm.config.paths import expand_run
from gnnlm.config.schema import Config, field_names
from gnnlm.errors import ConfigError


def load_config(path: Path, overrides: tuple[str, ...] = ()) -> Config:
    """Read a YAML config (or the `config.yaml` of a run directory) and apply `a.b=value` overrides."""
    file = path / "config.yaml" if path.is_dir() else path
    if not file.is_file():
        expected = "a run directory with a config.yaml" if path.is_dir() else "a config file or a run directory"
        raise ConfigError(f"{path}: expected {expected}, found none")
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid YAML: {_one_line(error)}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected a mapping of fields, got {type(values).__name__}")
    if path.is_dir():
        values["run"] = str(path)  # a run that was moved is still itself
    expand_run(values, Path(str(values.get("run"))))
    for override in overrides:
        _override(values, override)
    return parse_config(values, f"{file} with --set" if overrides else str(file))


def parse_config(values: dict[str, Any], origin: str = "config") -> Config:
    """Validate plain values; every complaint names the field and, for a typo, the nearest right name.

    >>> parse_config({"run": "runs/x", "gnn": {"layer": 2}})
    Traceback (most recent call last):
    ...
    gnnlm.errors.ConfigError: config: unknown key gnn.layer; did you mean gnn.layers?
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        found = error.errors()
        # a list whose items are wrong is also reported as too short: only the items matter
        nested = {e["loc"][: len(e["loc"]) - 2] for e in found if len(e["loc"]) > 2}
        found = [e for e in found if not (e["type"] == "too_short" and e["loc"] in nested)]
        raise ConfigError(f"{origin}: {'; '.join(_complaint(e) for e in found)}") from error


def dump_config(config: Config) -> str:
    """The config as YAML, every field written out."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set expects name=value, such as gnn.layers=2 (got {override!r})")
    *sections, leaf = key.strip().split(".")
    here = values
    for section in sections:
        below = here.setdefault(section, {})
        if not isinstance(below, dict):
            raise ConfigError(f"--set {key}: {section} is a value, not a section")
        here = below
    try:
        here[leaf] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {key}: {text!r} is not a YAML value: {_one_line(error)}") from error


def _complaint(error: Any) -> str:
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, field_names(), n=1, cutoff=0.5)
        return f"unknown key {name}" + (f"; did you mean {near[0]}?" if near else "")
    if error["type"] in ("model_type", "model_attributes_type"):
        return f"{name}: expected a mapping of fields (got {error['input']!r})"
    message = error["msg"].removeprefix("Value error, ")
    got = "" if error["type"] in ("missing", "value_error") else f" (got {error['input']!r})"
    return f"{name}: {message}{got}" if name else message + got


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
