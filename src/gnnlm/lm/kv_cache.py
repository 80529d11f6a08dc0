"""Keys and values of the tokens that attention has read, for texts of different lengths in one batch.

The tokens of a row are in consecutive slots. Before the rows read on, they are aligned at their ends, with padding
before the shorter ones. The distance between two slots is then always the distance between their tokens, which
sliding windows and linear biases depend on, and every family of models can mask padding on the left.

The tensors have free slots behind the filled ones. The first continuation of a past writes into them, since no other
past reads them; every further continuation of the same past makes a copy.

Shapes: B rows, H heads, S slots, T new tokens, d head width.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

BLOCK = 64  # free slots that a copy gets

Layers = tuple[tuple[Tensor, Tensor], ...]


class SlotRoom:
    """Counts the slots that have been written in tensors that several pasts share."""

    def __init__(self, filled: int) -> None:
        self._filled, self._lock = filled, threading.Lock()

    def claim(self, first: int, last: int) -> bool:
        """Take the slots from `first` up to `last` if those from `first` on are free; return whether they were."""
        with self._lock:
            free = self._filled == first
            self._filled = last if free else self._filled
            return free


@dataclass(frozen=True, eq=False)
class KeyValues:
    """Each layer's keys and values, [B, H, S, d], and the span of slots that each row has filled."""

    layers: Layers
    spans: tuple[range, ...]
    room: SlotRoom

    @staticmethod
    def of(layers: Layers, counts: Sequence[int]) -> KeyValues:
        """Return a past whose rows are aligned at their beginnings: counts[b] tokens in row b, then padding."""
        return KeyValues(layers, tuple(range(count) for count in counts), SlotRoom(layers[0][0].shape[-2]))

    @property
    def held(self) -> tuple[int, ...]:
        """The number of tokens in each row."""
        return tuple(len(span) for span in self.spans)

    def select(self, rows: Sequence[int]) -> KeyValues:
        """Return these rows, in this order."""
        return _together([(self, row) for row in rows])

    def crop(self, counts: Sequence[int]) -> KeyValues:
        """Return the past without the last counts[b] tokens of row b."""
        cropped = (range(s.start, s.stop - count) for s, count in zip(self.spans, counts, strict=True))
        return KeyValues(self.layers, tuple(cropped), self.room)

    def join(self, others: Sequence[KeyValues]) -> KeyValues:
        """Return the rows of all pasts, one after the other."""
        return _together([(past, row) for past in (self, *others) for row in range(len(past.spans))])

    def dense(self) -> list[tuple[Tensor, Tensor]]:
        """Return the layers without free slots; all rows must have the same number of tokens."""
        (span,) = set(self.spans)
        return [(keys[..., : span.stop, :], values[..., : span.stop, :]) for keys, values in self.layers]


class SlotGrowth:
    """Appends T slots to each layer of a past, in one forward pass."""

    def __init__(self, past: KeyValues, new: int) -> None:
        self._past, self._new, self.before = past, new, max(past.held)
        fits = self.before + new <= past.layers[0][0].shape[-2]
        together = all(span.stop == self.before for span in past.spans)
        self._in_place = together and fits and past.room.claim(self.before, self.before + new)

    def append(self, slots: Tensor, new: Tensor) -> Tensor:
        """Return a tensor with the old slots, aligned at their ends, and the new ones behind them."""
        if not self._in_place:
            slots = _align(slots, self._past.spans, self._new)
        slots[..., self.before : self.before + self._new, :] = new
        return slots

    def seen(self, slots: Tensor) -> Tensor:
        """Return the slots that the new tokens attend to, without the free ones."""
        return slots[..., : self.before + self._new, :]

    def grown(self, layers: Layers, counts: Sequence[int]) -> KeyValues:
        """Return the past after the forward pass, with counts[b] more tokens in row b."""
        held = self._past.held
        spans = tuple(range(self.before - old, self.before + count) for old, count in zip(held, counts, strict=True))
        return KeyValues(layers, spans, self._past.room if self._in_place else SlotRoom(self.before + self._new))


def _together(rows: Sequence[tuple[KeyValues, int]]) -> KeyValues:
    """Copy rows of one past or of several into a new past."""
    spans = [past.spans[row] for past, row in rows]
    longest = max(len(span) for span in spans)

    def copied(layer: int, part: int) -> Tensor:
        return _align([past.layers[layer][part][row] for past, row in rows], spans, 0)

    layers = tuple((copied(layer, 0), copied(layer, 1)) for layer in range(len(rows[0][0].layers)))
    return KeyValues(layers, tuple(range(longest - len(span), longest) for span in spans), SlotRoom(longest))


def _align(rows: Sequence[Tensor] | Tensor, spans: Sequence[range], new: int) -> Tensor:
    """Return the spans of rows [H, S, d], padded with zeros on the left, with `new` and `BLOCK` free slots behind."""
    longest = max(len(span) for span in spans)
    out = rows[0].new_empty(len(rows), *rows[0].shape[:-2], longest + new + BLOCK, rows[0].shape[-1])
    for line, row, span in zip(out, rows, spans, strict=True):
        begin = longest - len(span)
        line[..., :begin, :] = 0
        line[..., begin:longest, :] = row[..., span.start : span.stop, :]
    return out
