"""How a FAISS index is built: one is trained on a sample of all keys, and every segment gets a copy with its rows."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gnnlm.artifact import Array, Artifact, Draft, disk, draft_path, file_digest, found_part, writing
from gnnlm.config import IndexConfig
from gnnlm.config.retrieval_config import ROWS_PER_CLUSTER
from gnnlm.corpus.stream import Stream
from gnnlm.datastore.quantize import LEVELS, OPQ_ROUNDS, check_bytes
from gnnlm.datastore.store import read_rows
from gnnlm.engine import FileTask, Spread, Work, here
from gnnlm.errors import ConfigError
from gnnlm.layout import part_name
from gnnlm.progress import Track, numbered, say
from gnnlm.retrieval.auto_index import factory_of, resolved
from gnnlm.retrieval.index import Rows, SomeRows, as_keys, keys_of, segment_keys

Floats = npt.NDArray[np.float32]
PART, TRAINED, FILE = "index", "trained.faiss", "index.faiss"
TRAIN_ROWS = 262_144  # a quantizer is trained on this many rows, or on more if it has very many clusters
BATCH = 65_536


def training_rows(clusters: int, rows: int) -> int:
    """Return how many of its rows an index with `clusters` clusters is trained on."""
    return min(rows, max(TRAIN_ROWS, ROWS_PER_CLUSTER * clusters))


def check_index(config: IndexConfig, width: int, rows: int) -> None:
    """Refuse, before the long work, an index that cannot be built over `rows` keys of this width."""
    if resolved(config, rows, width).kind != "exact":
        empty_index(config, width, rows)


def empty_index(config: IndexConfig, width: int, rows: int) -> Any:
    """Return an untrained index of the configured kind, for about `rows` rows."""
    config = resolved(config, rows, width)
    if config.kind == "paper":
        check_bytes(width, config.bytes, "index.bytes")
        if rows < LEVELS * ROWS_PER_CLUSTER:
            raise ConfigError(
                f"index.kind paper needs at least {LEVELS * ROWS_PER_CLUSTER:,} rows to learn its codes from, but "
                f"the store has {rows:,}; use exact"
            )
    try:
        # L2 between unit vectors gives the same order as cosine, also after a transform that centres the keys.
        index = faiss.index_factory(width, factory_of(config, rows), faiss.METRIC_L2)
    except RuntimeError as error:
        raise _unusable(config, width, error) from error
    if isinstance(index, faiss.IndexIDMap | faiss.IndexIDMap2):
        raise ConfigError(f"index.kind {config.kind!r}: gnnlm numbers the rows itself; leave out IDMap")
    return index


def build_faiss_parts(
    draft: Draft,
    encoded: Artifact,
    stream: Stream,
    config: IndexConfig,
    seed: int,
    spread: Spread = here,
    learned_from: Rows | SomeRows | None = None,
) -> list[Path]:
    """Train an index on a sample of all keys, fill a copy for each segment, and return their files.

    `learned_from`: the rows that the sample is drawn from, if not all.
    """
    file = draft.file(TRAINED)
    if not draft.resumed:
        train = partial(train_to, encoded, stream, config, seed, rows=learned_from)
        for path in spread.files(draft.shards, train, [FileTask("trained", TRAINED)]):
            disk.rename(path, file)
            draft.commit(TRAINED)
    learned = file_digest(file)
    segments = zip(stream.segments, encoded.parts, strict=True)
    inputs = [index_inputs(states.fingerprint, text, learned, config.metric) for text, states in segments]
    names = [part_name(number, PART) for number in range(len(inputs))]
    missing = [n for n, name in enumerate(names) if found_part(draft.path.parent / name, inputs[n]) is None]
    reads = (f"{draft.folder.name}/{TRAINED}",)
    tasks = [FileTask("filled", f"index.{number:04d}", {"segment": number}, reads) for number in missing]
    filled = spread.files(draft.shards, filling(encoded, stream, config.metric, file), tasks)

    def moved(part: Draft, number: int) -> dict[str, Any]:
        disk.rename(next(filled), part.file(FILE))
        return {"rows": len(Rows.of(stream.segments[number]))}

    for number, name in enumerate(names):
        draft.part(name, inputs[number], partial(moved, number=number))
    return [_place(draft.path.parent / name) / FILE for name in names]


def index_inputs(states: str, text: Stream, trained: str, metric: str) -> dict[str, str]:
    """Return the inputs of a segment's index: fingerprints of its states and text, checksum of the trained index."""
    return {"states": states, "text": text.fingerprint, "trained": trained, "metric": metric}


def _place(part: Path) -> Path:
    """Return where a part is: still waiting for the others, or already in place."""
    waiting = draft_path(part)
    return waiting if (waiting / FILE).is_file() else part


def train_to(
    encoded: Artifact,
    stream: Stream,
    config: IndexConfig,
    seed: int,
    path: Path,
    rows: Rows | SomeRows | None = None,
) -> None:
    """Write an index that was trained on all rows, or on some."""
    index = train_index(keys_of(encoded, "train"), Rows.of(stream) if rows is None else rows, config, seed)
    with writing(path):
        faiss.write_index(index, str(path))


def train_index(keys: Array, rows: Rows | SomeRows, config: IndexConfig, seed: int) -> Any:
    """Return an index without rows, trained on some of the keys."""
    index = empty_index(config, keys.shape[1], len(rows))
    ivf = faiss.try_extract_index_ivf(index)
    wanted = training_rows(0 if ivf is None else ivf.nlist, len(rows))
    sample = np.sort(np.random.default_rng(seed).permutation(len(rows))[:wanted])
    if ivf is not None:
        ivf.cp.seed = seed + 1
        ivf.cp.min_points_per_centroid = 1
        coded: Any = faiss.downcast_index(ivf)
        if hasattr(coded, "do_polysemous_training"):
            coded.do_polysemous_training = False  # orders codes for Hamming distances, which nothing here computes
    for transform in _transforms(index):
        if isinstance(transform, faiss.OPQMatrix):
            transform.niter = OPQ_ROUNDS
    say(f"index: training on {len(sample):,} of {len(rows):,} rows")
    try:
        index.train(_keys(keys, rows.positions(torch.from_numpy(sample)), config.metric))
    except RuntimeError as error:
        raise _unusable(config, keys.shape[1], error) from error
    return index


def _transforms(index: Any) -> list[Any]:
    chain: Any = index.chain if isinstance(index, faiss.IndexPreTransform) else None
    return [] if chain is None else [faiss.downcast_VectorTransform(chain.at(n)) for n in range(chain.size())]


def filling(encoded: Artifact, stream: Stream, metric: str, trained: Path) -> Work:
    """Return the work of the tasks that fill a copy of a trained index for each segment."""

    def fill(segment: int, path: Path) -> None:
        keys = segment_keys(encoded, segment)
        rows = Rows.of(stream.segments[segment])
        fill_index(trained, keys, rows, metric, path, numbered("index", segment, len(encoded.parts)))

    return fill


def fill_index(trained: Path, keys: Array, rows: Rows, metric: str, path: Path, label: str = "index") -> None:
    """Write a copy of a trained index with the rows of a segment, given the keys of all its positions."""
    index = faiss.read_index(str(trained))
    with Track(label, len(rows), "rows") as track:
        for start in range(0, len(rows), BATCH):
            some = torch.arange(start, min(start + BATCH, len(rows)))
            index.add(_keys(keys, rows.positions(some), metric))
            track.advance(len(some))
    with writing(path):
        faiss.write_index(index, str(path))


def _keys(keys: Array, positions: Tensor, metric: str) -> Floats:
    made: Floats = np.ascontiguousarray(as_keys(read_rows(keys, positions), metric).numpy())
    return made


def _unusable(config: IndexConfig, width: int, error: Exception) -> ConfigError:
    reason = str(error).strip().splitlines()[0].rsplit(": ", 1)[-1]
    return ConfigError(
        f"index.kind {config.kind!r} cannot be built over keys of width {width}: {reason}; use exact, ivf, or another "
        "FAISS factory string"
    )
