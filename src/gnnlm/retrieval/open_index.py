"""Opening the index of a store: FAISS, as it was built, or exact search over the stored keys.

FAISS is imported inside functions: a run that searches exactly starts without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gnnlm.artifact import Artifact
from gnnlm.corpus.stream import Stream
from gnnlm.retrieval.exact import ExactIndex
from gnnlm.retrieval.index import Index, Rows, segment_keys
from gnnlm.retrieval.segmented import SegmentedIndex

if TYPE_CHECKING:
    from gnnlm.retrieval.faiss_index import FaissIndex


def open_index(made: Artifact, encoded: Artifact, stream: Stream, probes: int, device: str = "cpu") -> SegmentedIndex:
    """Open the index of a run over the keys of its store; a segment's part is read at the first search."""
    metric = made.facts["metric"]
    if made.facts["kind"] == "exact":
        return open_exact(encoded, stream, metric, device)
    return open_parts([partial(part.file, "index.faiss") for part in made.parts], encoded, stream, metric, probes)


def open_parts(
    files: Sequence[Path | Callable[[], Path]], encoded: Artifact, stream: Stream, metric: str, probes: int
) -> SegmentedIndex:
    """Open the FAISS index of each segment from its file, which is asked for when the segment is first searched."""
    from gnnlm.retrieval.faiss_index import FaissIndex, open_faiss_index

    def opened(number: int) -> FaissIndex:
        rows = Rows.of(stream.segments[number])
        file = files[number]
        path = file if isinstance(file, Path) else file()
        return open_faiss_index(path, segment_keys(encoded, number), rows, metric, probes)

    return SegmentedIndex.over(stream, metric, opened, assign=FaissIndex.assign)


def open_exact(encoded: Artifact, stream: Stream, metric: str, device: str = "cpu") -> SegmentedIndex:
    """Open exact search over the keys of a store, whatever index its run has."""

    def opened(number: int) -> Index:
        positions_R = Rows.of(stream.segments[number]).all()
        return ExactIndex.over(segment_keys(encoded, number), positions_R, metric, device)

    return SegmentedIndex.over(stream, metric, opened)
