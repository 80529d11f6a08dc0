"""The config sections of tuning and of the report."""

from __future__ import annotations

from pydantic import Field, model_validator

from gnnlm.config.section import Section

COSINE_TEMPERATURES = (0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.1, 0.15, 0.25)
L2_TEMPERATURES = (0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)  # times the metric's unit


class TuneConfig(Section):
    ks: tuple[int, ...] = Field(
        (8, 16, 32, 64, 128, 256, 512, 1024), min_length=1, description="Numbers of neighbours tried (up to search.k)."
    )
    temperatures: tuple[float, ...] | None = Field(
        None, min_length=1, description="Temperatures tried. Default: a grid that suits the metric."
    )
    lambdas: tuple[float, ...] = Field(
        tuple(round(0.025 * i, 3) for i in range(33)), min_length=1, description="Weights of the kNN part tried."
    )
    buckets: int = Field(
        8,
        gt=0,
        description="Positions are put into so many buckets by the similarity of their nearest neighbour, and each has "
        "a weight of its own (fewer where valid has not 200 for each). The paper has one weight for all: 1.",
    )

    @model_validator(mode="after")
    def _in_range(self) -> TuneConfig:
        if any(k < 1 for k in self.ks):
            raise ValueError(f"ks must be at least 1 (got {self.ks})")
        if any(not 0 <= lam <= 1 for lam in self.lambdas):
            raise ValueError(f"lambdas must lie in 0..1 (got {self.lambdas})")
        if any(t <= 0 for t in self.temperatures or ()):
            raise ValueError(f"temperatures must be above 0 (got {self.temperatures})")
        return self


class EvalConfig(Section):
    bootstrap: int = Field(1000, gt=0, description="Resamplings of documents for the 95% interval.")
    block: int = Field(256, gt=0, description="Positions scored at once; does not change any result.")
    graph_k: int | None = Field(
        None, gt=0, description="Neighbours per position in the graph when predicting. Default: search.graph_k."
    )
