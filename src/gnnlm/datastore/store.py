"""Reading a store: tokens, states and documents, by position.

A segment holds whole documents and all data of their positions; it never changes. A store is a list of segments with
one numbering: a position is its segment's base plus its row in the segment. Nothing here holds more than a few bytes
per document in memory; tokens and states are memory-mapped.

Documents may be removed from a store: they keep their numbers and positions, but nothing may find or show them.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gnnlm.artifact import Array, Artifact, CheckedArray
from gnnlm.corpus.stream import END, Passage, Stream, TokenStream, split_files
from gnnlm.datastore.checked import CheckedTensor
from gnnlm.datastore.quantize import CodedTable


@dataclass(frozen=True)
class Segment:
    """Documents laid end to end: states (half precision, or coded), tokens (-1 past an end), and where each begins."""

    states_PD: Tensor | CodedTable
    tokens_P: Tensor
    starts: Tensor
    texts: TokenStream | None = None
    removed: frozenset[int] = frozenset()  # the numbers of documents that are not to be found
    tags: Mapping[str, Collection[int]] = field(default_factory=dict)  # the documents that have each tag

    @classmethod
    def over(cls, stream: TokenStream, states: Array) -> Segment:
        """Make a segment of a stream of one segment and its states."""
        return cls(mapped(states), mapped(stream.tokens), torch.from_numpy(np.array(stream.starts)), stream)

    def __len__(self) -> int:
        return len(self.tokens_P)

    @property
    def width(self) -> int:
        return self.states_PD.shape[1] if isinstance(self.states_PD, Tensor) else self.states_PD.width

    def states(self, positions: Tensor) -> Tensor:
        """Return states at the positions, float32, [..., D]."""
        if isinstance(self.states_PD, Tensor):
            return self.states_PD[positions].float()
        return self.states_PD.decode(positions)

    def tokens(self, positions: Tensor) -> Tensor:
        return self.tokens_P[positions].long()

    def document_of(self, positions: Tensor) -> Tensor:
        """Return the number of each position's document.

        >>> Segment(torch.zeros(5, 1), torch.zeros(5), torch.tensor([0, 2, 5])).document_of(torch.tensor([1, 2]))
        tensor([0, 1])
        """
        return torch.searchsorted(self.starts, positions.contiguous(), right=True) - 1

    def bounds(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and the last position of each position's document."""
        document = self.document_of(positions)
        return self.starts[document], self.starts[document + 1] - 1

    def coded(self, table: CodedTable) -> Segment:
        """Return the same positions with coded states."""
        return replace(self, states_PD=table)

    @cached_property
    def live_P(self) -> Tensor | None:
        """Which positions belong to documents that are not removed; None if all do.

        >>> segment = Segment(torch.zeros(5, 1), torch.zeros(5), torch.tensor([0, 2, 5]), removed=frozenset([0]))
        >>> segment.live_P.tolist()
        [False, False, True, True, True]
        """
        if not self.removed:
            return None
        live_D = torch.ones(len(self.starts) - 1, dtype=torch.bool)
        live_D[torch.tensor(sorted(self.removed))] = False
        return live_D.repeat_interleave(self.starts.diff())

    @property
    def live_tokens_P(self) -> Tensor:
        """The tokens, with those of removed documents as if they were ends of documents."""
        return self.tokens_P if self.live_P is None else self.tokens_P.masked_fill(~self.live_P, END)


class Store:
    """Segments one after the other, read by position."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        assert segments, "a store has at least one segment"
        self.segments = tuple(segments)
        sizes = torch.tensor([len(segment) for segment in self.segments])
        self.bases = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])
        counts = torch.tensor([len(segment.starts) - 1 for segment in self.segments])
        self._first_document = counts.cumsum(0) - counts

    @classmethod
    def open(cls, encoded: Artifact, stream: Stream) -> Store:
        """Open a split as it was encoded."""
        states = (files.array("states.npy") for files in split_files(encoded, stream.split))
        return cls([Segment.over(segment, part) for segment, part in zip(stream.segments, states, strict=True)])

    def with_states(self, states: Array) -> Store:
        """Return the same positions with other states, given for all of them."""
        ends = self.bases.tolist()
        parts = zip(self.segments, itertools.pairwise(ends), strict=True)
        return Store([replace(segment, states_PD=mapped(states[low:high])) for segment, (low, high) in parts])

    def coded(self, tables: Sequence[CodedTable]) -> Store:
        """Return the same positions with coded states, a table for each segment."""
        return Store([segment.coded(table) for segment, table in zip(self.segments, tables, strict=True)])

    def __len__(self) -> int:
        return int(self.bases[-1])

    @cached_property
    def live(self) -> list[int]:
        """The numbers of the documents that are not removed."""
        found = []
        for segment, first in zip(self.segments, self._first_document.tolist(), strict=True):
            found += [first + number for number in range(len(segment.starts) - 1) if number not in segment.removed]
        return found

    @cached_property
    def tags(self) -> dict[str, set[int]]:
        """The numbers of the documents that have each tag and are not removed."""
        found: dict[str, set[int]] = {}
        for segment, first in zip(self.segments, self._first_document.tolist(), strict=True):
            for tag, numbers in segment.tags.items():
                found.setdefault(tag, set()).update(first + n for n in numbers if n not in segment.removed)
        return found

    @property
    def width(self) -> int:
        return self.segments[0].width

    def states(self, positions: Tensor) -> Tensor:
        """Return states at the positions, float32, [..., D]."""
        (found,) = self._each(positions, lambda segment, rows, number: (segment.states(rows),))
        return found

    def tokens(self, positions: Tensor) -> Tensor:
        """Return the token at each position, int64; -1 past a document's end."""
        (found,) = self._each(positions, lambda segment, rows, number: (segment.tokens(rows),))
        return found

    def bounds(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and the last position of each position's document."""

        def within(segment: Segment, rows: Tensor, number: int) -> tuple[Tensor, ...]:
            first, last = segment.bounds(rows)
            return first + self.bases[number], last + self.bases[number]

        first, last = self._each(positions, within)
        return first, last

    def document_of(self, positions: Tensor) -> Tensor:
        """Return the number of each position's document, counted through all segments."""
        first = self._first_document
        (found,) = self._each(positions, lambda segment, rows, number: (segment.document_of(rows) + first[number],))
        return found

    def token_positions(self) -> Tensor:
        """Return all positions that have a token."""
        parts = zip(self.segments, self.bases.tolist(), strict=False)
        return torch.cat([torch.nonzero(segment.tokens_P >= 0)[:, 0] + base for segment, base in parts])

    @cached_property
    def names(self) -> list[str]:
        """The name of every document, in the order of their numbers."""
        return [name for segment in self.segments for name in _texts(segment).names]

    @cached_property
    def document_starts(self) -> Tensor:
        """The first position of every document, and the store's end."""
        starts = [segment.starts[:-1] + base for segment, base in zip(self.segments, self.bases[:-1], strict=True)]
        return torch.cat([*starts, self.bases[-1:]])

    def passage(self, position: int, left: int, right: int) -> Passage:
        """Return the token at a position with `left` tokens before it and `right` after it, within its document."""
        texts, row = self._text_at(position)
        return texts.passage(row, left, right)

    def characters(self, position: int) -> tuple[int, int]:
        """Return where the token at a position begins and ends in the text of its document."""
        texts, row = self._text_at(position)
        return texts.characters(row)

    def document(self, number: int) -> tuple[str, list[int]]:
        """Return the text of a document, and the character at which each token begins, then where the last one ends."""
        part = int(torch.searchsorted(self._first_document, number, right=True)) - 1
        return _texts(self.segments[part]).document(number - int(self._first_document[part]))

    def _text_at(self, position: int) -> tuple[TokenStream, int]:
        number = int(torch.searchsorted(self.bases, position, right=True)) - 1
        return _texts(self.segments[number]), position - int(self.bases[number])

    def _each(
        self, positions: Tensor, read: Callable[[Segment, Tensor, int], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """Read every position from its segment."""
        if len(self.segments) == 1:
            return read(self.segments[0], positions, 0)
        flat = positions.flatten()
        number_N = torch.searchsorted(self.bases, flat, right=True) - 1
        outs: list[Tensor] = []
        for number in number_N.unique().tolist():
            here = torch.nonzero(number_N == number)[:, 0]
            parts = read(self.segments[number], flat[here] - self.bases[number], number)
            outs = outs or [part.new_empty((len(flat), *part.shape[1:])) for part in parts]
            for out, part in zip(outs, parts, strict=True):
                out[here] = part
        if not outs:  # no positions at all
            return tuple(part for part in read(self.segments[0], positions, 0))
        return tuple(out.view((*positions.shape, *out.shape[1:])) for out in outs)


def _texts(segment: Segment) -> TokenStream:
    assert segment.texts is not None, "this segment has no texts"
    return segment.texts


def read_rows(array: Array, rows: Tensor) -> Tensor:
    """Return some rows of a memory-mapped array, or of several that are joined."""
    return torch.from_numpy(np.asarray(array[rows.numpy()]))


def mapped(array: npt.NDArray[Any]) -> Tensor:
    """Return a memory-mapped array as a tensor."""
    checked = array if isinstance(array, CheckedArray) else None
    with warnings.catch_warnings():  # the map is read-only, and nothing here writes to it
        warnings.simplefilter("ignore", UserWarning)
        tensor = torch.from_numpy(array if checked is None else checked.array)
    return tensor if checked is None else CheckedTensor.over(checked, tensor)
