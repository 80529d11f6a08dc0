"""The config sections of tuning and of the report."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field, model_validator

from gnnlm.config.section import MAX_K, Section

MAX_MIXES = 10_000_000  # losses kept while tuning: 160 MB
USUAL_BUCKETS = 8  # the most that a preset sets
K = Annotated[int, Field(ge=1, le=MAX_K)]
Temperature = Annotated[float, Field(ge=1e-9, le=1e9)]
Weight = Annotated[float, Field(ge=0, le=1)]

COSINE_TEMPERATURES = (0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.1, 0.15, 0.25)
L2_TEMPERATURES = (0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)  # times the metric's unit


class TuneConfig(Section):
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


class EvalConfig(Section):
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
