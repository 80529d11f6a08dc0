"""The config sections of the store and of search in it."""

from __future__ import annotations

import math
import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from gnnlm.config.config_section import MAX_K, MAX_TOKENS, ConfigSection
from gnnlm.config.messages import show

MAX_CLUSTERS = 2**24
MAX_LINKS = 1024
NAMED_KINDS = ("auto", "exact", "ivf", "paper")
UNUSABLE = {  # parts of FAISS factory strings whose indexes cannot do what search needs
    "IDMap": "has ids of its own",
    "NSG": "takes no second batch of rows",
    "MinMax": "takes no rows",
    "ZnLattice": "cannot be read back from a file",
    "LSH": "does not give a distance",
}

ROWS_PER_CLUSTER = 39  # fewer do not train a centroid well (FAISS warns below this)


class StoreConfig(ConfigSection):
    dtype: Literal["fp16", "fp32"] = Field(
        "fp16", description="Number format of the states on disk. `fp32` takes twice the space and is rarely needed."
    )
    key: Literal["state", "ffn_input"] = Field(
        "state",
        description="The vector used for search: the state itself, or the input of the last feed-forward layer (as in "
        "kNN-LM), which is stored beside it and doubles the store.",
    )
    segment_tokens: int = Field(
        4_000_000,
        ge=1,
        le=MAX_TOKENS,
        description="The most positions of a segment; only a longer document makes a longer one. The store is made of "
        "segments of whole documents. Each is encoded, coded, indexed and cached by itself, so that building takes "
        "memory for one, and an interrupted build keeps those that are finished.",
    )
    shard_tokens: int = Field(
        8192,
        ge=1,
        le=10**9,
        description="Positions encoded between two points from which an interrupted encoding can go on.",
    )


class CodecConfig(ConfigSection):
    kind: Literal["fp16", "pq"] = Field(
        "fp16",
        description="How the states of neighbour nodes are stored: as they are in the store (`fp16`), or compressed to "
        "a few bytes each by product quantization (`pq`, OPQ + PQ), for stores that do not fit in memory. Context "
        "nodes and the index are not affected.",
    )
    bytes: int = Field(64, ge=1, le=65_536, description="Bytes per state under `pq`; must divide the model's width.")
    train_rows: int = Field(
        32_768, ge=256, le=10**9, description="States, sampled from the whole store, from which `pq` is learned."
    )


class IndexConfig(ConfigSection):
    metric: Literal["cosine", "l2"] = Field(
        "cosine", description="Similarity of two keys: their cosine, or minus their squared Euclidean distance (`l2`)."
    )
    kind: str = Field(
        "exact",
        description="Kind of index. `exact` compares with every row. `auto` chooses from the number of rows, the width "
        "and memory_gb; the index says what it chose and why. `ivf` looks into some clusters only. `paper` also "
        "compresses keys to a few bytes, as the paper does. Or a FAISS factory string, such as HNSW32.",
    )
    memory_gb: float = Field(
        4.0, gt=0, le=1_000_000, description="The largest index, in gigabytes of memory, that `auto` may choose."
    )
    bytes: int = Field(64, ge=1, le=65_536, description="Bytes per key under `paper`; must divide the key's width.")
    clusters: int | None = Field(
        None,
        ge=1,
        le=MAX_CLUSTERS,
        description="Number of clusters of `auto`, `ivf` and `paper`. Default: 4 x the square root of the number of "
        "rows; under `auto` 2 x.",
    )
    probes: int = Field(
        32, ge=1, le=MAX_CLUSTERS, description="Clusters searched per query. More find more of the true neighbours."
    )

    @field_validator("kind")
    @classmethod
    def _usable_kind(cls, kind: str) -> str:
        if kind in NAMED_KINDS:
            return kind
        if kind.lower() in NAMED_KINDS:
            raise ValueError(f"expected {kind.lower()}, in lower case, or a FAISS factory string (got {show(kind)})")
        for part, why in UNUSABLE.items():
            if part in kind:
                raise ValueError(
                    f"expected {', '.join(NAMED_KINDS)} or a FAISS factory string without {part}, which {why} "
                    f"(got {show(kind)})"
                )
        numbers = [int(number[:20]) for number in re.findall(r"\d+", kind)]
        links = [int(number[:20]) for number in re.findall(r"HNSW(\d+)", kind)]  # FAISS crashes below 2
        if any(not 1 <= number <= MAX_CLUSTERS for number in numbers) or any(not 2 <= n <= MAX_LINKS for n in links):
            raise ValueError(
                f"expected a FAISS factory string with numbers from 1 to {MAX_CLUSTERS:,}, and of HNSW from 2 to "
                f"{MAX_LINKS:,} (got {show(kind)})"
            )
        return kind

    def clusters_of(self, rows: int) -> int:
        """Clusters of an inverted index over so many rows: enough rows are left to train each."""
        return max(1, min(self.clusters or int(4 * math.sqrt(rows)), rows // ROWS_PER_CLUSTER))


class SearchConfig(ConfigSection):
    k: int = Field(
        1024,
        ge=1,
        le=MAX_K,
        description="Neighbours found for each valid and test position, for the kNN distribution.",
    )
    graph_k: int = Field(128, ge=1, le=MAX_K, description="Neighbours per position that enter the graph; at most k.")
    max_train: int | None = Field(
        None,
        ge=1,
        le=MAX_TOKENS,
        description="How many train positions, from the first on, neighbours are searched for; the GNN is trained on "
        "these alone (a refit reads the last ones). Lower it to save time on a large corpus. Default: all.",
    )
    exclude: Literal["receptive-field", "document", "none"] | None = Field(
        None,
        description="Rows that a train position may not retrieve, so that it cannot see its own answer: those whose "
        "window overlaps its receptive field, or that of a position to which the network carries what it retrieves "
        "(`receptive-field`, as in the paper), or all of its document as well (`document`), which is closer to what "
        "held-out text finds. `none` excludes nothing, not even the position itself, to demonstrate what the rule is "
        "for. Default: as gnn.preset says, which is `document` for the preset `default`.",
    )
    shard_queries: int = Field(
        4096,
        ge=1,
        le=10**6,
        description="Queries between two points from which an interrupted search can go on.",
    )

    @model_validator(mode="after")
    def _graph_within_k(self) -> SearchConfig:
        if self.graph_k > self.k:
            raise ValueError(f"graph_k must be at most k (got {self.graph_k} and {self.k})")
        return self
