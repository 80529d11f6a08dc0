"""Own past: the text that is being read is looked up too, as far as the base model no longer sees it.

The state at offset j of a text, which predicts token j, becomes a row of that text alone. The prediction of token t may
find it if
- j lies before the window in which the base model reads token t: what it still sees needs no looking up;
- j + right < t: every node of the row's window has been read, so nothing of what comes is known.
Both depend on offsets alone, so predictions do not depend on how a text is cut into reads. Such rows are made as those
of the store are, and are numbered behind its last position: that of offset j is the store's size plus j.

Shapes: B texts, T tokens, N queries, K neighbours, R rows, P positions, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gnnlm.corpus.document import TokenizedDocument
from gnnlm.corpus.in_memory import MemoryStream
from gnnlm.corpus.windows import window_start
from gnnlm.datastore.quantize import CodedTable
from gnnlm.datastore.store import Segment, Store
from gnnlm.datastore.tables import Table
from gnnlm.lm.base_lm import BaseLM
from gnnlm.lm.hf_tokenizer import align
from gnnlm.lm.window_reader import Tokens
from gnnlm.predict.overlay import Lines, cached_lines, coded_like, with_segments
from gnnlm.predict.predictor import Predictor
from gnnlm.retrieval.exact import ExactIndex
from gnnlm.retrieval.index import Allowed, as_keys
from gnnlm.retrieval.neighbours import Neighbours
from gnnlm.retrieval.segmented import merged

NAME = "own:text"  # what a text is cited as in its own sources


@dataclass(frozen=True)
class OwnPast:
    """How rows are made of a text that is read with a predictor, and when they can be found."""

    predictor: Predictor
    window: int
    context: int
    metric: str
    dtype: torch.dtype  # of states, which are rounded already

    @property
    def right(self) -> int:
        return self.predictor.graphs.right

    def open(self, offset: int) -> int:
        """Return how many rows, from the text's beginning on, the prediction at an offset may find.

        >>> from types import SimpleNamespace
        >>> some = SimpleNamespace(graphs=SimpleNamespace(right=1))
        >>> [OwnPast(some, 4, 0, "l2", torch.float16).open(offset) for offset in range(10)]
        [0, 0, 0, 0, 3, 4, 4, 4, 7, 8]
        """
        return min(window_start(offset, self.window, self.context), max(0, offset - self.right))

    def begin(self) -> OwnText:
        """Return a text of which nothing was read."""
        nothing = torch.empty(0, 0)
        return OwnText(self, nothing, nothing, None)


@dataclass(frozen=True, eq=False)
class OwnSegment:
    """The first rows of a text, which can be found: a segment that reaches to the end of their windows, and an index.

    `states_PD` are the segment's states before any coding, `lines` what the cache has of its positions.
    """

    segment: Segment
    states_PD: Tensor
    lines: Lines
    index: ExactIndex

    @property
    def rows(self) -> int:
        return len(self.index)

    def cut(self, rows: int, positions: int) -> OwnSegment:
        """Keep the first rows and positions."""
        segment = Segment(
            _cut(self.segment.states_PD, positions), self.segment.tokens_P[:positions], torch.tensor([0, positions])
        )
        lines = [_cut(table, len(table) // len(self.segment) * positions) for table in self.lines]
        index = ExactIndex(self.index.keys_RD[:rows], self.index.positions_R[:rows], self.index.metric)
        return OwnSegment(segment, self.states_PD[:positions], lines, index)


@dataclass(frozen=True, eq=False)
class OwnText:
    """What was read of one text, as rows: those that can be found, and states and keys from there on."""

    own: OwnPast
    states_TD: Tensor
    keys_TD: Tensor
    closed: OwnSegment | None

    @property
    def rows(self) -> int:
        return 0 if self.closed is None else self.closed.rows

    @property
    def read(self) -> int:
        """How many states of the text were read."""
        return self.rows + len(self.states_TD)

    def grown(self, tokens: Tokens, states_TD: Tensor, keys_TD: Tensor) -> OwnText:
        """Return the text after more was read: `tokens` are all tokens so far, states and keys only the new ones."""
        own = self.own
        states_TD = states_TD.to("cpu", own.dtype)
        keys_TD = as_keys(keys_TD.to(own.predictor.head.device), own.metric)
        if len(self.states_TD):
            states_TD = torch.cat([self.states_TD, states_TD])
            keys_TD = torch.cat([self.keys_TD, keys_TD])
        more = own.open(self.rows + len(states_TD) - 1) - self.rows
        if not more:
            return OwnText(own, states_TD, keys_TD, self.closed)
        closed = self._closed(tokens, states_TD[: more + own.right], keys_TD[:more])
        return OwnText(own, states_TD[more:], keys_TD[more:], closed)

    def _closed(self, tokens: Tokens, states_QD: Tensor, keys_QD: Tensor) -> OwnSegment:
        """Return the rows that can be found with more of them, given the new states and keys."""
        old = self.closed
        before = self.rows
        predictor = self.own.predictor
        store = predictor.graphs.store
        positions = self.rows + len(states_QD)
        table: Table = coded_like(store, states_QD.numpy())
        if old is not None:
            states_QD = torch.cat([old.states_PD[:before], states_QD])
            table = _joined(old.segment.states_PD, before, table)
            keys_QD = torch.cat([old.index.keys_RD, keys_QD])
        tokens_P = torch.tensor(tokens[:positions])
        segment = Segment(states_QD if isinstance(table, Tensor) else table, tokens_P, torch.tensor([0, positions]))
        lines = cached_lines(predictor, segment, before)
        if old is not None:  # lines of the last positions were made before their windows were whole
            lines = [
                _joined(kept, len(made) // (positions - before) * before, made)
                for kept, made in zip(old.lines, lines, strict=True)
            ]
        rows_R = torch.arange(len(keys_QD), device=keys_QD.device)
        return OwnSegment(segment, states_QD, lines, ExactIndex(keys_QD, rows_R, self.own.metric))

    def crop(self, count: int) -> OwnText:
        """Return the text without its last `count` states."""
        if not count:
            return self
        own = self.own
        left = self.read - count
        rows = min(self.rows, own.open(left - 1))
        if self.closed is None or rows == self.rows:
            return OwnText(own, self.states_TD[: left - self.rows], self.keys_TD[: left - self.rows], self.closed)
        states_TD = torch.cat([self.closed.states_PD[rows : self.rows], self.states_TD])[: left - rows]
        keys_TD = torch.cat([self.closed.index.keys_RD[rows:], self.keys_TD])[: left - rows]
        closed = self.closed.cut(rows, rows + own.right) if rows else None
        return OwnText(own, states_TD, keys_TD, closed)

    def search(self, keys_ND: Tensor, first: int, k: int) -> Neighbours | None:
        """Return the k nearest rows of the text for each offset from `first` on; None if there are none."""
        if self.closed is None or not k:
            return None
        open_N = torch.tensor([self.own.open(first + place) for place in range(len(keys_ND))])
        barred = open_N, torch.full_like(open_N, self.rows - 1)
        return self.closed.index.search(keys_ND, k, Allowed(barred=barred))


def merged_with_own(
    neighbours: Neighbours, texts: Sequence[OwnText | None], keys_BTD: Tensor, counts: Sequence[int], k: int, size: int
) -> Neighbours:
    """Merge neighbours in a store of `size` positions with those in the texts' own pasts, [B, T, K].

    `counts` is the number of new tokens of each text."""
    if not any(text is not None and text.rows for text in texts):
        return neighbours
    lines = []
    for line, (text, count) in enumerate(zip(texts, counts, strict=True)):
        near = neighbours[line]
        found = None
        if text is not None and count:
            found = text.search(keys_BTD[line, :count], text.read - count, k)
        if found is not None:
            moved = torch.where(found.positions < 0, -1, found.positions + size).cpu()
            both = merged([near[:count], Neighbours(moved, found.similarity.cpu())], k)
            missing = Neighbours.none(len(near.positions) - count, k=both.k)
            near = Neighbours.joined([both, missing])
        lines.append(near)
    most = max(near.k for near in lines)
    padded = [near.padded(most) for near in lines]
    return Neighbours(torch.stack([p.positions for p in padded]), torch.stack([p.similarity for p in padded]))


def over_texts(
    predictor: Predictor, neighbours: Neighbours, texts: Sequence[OwnText | None]
) -> tuple[Predictor, Neighbours]:
    """Return a predictor whose store has the texts' own rows, and the neighbours as positions in it."""
    closed = [None if text is None else text.closed for text in texts]
    parts = [one for one in closed if one is not None]
    if not parts:
        return predictor, neighbours
    size = first = len(predictor.graphs.store)
    shifts = []
    for one in closed:
        shifts.append(first - size)
        first += 0 if one is None else len(one.segment)
    own_BTK = neighbours.positions >= size
    positions_BTK = neighbours.positions + torch.tensor(shifts)[:, None, None] * own_BTK
    store = Store([*predictor.graphs.store.segments, *(one.segment for one in parts)])
    return with_segments(predictor, store, [one.lines for one in parts]), replace(neighbours, positions=positions_BTK)


def with_text(store: Store, lm: BaseLM, tokens: Sequence[int]) -> Store:
    """Return a store with a text behind its last position, without states: for citing the text."""
    text = lm.detokenize(tokens)
    offsets = align([lm.bytes_of(token) for token in tokens], text)
    stream = MemoryStream([TokenizedDocument(NAME, text, list(tokens), offsets)])
    own = Segment.over(stream, np.empty((len(stream), 0), dtype=np.float32))
    return Store([*store.segments, own])


def _cut(table: Table, lines: int) -> Table:
    return table[:lines] if isinstance(table, Tensor) else CodedTable(table.codes_RM[:lines], table.quantizer)


def _joined(table: Table, lines: int, more: Table) -> Table:
    """Concatenate the first lines of a table and more lines."""
    if isinstance(table, Tensor):
        assert isinstance(more, Tensor)
        return torch.cat([table[:lines], more])
    assert isinstance(more, CodedTable)
    return CodedTable(torch.cat([table.codes_RM[:lines], more.codes_RM]), table.quantizer)
