"""Building the index: one trained index, and a copy of it with the rows of each segment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gnnlm.artifact import Artifact, Draft
from gnnlm.config import IndexConfig
from gnnlm.corpus.stream import Stream
from gnnlm.engine import Spread, here
from gnnlm.progress import say
from gnnlm.retrieval.auto_index import choose_index
from gnnlm.retrieval.index import SomeRows, live_rows
from gnnlm.retrieval.index_recall import checked_keys, checked_recall
from gnnlm.retrieval.open_index import open_parts
from gnnlm.retrieval.tombstones import without_removed


def build_index(
    draft: Draft,
    encoded: Artifact,
    stream: Stream,
    config: IndexConfig,
    seed: int,
    spread: Spread = here,
    live: Sequence[Tensor | None] = (),
) -> Artifact:
    """Index the train split. Exact search needs no file of its own: it reads the store's keys.

    `live`, where documents were removed, says for each segment which positions may be found: the index is trained and
    compared with exact search on these. All rows are in it, as in the index of any segment.
    """
    rows = live_rows(stream, live)
    chosen = choose_index(config, len(rows), int(encoded.facts["width"]))
    if config.kind == "auto":
        say(f"index: auto chose {chosen.kind}, as {chosen.why}")
    facts: dict[str, Any] = {"rows": len(rows), "metric": config.metric, "kind": chosen.kind}
    if config.kind == "auto":
        facts |= {"asked": "auto", "why": chosen.why}
    if chosen.kind == "exact":
        say(f"index: exact search over {len(rows):,} rows")
        return draft.finish(facts)
    from gnnlm.retrieval.faiss_build import build_faiss_parts  # FAISS is not imported where search is exact

    parts = build_faiss_parts(draft, encoded, stream, config, seed, spread, rows)
    index = open_parts(parts, encoded, stream, config.metric, config.probes)
    if isinstance(rows, SomeRows):
        each = zip(stream.segments, live, strict=True)
        index = without_removed(index, live, [len(live_rows(segment, [one])) for segment, one in each])
    keys_ND = checked_keys(encoded, seed)
    recall = checked_recall(index, encoded, rows, keys_ND)
    words = ", ".join(f"recall@{k} {value:.3f}" for k, value in recall.items())
    say(f"index: {words} of {len(keys_ND)} valid positions, against exact search")
    return draft.finish({**facts, "recall": recall, "recall_queries": len(keys_ND), "probes": config.probes})
