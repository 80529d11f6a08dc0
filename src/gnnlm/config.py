"""The one config file: every field typed, documented, checked and overridable.

Knows nothing of what the stages do with the values. A config is a YAML file; `--set a.b=c`
overrides a field with a YAML value; an unknown key is refused with the nearest right name.
"""

from __future__ import annotations

import difflib
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from gnnlm.errors import ConfigError
from gnnlm.sections import (
    SCRATCH,
    CacheConfig,
    CodecConfig,
    CorpusConfig,
    EvalConfig,
    GnnConfig,
    IndexConfig,
    Phase,
    SearchConfig,
    Section,
    StoreConfig,
    TrainConfig,
    TuneConfig,
)
from gnnlm.sections_lm import ArchitectureConfig, FinetuneConfig, FitConfig, LMConfig, LMTrainConfig

__all__ = [
    "SCRATCH",
    "ArchitectureConfig",
    "CacheConfig",
    "CodecConfig",
    "Config",
    "CorpusConfig",
    "EvalConfig",
    "FinetuneConfig",
    "FitConfig",
    "GnnConfig",
    "IndexConfig",
    "LMConfig",
    "LMTrainConfig",
    "Phase",
    "SearchConfig",
    "Section",
    "StoreConfig",
    "TrainConfig",
    "TuneConfig",
    "dump_config",
    "field_names",
    "load_config",
    "parse_config",
]


class Config(Section):
    """One experiment: a frozen model, a corpus, and a run directory that holds every artifact."""

    run: str = Field(description="The run directory.")
    seed: int = Field(0, ge=0, description="Seed of splits, data order, initial weights and dropout.")
    corpus: CorpusConfig = Field(CorpusConfig(), description="Where the text comes from.")
    lm: LMConfig = Field(LMConfig(), description="The frozen base model.")
    store: StoreConfig = Field(StoreConfig(), description="The states on disk.")
    codec: CodecConfig = Field(CodecConfig(), description="The states that neighbour nodes have.")
    index: IndexConfig = Field(IndexConfig(), description="The FAISS index over the store.")
    search: SearchConfig = Field(SearchConfig(), description="The neighbour tables.")
    gnn: GnnConfig = Field(GnnConfig(), description="The graph network.")
    train: TrainConfig = Field(TrainConfig(), description="Training the graph network.")
    cache: CacheConfig = Field(CacheConfig(), description="Neighbour states of the trained network, kept.")
    tune: TuneConfig = Field(TuneConfig(), description="k, T and lambda, chosen on valid.")
    eval: EvalConfig = Field(EvalConfig(), description="The report on test.")

    @model_validator(mode="after")
    def _curriculum_within_graph(self) -> Config:
        largest = max(phase.k for phase in self.train.curriculum)
        if largest > self.search.graph_k:
            raise ValueError(
                f"train.curriculum asks for k = {largest}, search.graph_k gives only {self.search.graph_k} neighbours; "
                "raise search.graph_k or lower the curriculum's k"
            )
        if (self.eval.graph_k or 0) > self.search.k:
            raise ValueError(f"eval.graph_k must be at most search.k (got {self.eval.graph_k} and {self.search.k})")
        return self

    @model_validator(mode="after")
    def _tokens_of_the_model(self) -> Config:
        if self.lm.model == SCRATCH and self.corpus.tokens == "lm":
            raise ValueError("lm.model scratch brings no tokens of its own; set corpus.tokens to words or bytes")
        if self.lm.model != SCRATCH and self.corpus.tokens != "lm":
            raise ValueError(f"corpus.tokens {self.corpus.tokens} is for lm.model scratch; {self.lm.model} has its own")
        return self

    @model_validator(mode="after")
    def _readings_are_keys(self) -> Config:
        if self.lm.finetune.kind != "none" and self.lm.finetune.unread == "first-reading" and self.store.key != "state":
            raise ValueError(
                f"lm.finetune.unread first-reading keeps states, so store.key must be state (got {self.store.key})"
            )
        return self


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


@cache
def default_values() -> dict[str, Any]:
    """The default of every field that has one, by dotted name, as it is written to a run."""
    return flat(Config(run="-").model_dump(mode="json"))


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """
    >>> flat({"a": 1, "b": {"c": 2}})
    {'a': 1, 'b.c': 2}
    """
    out: dict[str, Any] = {}
    for name, value in values.items():
        out |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return out


def field_names(model: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every field's dotted name, sections included."""
    names: list[str] = []
    for name, field in model.model_fields.items():
        names.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            names.extend(field_names(field.annotation, f"{prefix}{name}."))
    return names


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
