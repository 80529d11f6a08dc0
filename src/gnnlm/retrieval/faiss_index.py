"""Approximate search with FAISS: inverted lists, product quantization, or any factory string.

One index is trained, and every segment has a copy of it with its own rows.

Filters are applied inside the search: by a selector if most rows remain, by exact search among the remaining rows if
the filter is narrow. A query that still finds too few neighbours searches more lists, and finally all of them.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gnnlm.artifact import Array, Artifact, Draft, disk, file_digest, files_of, found_part, writing
from gnnlm.config import IndexConfig
from gnnlm.config.retrieval import ROWS_PER_CLUSTER
from gnnlm.corpus.stream import Stream, part_name
from gnnlm.datastore.quantize import LEVELS, check_bytes
from gnnlm.datastore.store import read_rows
from gnnlm.engine import Spread, Task, here
from gnnlm.errors import ConfigError
from gnnlm.progress import Track, numbered, say
from gnnlm.retrieval.exact import ExactIndex, sorted_neighbours
from gnnlm.retrieval.index import Allowed, Rows, as_keys, key_file, keys_of
from gnnlm.retrieval.neighbours import Neighbours

Floats = npt.NDArray[np.float32]
PART, TRAINED = "index", "trained.faiss"
TRAIN_ROWS = 262_144  # a quantizer is trained on this many rows, or on more if it has very many clusters
BATCH = 65_536
MANY_CLUSTERS = 65_536  # beyond this, the clusters themselves are searched through an HNSW graph
NARROW = 16_384  # a filter that leaves fewer rows than this is searched exactly
FETCH_AT_ONCE = 2**26  # rows asked of the index in one call, over all queries: 0.8 GB


class FaissIndex:
    """A FAISS index, which positions its rows have, and the keys it was made from."""

    def __init__(self, index: Any, keys: Array, rows: Rows, metric: str) -> None:
        self._index, self._keys, self._rows, self.metric = index, keys, rows, metric
        self._ivf = faiss.try_extract_index_ivf(index)

    def __len__(self) -> int:
        return len(self._rows)

    def search(self, keys_ND: Tensor, k: int, allowed: Allowed | None = None) -> Neighbours:
        """See `Index.search`; the search is approximate."""
        k = min(k, len(self))
        if not len(keys_ND) or not k:
            return Neighbours.none(len(keys_ND), k=k)
        allowed = allowed or Allowed()
        if allowed.positions is not None:
            open_R = self._rows.open(allowed.positions)
            if int(open_R.sum()) <= NARROW:
                positions = self._rows.positions(torch.nonzero(open_R)[:, 0])
                few = ExactIndex.over(self._keys, positions, self.metric)
                return few.search(keys_ND, k, Allowed(allowed.barred)).padded(k)
            return self._search(keys_ND, k, allowed.barred, open_R.numpy())
        return self._search(keys_ND, k, allowed.barred, None)

    def compare(self, keys_ND: Tensor, positions_NC: Tensor, k: int) -> Neighbours:
        """See `Index.compare`."""
        return sorted_neighbours(positions_NC, self.similarity(keys_ND, positions_NC), k)

    def similarity(self, keys_ND: Tensor, positions_NC: Tensor) -> Tensor:
        """See `Index.similarity`."""
        few = ExactIndex.over(self._keys, positions_NC.unique(), self.metric)
        return few.similarity(keys_ND, positions_NC)

    def _search(
        self, keys_ND: Tensor, k: int, barred: tuple[Tensor, Tensor] | None, open_R: npt.NDArray[np.bool_] | None
    ) -> Neighbours:
        """Fetch, filter, and fetch more for the queries that have too few left."""
        queries = np.ascontiguousarray(as_keys(keys_ND, self.metric).numpy())
        found = Neighbours.none(len(queries), k=k)
        closed = torch.zeros(len(queries), dtype=torch.long) if barred is None else barred[1] - barred[0] + 1
        enough = (k + closed).clamp(max=len(self))
        lines, probes = torch.arange(len(queries)), self._probes
        fetch = k if barred is None else min(2 * k, len(self))
        while len(lines):
            for part in lines.split(max(1, FETCH_AT_ONCE // fetch)):
                got = self._ask(queries[part.numpy()], fetch, open_R, probes)
                if barred is not None:
                    low, high = (end[part, None] for end in barred)
                    inside = (got.positions >= low) & (got.positions <= high)
                    got = Neighbours(
                        got.positions.masked_fill(inside, -1), got.similarity.masked_fill(inside, -math.inf)
                    )
                best = sorted_neighbours(got.positions, got.similarity, k)
                found.positions[part], found.similarity[part] = best.positions, best.similarity
            short = found.positions[lines, -1] < 0
            if open_R is not None and probes < self._lists:  # the filter left too few rows in the searched lists
                lines, probes = lines[short], min(4 * probes, self._lists)
            else:
                lines = lines[short & (fetch < enough[lines])]
            fetch = fetch if barred is None else min(4 * fetch, len(self))
        return found

    def _ask(self, queries: Floats, fetch: int, open_R: npt.NDArray[np.bool_] | None, probes: int) -> Neighbours:
        scores, rows = self._index.search(queries, fetch, params=self._parameters(open_R, probes))
        missing = rows < 0
        if self._index.metric_type == faiss.METRIC_L2:  # FAISS gives squared distances; between unit vectors 2 - 2 cos
            scores = 1 - scores / 2 if self.metric == "cosine" else -scores
        positions = self._rows.positions(torch.from_numpy(np.maximum(rows, 0))).numpy()
        return Neighbours(
            torch.from_numpy(np.where(missing, -1, positions)),
            torch.from_numpy(np.where(missing, -np.inf, scores).astype(np.float32)),
        )

    def _parameters(self, open_R: npt.NDArray[np.bool_] | None, probes: int) -> Any:
        if open_R is None and probes == self._probes:
            return None
        library: Any = faiss  # its stubs lack the keyword arguments of search parameters
        selector = None if open_R is None else library.IDSelectorBitmap(np.packbits(open_R, bitorder="little"))
        if self._ivf is None:
            return library.SearchParameters(sel=selector)
        inner = library.SearchParametersIVF(sel=selector, nprobe=probes)
        chain = isinstance(self._index, faiss.IndexPreTransform)
        return library.SearchParametersPreTransform(index_params=inner) if chain else inner

    @property
    def _probes(self) -> int:
        return 1 if self._ivf is None else int(self._ivf.nprobe)

    @property
    def _lists(self) -> int:
        return 1 if self._ivf is None else int(self._ivf.nlist)


def training_rows(clusters: int, rows: int) -> int:
    """How many of its rows an index with `clusters` clusters is trained on."""
    return min(rows, max(TRAIN_ROWS, ROWS_PER_CLUSTER * clusters))


def check_index(config: IndexConfig, width: int, rows: int) -> None:
    """Refuse, before the long work, an index that cannot be built over `rows` keys of this width."""
    if config.kind != "exact":
        empty_index(config, width, rows)


def empty_index(config: IndexConfig, width: int, rows: int) -> Any:
    """An untrained index of the configured kind, for about `rows` rows."""
    clusters = config.clusters_of(rows)
    cells = f"IVF{clusters}" + ("_HNSW32" if clusters > MANY_CLUSTERS else "")
    factory = f"{cells},Flat" if config.kind == "ivf" else config.kind
    if config.kind == "ivfpq":
        check_bytes(width, config.bytes, "index.bytes")
        if rows < LEVELS * ROWS_PER_CLUSTER:
            raise ConfigError(
                f"index.kind ivfpq needs at least {LEVELS * ROWS_PER_CLUSTER:,} rows to learn its codes from, but "
                f"the store has {rows:,}; use exact"
            )
        factory = f"OPQ{config.bytes},{cells},PQ{config.bytes}"
    try:
        # L2 between unit vectors gives the same order as cosine, also after a transform that centres the keys.
        index = faiss.index_factory(width, factory, faiss.METRIC_L2)
    except RuntimeError as error:
        raise _unusable(config, width, error) from error
    if isinstance(index, faiss.IndexIDMap | faiss.IndexIDMap2):
        raise ConfigError(f"index.kind {config.kind!r}: gnnlm numbers the rows itself; leave out IDMap")
    return index


def build_faiss_parts(
    draft: Draft, encoded: Artifact, stream: Stream, config: IndexConfig, seed: int, spread: Spread = here
) -> None:
    """Train an index on a sample of all keys, and make a copy of it with the rows of each segment."""
    file = draft.file(TRAINED)
    if not draft.resumed:
        for path in spread(draft.shards, partial(train_to, encoded, stream, config, seed), [Task("trained", TRAINED)]):
            disk.rename(path, file)
            draft.commit(TRAINED)
    learned, segments = file_digest(file), zip(stream.segments, files_of(encoded, "train."), strict=True)
    inputs = [index_inputs(files.artifact.fingerprint, text, learned, config.metric) for text, files in segments]
    names = [part_name(number, PART) for number in range(len(inputs))]
    missing = [n for n, name in enumerate(names) if found_part(draft.path.parent / name, inputs[n]) is None]
    reads = (f"{draft.folder.name}/{TRAINED}",)
    tasks = [Task("filled", f"index.{number:04d}", {"segment": number}, reads) for number in missing]
    filled = spread(draft.shards, partial(fill_index, encoded, stream, config.metric, file), tasks)

    def moved(part: Draft, number: int) -> dict[str, Any]:
        disk.rename(next(filled), part.file("index.faiss"))
        return {"rows": len(Rows.of(stream.segments[number]))}

    for number, name in enumerate(names):
        draft.part(name, inputs[number], partial(moved, number=number))


def index_inputs(states: str, text: Stream, trained: str, metric: str) -> dict[str, str]:
    """What the index of a segment is made from: its states, by fingerprint, its text, and the trained index's file."""
    return {"states": states, "text": text.fingerprint, "trained": trained, "metric": metric}


def train_to(encoded: Artifact, stream: Stream, config: IndexConfig, seed: int, path: Path) -> None:
    """Write a trained index."""
    index = train_index(keys_of(encoded, "train"), Rows.of(stream), config, seed)
    with writing(path):
        faiss.write_index(index, str(path))


def train_index(keys: Array, rows: Rows, config: IndexConfig, seed: int) -> Any:
    """An index without rows, trained on some of the keys."""
    index = empty_index(config, keys.shape[1], len(rows))
    ivf = faiss.try_extract_index_ivf(index)
    wanted = training_rows(0 if ivf is None else ivf.nlist, len(rows))
    sample = np.sort(np.random.default_rng(seed).permutation(len(rows))[:wanted])
    if ivf is not None:
        ivf.cp.seed = seed + 1
        ivf.cp.min_points_per_centroid = 1
    say(f"index: training on {len(sample):,} of {len(rows):,} rows")
    try:
        index.train(_keys(keys, rows.positions(torch.from_numpy(sample)), config.metric))
    except RuntimeError as error:
        raise _unusable(config, keys.shape[1], error) from error
    return index


def fill_index(encoded: Artifact, stream: Stream, metric: str, trained: Path, segment: int, path: Path) -> None:
    """Write a copy of a trained index with the rows of one segment."""
    keys, rows = files_of(encoded, "train.")[segment].array(key_file(encoded)), Rows.of(stream.segments[segment])
    fill_with(trained, keys, rows, metric, path, numbered("index", segment, len(stream.segments)))


def fill_with(trained: Path, keys: Array, rows: Rows, metric: str, path: Path, label: str = "index") -> None:
    """Write a copy of a trained index with these rows."""
    index = faiss.read_index(str(trained))
    with Track(label, len(rows), "rows") as track:
        for start in range(0, len(rows), BATCH):
            some = torch.arange(start, min(start + BATCH, len(rows)))
            index.add(_keys(keys, rows.positions(some), metric))
            track.advance(len(some))
    with writing(path):
        faiss.write_index(index, str(path))


def open_faiss_index(path: Path, keys: Array, rows: Rows, metric: str, probes: int) -> FaissIndex:
    index = faiss.read_index(str(path))
    ivf = faiss.try_extract_index_ivf(index)
    if ivf is not None:
        ivf.nprobe = min(probes, ivf.nlist)
        quantizer = faiss.downcast_index(ivf.quantizer)
        if isinstance(quantizer, faiss.IndexHNSW):  # clusters are found through a graph: examine more than are needed
            quantizer.hnsw.efSearch = max(quantizer.hnsw.efSearch, 2 * ivf.nprobe)
    return FaissIndex(index, keys, rows, metric)


def _keys(keys: Array, positions: Tensor, metric: str) -> Floats:
    made: Floats = np.ascontiguousarray(as_keys(read_rows(keys, positions), metric).numpy())
    return made


def _unusable(config: IndexConfig, width: int, error: Exception) -> ConfigError:
    reason = str(error).strip().splitlines()[0].rsplit(": ", 1)[-1]
    return ConfigError(
        f"index.kind {config.kind!r} cannot be built over keys of width {width}: {reason}; use exact, ivf, or another "
        "FAISS factory string"
    )
