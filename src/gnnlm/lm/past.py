"""The keys and values that attention keeps of tokens it has read, for texts of different length in one batch.

A row's tokens lie in neighbouring slots. Before rows read on, their ends are put together: what is before a shorter
row is padding. So the distance of two slots is always that of their tokens, as sliding windows and linear biases
need, and padding on the left is what every family knows how to mask.

Slots are appended in place where there is room behind: the first to read on from a past writes there, which no other
past looks at, and whoever reads on from the same past later makes a copy.

Shapes: B rows, H heads, S slots, T new tokens, d head width.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

BLOCK = 64  # slots of room behind what is copied

Layers = tuple[tuple[Tensor, Tensor], ...]


class Room:
    """How many slots of some tensors are written to."""

    def __init__(self, filled: int) -> None:
        self._filled, self._lock = filled, threading.Lock()

    def claim(self, first: int, last: int) -> bool:
        """Whether the slots from `first` on were still free; if so, those before `last` no longer are."""
        with self._lock:
            free = self._filled == first
            self._filled = last if free else self._filled
            return free


@dataclass(frozen=True, eq=False)
class KeyValues:
    """Each layer's keys and values, [B, H, S, d] with room behind, and the slots that each row has filled."""

    layers: Layers
    spans: tuple[range, ...]
    room: Room

    @staticmethod
    def of(layers: Layers, counts: Sequence[int]) -> KeyValues:
        """Rows that begin together; what is behind counts[b] tokens of row b is padding."""
        return KeyValues(layers, tuple(range(count) for count in counts), Room(layers[0][0].shape[-2]))

    @property
    def held(self) -> tuple[int, ...]:
        """Tokens of each row."""
        return tuple(len(span) for span in self.spans)

    def select(self, rows: Sequence[int]) -> KeyValues:
        """These rows, in this order."""
        return _together([(self, row) for row in rows])

    def crop(self, counts: Sequence[int]) -> KeyValues:
        """Without the last counts[b] tokens of row b."""
        cropped = (range(s.start, s.stop - count) for s, count in zip(self.spans, counts, strict=True))
        return KeyValues(self.layers, tuple(cropped), self.room)

    def join(self, others: Sequence[KeyValues]) -> KeyValues:
        """The rows of all, one behind the other."""
        return _together([(past, row) for past in (self, *others) for row in range(len(past.spans))])

    def dense(self) -> list[tuple[Tensor, Tensor]]:
        """The layers, where all rows have as many tokens, without the room."""
        (span,) = set(self.spans)
        return [(keys[..., : span.stop, :], values[..., : span.stop, :]) for keys, values in self.layers]


class Growth:
    """One forward pass that appends T slots to each layer of a past."""

    def __init__(self, past: KeyValues, new: int) -> None:
        self._past, self._new, self.before = past, new, max(past.held)
        fits = self.before + new <= past.layers[0][0].shape[-2]
        together = all(span.stop == self.before for span in past.spans)
        self._in_place = together and fits and past.room.claim(self.before, self.before + new)

    def append(self, slots: Tensor, new: Tensor) -> Tensor:
        """The tensor that holds the old slots, their ends together, and the new ones behind."""
        if not self._in_place:
            slots = _ends_together(slots, self._past.spans, self._new)
        slots[..., self.before : self.before + self._new, :] = new
        return slots

    def seen(self, slots: Tensor) -> Tensor:
        """What the new tokens attend to, without the room."""
        return slots[..., : self.before + self._new, :]

    def grown(self, layers: Layers, counts: Sequence[int]) -> KeyValues:
        """The past behind it, with counts[b] tokens more in row b."""
        held = self._past.held
        spans = tuple(range(self.before - old, self.before + count) for old, count in zip(held, counts, strict=True))
        return KeyValues(layers, spans, self._past.room if self._in_place else Room(self.before + self._new))


def _together(rows: Sequence[tuple[KeyValues, int]]) -> KeyValues:
    """Rows of one past or of several."""
    spans = [past.spans[row] for past, row in rows]
    longest = max(len(span) for span in spans)

    def copied(layer: int, part: int) -> Tensor:
        return _ends_together([past.layers[layer][part][row] for past, row in rows], spans, 0)

    layers = tuple((copied(layer, 0), copied(layer, 1)) for layer in range(len(rows[0][0].layers)))
    return KeyValues(layers, tuple(range(longest - len(span), longest) for span in spans), Room(longest))


def _ends_together(rows: Sequence[Tensor] | Tensor, spans: Sequence[range], new: int) -> Tensor:
    """Spans of rows [H, S, d], padded on the left with zeros; behind them new slots and room, not yet written to."""
    longest = max(len(span) for span in spans)
    out = rows[0].new_empty(len(rows), *rows[0].shape[:-2], longest + new + BLOCK, rows[0].shape[-1])
    for line, row, span in zip(out, rows, spans, strict=True):
        begin = longest - len(span)
        line[..., :begin, :] = 0
        line[..., begin:longest, :] = row[..., span.start : span.stop, :]
    return out
