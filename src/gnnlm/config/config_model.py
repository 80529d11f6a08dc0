"""The whole config: its sections, and the rules between them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, model_validator

from gnnlm.config.config_section import ConfigSection
from gnnlm.config.corpus_config import CorpusConfig
from gnnlm.config.evaluation_config import EvalConfig, TuneConfig
from gnnlm.config.lm_config import SCRATCH, LMConfig
from gnnlm.config.network_config import CacheConfig, GnnConfig, TrainConfig
from gnnlm.config.presets import PRESETS
from gnnlm.config.retrieval_config import CodecConfig, IndexConfig, SearchConfig, StoreConfig

MAX_SEED = 2**31 - 2  # FAISS takes seed + 1 as a signed 32-bit number; seed x 1,000,003 + step fits into 64 bits


class Config(ConfigSection):
    """One experiment: a frozen model, a corpus, and a run directory that holds every artifact."""

    run: str = Field(description="The run directory: everything this config makes is kept in it.")
    seed: int = Field(
        0,
        ge=0,
        le=MAX_SEED,
        description="Seed of the splits, the order of the data, initial weights and dropout. The same seed gives the "
        "same run; change it to see how much results vary.",
    )
    corpus: CorpusConfig = Field(CorpusConfig(), description="The text, how it is split and cleaned.")
    lm: LMConfig = Field(LMConfig(), description="The frozen base model and how it reads.")
    store: StoreConfig = Field(StoreConfig(), description="The states of the base model on disk.")
    codec: CodecConfig = Field(CodecConfig(), description="Compression of the states of neighbour nodes.")
    index: IndexConfig = Field(IndexConfig(), description="The FAISS index over the store.")
    search: SearchConfig = Field(SearchConfig(), description="The search for neighbours of every position.")
    gnn: GnnConfig = Field(GnnConfig(), description="The shape of the graph network.")
    train: TrainConfig = Field(TrainConfig(), description="How the graph network is trained.")
    cache: CacheConfig = Field(
        CacheConfig(), description="The cache of what the trained network reads of its neighbours."
    )
    tune: TuneConfig = Field(
        TuneConfig(), description="The values of k, temperature and weight (lambda) of the kNN part tried on valid."
    )
    eval: EvalConfig = Field(EvalConfig(), description="The report on test.")

    @property
    def exclude(self) -> str:
        """`search.exclude`, or what the preset says."""
        return self.search.exclude or str(PRESETS[self.gnn.preset]["search"]["exclude"])

    @property
    def buckets(self) -> int:
        """`tune.buckets`, or what the preset says."""
        return self.tune.buckets or int(PRESETS[self.gnn.preset]["tune"]["buckets"])

    @property
    def gate(self) -> bool:
        """`tune.gate`, or what the preset says."""
        return bool(PRESETS[self.gnn.preset]["tune"]["gate"]) if self.tune.gate is None else self.tune.gate

    @property
    def graph_k(self) -> int:
        """Neighbours per position in the graph when predicting."""
        return self.eval.graph_k or self.search.graph_k

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
            raise ValueError("lm.model scratch has no tokens of its own; set corpus.tokens to words or bytes (got lm)")
        if self.lm.model != SCRATCH and self.corpus.tokens != "lm":
            raise ValueError(
                f"corpus.tokens {self.corpus.tokens} is for lm.model scratch; {self.lm.model} has its own tokens: set "
                "corpus.tokens to lm"
            )
        return self

    @model_validator(mode="after")
    def _readings_are_keys(self) -> Config:
        if self.lm.finetune.kind != "none" and self.lm.finetune.unread == "first-reading" and self.store.key != "state":
            raise ValueError(
                f"lm.finetune.unread first-reading keeps states only, so store.key must be state (got {self.store.key})"
            )
        return self

    @model_validator(mode="after")
    def _passages_within_window(self) -> Config:
        passages = self.eval.context_retrieval
        count, length, stride = (max(values) for values in (passages.counts, passages.lengths, passages.strides))
        needed = count * length + self.lm.context + stride
        if passages.enabled and needed > self.lm.window:
            raise ValueError(
                f"eval.context_retrieval: {count} passages of {length} tokens, lm.context ({self.lm.context}) and a "
                f"stride of {stride} must fit into lm.window, but make {needed:,} tokens (lm.window is "
                f"{self.lm.window:,}); lower counts, lengths or strides, or raise lm.window"
            )
        return self


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
        if isinstance(field.annotation, type) and issubclass(field.annotation, ConfigSection):
            names.extend(field_names(field.annotation, f"{prefix}{name}."))
    return names
