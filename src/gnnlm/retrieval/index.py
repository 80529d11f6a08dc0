"""An index over the store's rows: keys in, positions and similarities out.

A key is the state (or the last feed-forward's input), scaled to unit length under cosine. Rows without a token (the
position past a document's last) are not indexed: there is nothing to copy from them.
"""

from __future__ import annotations

import math
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from gnnlm.artifact import Artifact, Draft, writing
from gnnlm.config import IndexConfig
from gnnlm.corpus.stream import END, Stream
from gnnlm.datastore.quantize import check_bytes
from gnnlm.errors import ConfigError
from gnnlm.progress import Track

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
TRAIN_ROWS, ROWS_PER_CLUSTER = 262_144, 8  # a quantizer is trained on so many rows, or so many for each cluster
BATCH = 65_536
MANY_CLUSTERS = 65_536  # beyond this the clusters themselves are searched through a graph


def as_keys(states: npt.NDArray[Any], metric: str) -> Floats:
    """States as float32 keys; unit length under cosine.

    >>> as_keys(np.array([[3.0, 4.0]]), "cosine")
    array([[0.6, 0.8]], dtype=float32)
    """
    keys = np.ascontiguousarray(states, dtype=np.float32)
    if metric == "cosine":
        norms = np.linalg.norm(keys, axis=1, keepdims=True)
        keys = keys / np.maximum(norms, np.finfo(np.float32).tiny)
    return keys


def keys_of(store: Artifact, split: str) -> npt.NDArray[Any]:
    """What a split is searched by: its states, or the keys kept beside them."""
    return store.array(f"{split}.{'states' if store.facts.get('key', 'state') == 'state' else 'keys'}.npy")


class Index:
    """A FAISS index and the position of each of its rows."""

    def __init__(self, index: Any, positions: Ids, metric: str) -> None:
        self._index, self.positions, self.metric = index, positions, metric

    def __len__(self) -> int:
        return len(self.positions)

    def search(self, states: npt.NDArray[Any], k: int) -> tuple[Ids, Floats]:
        """The k nearest positions of each state and their similarity, nearest first.

        Similarity is the cosine, or minus the squared distance. Where there are fewer than k, the rest is
        -1 and minus infinity.
        """
        k = min(k, len(self))
        scores, rows = self._index.search(as_keys(states, self.metric), k)
        missing = rows < 0
        ids = np.where(missing, -1, self.positions[rows])
        if self._index.metric_type == faiss.METRIC_L2:  # FAISS gives squared distances; between unit vectors 2 - 2 cos
            scores = 1 - scores / 2 if self.metric == "cosine" else -scores
        return ids, np.where(missing, -np.inf, scores).astype(np.float32)


def clusters_of(config: IndexConfig, rows: int) -> int:
    """Clusters of an inverted index over so many rows."""
    return min(config.clusters or int(4 * math.sqrt(rows)), rows)


def training_rows(clusters: int, rows: int) -> int:
    """How many of its rows an index of so many clusters is trained on."""
    return min(rows, max(TRAIN_ROWS, ROWS_PER_CLUSTER * clusters))


def empty_index(config: IndexConfig, width: int, rows: int) -> Any:
    """An untrained index of the configured kind, for about so many rows."""
    if config.kind == "exact":
        return faiss.IndexFlatIP(width) if config.metric == "cosine" else faiss.IndexFlatL2(width)
    clusters = clusters_of(config, rows)
    cells = f"IVF{clusters}" + ("_HNSW32" if clusters > MANY_CLUSTERS else "")
    factory = f"{cells},Flat" if config.kind == "ivf" else config.kind
    if config.kind == "ivfpq":
        check_bytes(width, config.bytes, "index.bytes")
        factory = f"OPQ{config.bytes},{cells},PQ{config.bytes}"
    try:
        # L2 between unit vectors ranks as cosine does, and stays right when a transform centres the keys.
        return faiss.index_factory(width, factory, faiss.METRIC_L2)
    except RuntimeError as error:
        raise _unusable(config, width, error) from error


def train_index(keys: Floats, config: IndexConfig, rows: int, seed: int) -> Any:
    """An empty index, trained on sample keys."""
    index = empty_index(config, keys.shape[1], rows)
    if config.kind == "exact":
        return index
    ivf = faiss.try_extract_index_ivf(index)
    if ivf is not None:
        ivf.cp.seed = seed + 1
        ivf.cp.min_points_per_centroid = 1
    try:
        index.train(keys)
    except RuntimeError as error:
        raise _unusable(config, keys.shape[1], error) from error
    return index


def _unusable(config: IndexConfig, width: int, error: Exception) -> ConfigError:
    reason = str(error).strip().splitlines()[0].rsplit(": ", 1)[-1]
    return ConfigError(
        f"index.kind {config.kind!r} cannot be built over keys of width {width}: {reason}; use exact, ivf, or another "
        "FAISS factory string"
    )


def build_index(draft: Draft, store: Artifact, stream: Stream, config: IndexConfig, seed: int) -> Artifact:
    """Index the train split of a store."""
    keys = keys_of(store, "train")
    positions = np.flatnonzero(np.asarray(stream.tokens) != END).astype(np.int64)
    ivf = faiss.try_extract_index_ivf(empty_index(config, keys.shape[1], len(positions)))
    wanted = 1 if config.kind == "exact" else training_rows(0 if ivf is None else ivf.nlist, len(positions))
    sample = np.random.default_rng(seed).permutation(len(positions))[:wanted]
    with Track("index", len(positions), "rows") as track:
        index = train_index(as_keys(keys[np.sort(positions[sample])], config.metric), config, len(positions), seed)
        for start in range(0, len(positions), BATCH):
            rows = positions[start : start + BATCH]
            index.add(as_keys(keys[rows], config.metric))
            track.advance(len(rows))
    with writing(draft.file("index.faiss")):
        faiss.write_index(index, str(draft.folder / "index.faiss"))
    draft.save("positions.npy", positions)
    return draft.finish({"rows": len(positions), "metric": config.metric, "kind": config.kind})


def open_index(artifact: Artifact, probes: int) -> Index:
    index = faiss.read_index(str(artifact.file("index.faiss")))
    ivf = faiss.try_extract_index_ivf(index)
    if ivf is not None:
        ivf.nprobe = min(probes, ivf.nlist)
        quantizer = faiss.downcast_index(ivf.quantizer)
        if isinstance(quantizer, faiss.IndexHNSW):  # clusters are found through a graph: look at more than are wanted
            quantizer.hnsw.efSearch = max(quantizer.hnsw.efSearch, 2 * ivf.nprobe)
    positions: Ids = np.asarray(artifact.array("positions.npy"))
    return Index(index, positions, artifact.facts["metric"])
