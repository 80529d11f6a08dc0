"""The config sections of tuning and of the report."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import Field, model_validator

from gnnlm.config.config_section import MAX_K, MAX_TOKENS, ConfigSection

MAX_MIXES = 10_000_000  # losses kept while tuning: 160 MB
USUAL_BUCKETS = 8  # the most that a preset sets
K = Annotated[int, Field(ge=1, le=MAX_K)]
Temperature = Annotated[float, Field(ge=1e-9, le=1e9)]
Weight = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, le=64)]
Length = Annotated[int, Field(ge=1, le=MAX_K)]

COSINE_TEMPERATURES = (0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.1, 0.15, 0.25)
L2_TEMPERATURES = (0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)  # times the metric's unit


class TuneConfig(ConfigSection):
    ks: tuple[K, ...] = Field(
        (8, 16, 32, 64, 128, 256, 512, 1024),
        min_length=1,
        max_length=1000,
        description="Numbers of neighbours to try for the kNN distribution. Those above search.k count as search.k.",
    )
    temperatures: tuple[Temperature, ...] | None = Field(
        None,
        min_length=1,
        max_length=1000,
        description="Temperatures to try for the kNN distribution; lower means sharper. Default: a grid that suits "
        "the metric.",
    )
    lambdas: tuple[Weight, ...] = Field(
        tuple(round(0.025 * i, 3) for i in range(33)),
        min_length=1,
        max_length=1000,
        description="Weights of the kNN distribution to try: 0 is the model alone, 1 is kNN alone. A gate "
        "is not limited to them.",
    )
    buckets: int | None = Field(
        None,
        ge=1,
        le=256,
        description="Positions are grouped into this many buckets by the similarity of their nearest neighbour, and "
        "each bucket gets its own weight. There are fewer buckets when valid has fewer than 200 positions for each. "
        "1 gives all positions the same weight, as in the paper. Default: as gnn.preset says, which is 8 for the "
        "preset `default`.",
    )

    gate: bool | None = Field(
        None,
        description="Also fit a gate, which computes the weight at each position from how similar the neighbours are, "
        "how much they agree and how sure the model is, and choose among one weight, buckets and the gate by "
        "cross-validation on valid. The first token of a text then has a weight of its own. false: one weight per "
        "bucket, without the comparison. Default: as gnn.preset says, which is true for the preset `default`.",
    )

    @model_validator(mode="after")
    def _bounded(self) -> TuneConfig:
        tried = math.prod(len(values) for values in (self.ks, self.lambdas, self.temperatures or range(12)))
        tried *= self.buckets or USUAL_BUCKETS
        if tried > MAX_MIXES:
            raise ValueError(
                f"ks, temperatures, lambdas and buckets make {tried:,} combinations; expected at most {MAX_MIXES:,}: "
                "shorten a list"
            )
        return self


class ContextRetrievalConfig(ConfigSection):
    enabled: bool = Field(
        False,
        description="Whether the report also compares with passages of the store that BM25 finds and that the base "
        "model reads before the text. `eval.context_retrieval: true` is short for this. It needs the extra "
        "`passages`, and takes many times the base model's reading.",
    )
    counts: tuple[Count, ...] = Field(
        (1, 2),
        min_length=1,
        max_length=16,
        description="Numbers of passages to try, on valid, with the first query and the largest stride.",
    )
    lengths: tuple[Length, ...] = Field(
        (128, 256),
        min_length=1,
        max_length=16,
        description="Lengths of a passage, in tokens, to try with each number.",
    )
    queries: tuple[Length, ...] = Field(
        (32, 128),
        min_length=1,
        max_length=16,
        description="Passages are looked up with this many tokens, the last that were read. Numbers to try with the "
        "best number and length of passages.",
    )
    strides: tuple[Length, ...] = Field(
        (16, 32, 64),
        min_length=1,
        max_length=16,
        description="Passages are looked up again after this many tokens. Strides to try with the best of all else; "
        "half the stride takes up to twice the time.",
    )
    tune_tokens: int = Field(1500, ge=1, le=MAX_TOKENS, description="Tokens of valid on which all of this is tried.")
    tokens: int = Field(
        6000,
        ge=1,
        le=MAX_TOKENS,
        description="Tokens of test, from its beginning, that are read with passages. All rows of the comparison are "
        "on these tokens.",
    )


class EvalConfig(ConfigSection):
    bootstrap: int = Field(
        1000,
        ge=40,  # fewer have no 2.5% at either end
        le=100_000,
        description="How many times the test documents are resampled for the 95% interval of each perplexity.",
    )
    block: int = Field(
        256,
        ge=1,
        le=MAX_K,
        description="Positions scored at once. It does not change any result; lower it to save memory.",
    )
    graph_k: int | None = Field(
        None,
        ge=1,
        le=MAX_K,
        description="Neighbours per position in the graph when predicting. Default: search.graph_k.",
    )
    context_retrieval: ContextRetrievalConfig = Field(
        ContextRetrievalConfig(),
        description="The comparison with passages before the text. `true` turns it on with the defaults below.",
    )

    @model_validator(mode="before")
    @classmethod
    def _short_for_enabled(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(wanted := values.get("context_retrieval"), bool):
            return {**values, "context_retrieval": {"enabled": wanted}}
        return values
