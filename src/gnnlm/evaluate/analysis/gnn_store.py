"""The store of GNN states: the graph network's state of every train position.

A key must not know its own token, nor what its document says later: no query could resemble such a key. So a train
position's state is made as in training:
- its context is what the base model read before its token, document by document;
- its neighbours are searched under the run's leakage rule (`search.exclude`). Unrestricted, a position finds itself
  first, and the window of that row holds the state that has read the token.
They are those of the run's table. Positions that the run did not query (`search.max_train`, or a base model trained on
most of the text) are searched here, in the same index under the same rule. All positions are searched here
- where the table was made from states of a first reading, which are not those of the store;
- where the rule counts on training's blocks. Documents are read whole here, so under `receptive-field` a deep network
  may carry what a token retrieved further than a block, and the barred range is widened accordingly.

Shapes: P positions, N some positions, K neighbours, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gnnlm.artifact import Artifact, Draft, require_space
from gnnlm.datastore.codec import code_states, open_codec
from gnnlm.datastore.store import read_rows
from gnnlm.evaluate.analysis.score_cache import shards
from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.predict.split_scoring import SearchedText
from gnnlm.progress import Track
from gnnlm.retrieval.index import keys_of
from gnnlm.retrieval.neighbours import Neighbours, NeighbourTable
from gnnlm.retrieval.search import LeakageRule, Queries

STATES = "train.states.npy"


@dataclass(frozen=True)
class TrainNeighbours:
    """The neighbours that train positions may have, from the run's table or searched now."""

    subject: Subject
    table: NeighbourTable | None
    queries: Queries

    @classmethod
    def of(cls, subject: Subject) -> TrainNeighbours:
        config, parts = subject.config, subject.snapshot
        encoded = subject.artifact("encode")
        searched = parts.searched("train")
        field = encoded.facts["receptive_field"]
        continuous = config.lm.continuous
        rule = LeakageRule.of(config, field, unbroken=True)
        alike = rule.span == LeakageRule.of(config, field).span or (rule.whole_document and not continuous)
        k = min(parts.predictor.graph_k, searched.table.k)
        stream = parts.streams["train"]
        queries = Queries(stream, keys_of(encoded, "train"), np.arange(len(stream)), k, rule, continuous)
        first_reading = searched.text is not parts.encoded["train"]
        return cls(subject, searched.table if alike and not first_reading else None, queries)

    @property
    def unknown(self) -> int:
        """How many positions are not in the table."""
        return len(self.queries.positions) - (0 if self.table is None else len(self.table))

    def at(self, positions_N: Tensor) -> Neighbours:
        """The neighbours of some positions, [N, K]."""
        k = self.queries.k
        if self.table is None:
            return self._search(positions_N)
        found = self.table.at(positions_N, k)
        if self.table.queried is None:
            return found
        missing_N = ~torch.isin(positions_N, self.table.queried)
        if bool(missing_N.any()):
            searched = self._search(positions_N[missing_N])
            found.positions[missing_N], found.similarity[missing_N] = searched.positions, searched.similarity
        return found

    def _search(self, positions_N: Tensor) -> Neighbours:
        queries = self.queries
        places = queries.stream.places() if queries.continuous else None
        keys_ND = read_rows(queries.keys, positions_N)
        allowed = queries.allowed(positions_N.numpy(), places)
        return self.subject.snapshot.index.search(keys_ND, queries.k, allowed).padded(queries.k).to("cpu")


@torch.inference_mode()
def build_gnn_store(draft: Draft, subject: Subject) -> Artifact:
    """Write the states, in half precision, and their codes instead where the run's codec is `pq`."""
    near = TrainNeighbours.of(subject)
    predictor = subject.snapshot.predictor
    train = subject.snapshot.encoded["train"]
    stream = subject.snapshot.streams["train"]
    require_space(draft.folder, 2 * len(stream) * predictor.head.width - draft.bytes_there, "the store of GNN states")
    states = draft.writer(STATES, (len(stream), predictor.head.width), np.float16)
    with Track("GNN states of train", len(stream), "positions", states.rows) as track:
        for positions in shards(stream.starts.tolist(), states.rows):
            found = near.at(positions)
            table = NeighbourTable(found.positions.numpy(), found.similarity.numpy(), positions)
            text = SearchedText(train, table, subject.config.lm.continuous)
            for _, prediction in text.predictions(predictor, subject.config.eval.block, ("gnn",), positions):
                states.append(prediction.states["gnn"].half().cpu().numpy())
            draft.commit()
            track.advance(len(positions))
    written = np.load(draft.folder / STATES, mmap_mode="r")
    coded = code_states(draft, written, subject.config.codec, subject.seed)
    files = (STATES,) if coded["kind"] == "fp16" else ("codes.npy", "quantizer.safetensors")
    return draft.finish({**coded, "rows": len(stream), "k": near.queries.k, "searched_here": near.unknown}, files)


def gnn_keys(store: Artifact, positions_N: Tensor, device: str = "cpu") -> Tensor:
    """The GNN's states of some train positions, as they are stored, [N, D]."""
    coded = open_codec(store, device)
    if coded is None:
        return read_rows(store.array(STATES), positions_N)
    (table,) = coded  # the store is a single array, whatever the segments of the run
    return table.decode(positions_N)
