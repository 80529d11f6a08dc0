"""Which index the config asks for: as a FAISS factory string, from the number of rows and the width alone.

The thresholds of `auto` are written down here (docs/decisions/0016 says from what), never measured on this machine:
the same config over the same text makes the same index everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gnnlm.artifact import human_bytes
from gnnlm.config import IndexConfig
from gnnlm.config.retrieval_config import ROWS_PER_CLUSTER

EXACT_ROWS = 65_536  # exact search of so many rows takes about two milliseconds of a core, and finds everything
MANY_CLUSTERS = 65_536  # beyond this, the clusters themselves are searched through an HNSW graph
# Sizes of a code that `auto` tries, largest first.
CODE_BYTES = (1024, 768, 512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16)
FEW_VALUES = 3  # where a code has less than 1/3 byte for each value of a key, two values share a byte
BESIDE_A_CODE = 12  # bytes of a row beside its code: FAISS's id, and its position


@dataclass(frozen=True)
class IndexChoice:
    """The kind of index that is built, and why."""

    kind: str
    why: str


def choose_index(config: IndexConfig, rows: int, width: int) -> IndexChoice:
    """Resolve `auto` for this number of rows and this width; any other kind stands for itself.

    >>> choose_index(IndexConfig(kind="auto"), 60_000, 576).kind, choose_index(IndexConfig(kind="ivf"), 10, 4).kind
    ('exact', 'ivf')
    >>> choose_index(IndexConfig(kind="auto"), 300_000, 576).kind
    'IVF1095,SQfp16'
    >>> choose_index(IndexConfig(kind="auto", memory_gb=0.2), 300_000, 576).kind
    'IVF1095,SQ8'
    >>> choose_index(IndexConfig(kind="auto", memory_gb=0.04), 300_000, 576).kind
    'PCA192,IVF1095,PQ96'
    """
    if config.kind != "auto":
        return IndexChoice(config.kind, "the config names it")
    if rows <= EXACT_ROWS:
        return IndexChoice("exact", f"{rows:,} rows are at most {EXACT_ROWS:,}")
    budget = config.memory_gb * 1e9
    whole = rows * (2 * width + BESIDE_A_CODE)
    limit = f"index.memory_gb ({config.memory_gb:g})"
    cells = _cells(config.clusters or int(2 * math.sqrt(rows)), rows)
    if whole <= budget:
        return IndexChoice(f"{cells},SQfp16", f"{rows:,} whole keys take {human_bytes(whole)}, which fits into {limit}")
    sizes = [width, *(size for size in CODE_BYTES if size < width)]
    fitting = [size for size in sizes if rows * (size + BESIDE_A_CODE) <= budget]
    code = fitting[0] if fitting else min(sizes[-1], max(1, width // 2))
    room = f"codes of {code} bytes " + ("fit" if fitting else "are the smallest")
    why = f"{rows:,} whole keys take {human_bytes(whole)}, more than {limit}; {room}"
    return IndexChoice(_coded(code, width, cells), why)


def _coded(code: int, width: int, cells: str) -> str:
    """Return a factory string with `code` bytes a key: a byte for each value, for some of them, or for every two."""
    if code >= width:
        return f"{cells},SQ8"
    few = FEW_VALUES * code < width
    return f"PCA{2 * code},{cells},PQ{code}" if few else f"PCA{code},{cells},SQ8"


def resolved(config: IndexConfig, rows: int, width: int) -> IndexConfig:
    """Replace `auto` in a config by the kind that is built."""
    return config.model_copy(update={"kind": choose_index(config, rows, width).kind})


def factory_of(config: IndexConfig, rows: int) -> str:
    """Return the FAISS factory string of a kind other than `auto` and `exact`."""
    if config.kind == "ivf":
        return f"{_cells(config.clusters_of(rows), rows)},Flat"
    if config.kind == "paper":
        return f"OPQ{config.bytes},{_cells(config.clusters_of(rows), rows)},PQ{config.bytes}"
    return config.kind


def _cells(clusters: int, rows: int) -> str:
    clusters = max(1, min(clusters, rows // ROWS_PER_CLUSTER))
    return f"IVF{clusters}" + ("_HNSW32" if clusters > MANY_CLUSTERS else "")
