"""The config sections of the store and of search in it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gnnlm.config.section import Section


class StoreConfig(Section):
    dtype: Literal["fp16", "fp32"] = Field("fp16", description="How states are kept on disk.")
    key: Literal["state", "ffn_input"] = Field(
        "state",
        description="What is searched by: the state, or the input of the last feed-forward layer (kNN-LM's choice), "
        "kept beside it.",
    )
    shard_tokens: int = Field(8192, gt=0, description="Positions encoded between two points of resumption.")


class CodecConfig(Section):
    kind: Literal["fp16", "pq"] = Field(
        "fp16",
        description="How neighbour nodes keep their states: the store as it is, or product-quantized (OPQ + PQ). "
        "Context nodes and the index are always exact.",
    )
    bytes: int = Field(64, gt=0, description="Bytes of a state under `pq`; must divide the model's width.")
    train_rows: int = Field(32_768, ge=256, description="States that `pq` is learned from, drawn from the whole store.")


class IndexConfig(Section):
    metric: Literal["cosine", "l2"] = Field("cosine", description="Similarity: cosine, or minus the squared L2.")
    kind: str = Field(
        "exact",
        description="`exact`, `ivf`, `ivfpq` (keys of a few bytes, as in the paper), or any FAISS factory string.",
    )
    bytes: int = Field(64, gt=0, description="Bytes of a key under `ivfpq`; must divide the key's width.")
    clusters: int | None = Field(
        None, gt=0, description="Clusters of `ivf` and `ivfpq`. Default: 4 x the root of the rows."
    )
    probes: int = Field(32, gt=0, description="Clusters looked into per query.")


class SearchConfig(Section):
    k: int = Field(1024, gt=0, description="Neighbours per valid and test position, for the kNN distribution.")
    graph_k: int = Field(128, gt=0, description="Neighbours per position that enter the graph.")
    max_train: int | None = Field(
        None, gt=0, description="Train positions that are looked up, the first ones; the GNN learns on these alone."
    )
    exclude: Literal["receptive-field", "document"] = Field(
        "document",
        description="What a train position may not retrieve: rows whose window touches its receptive field (the "
        "paper), or its whole document as well, which is what held-out text meets.",
    )
    shard_queries: int = Field(4096, gt=0, description="Queries between two points of resumption.")

    @model_validator(mode="after")
    def _graph_within_k(self) -> SearchConfig:
        if self.graph_k > self.k:
            raise ValueError(f"graph_k must be at most k (got {self.graph_k} and {self.k})")
        return self
