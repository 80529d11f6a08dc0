"""The keys and values that attention keeps of tokens it has read, for texts of different length in one batch.

Each row has its tokens in neighbouring slots. Before a row reads on, its last token is moved to the last slot: what
is behind is cut off, what is before is padding. So the distance of two slots is always that of their tokens, as
models with sliding windows or linear biases need, and padding on the left is what every family knows how to mask.

Shapes: B rows, H heads, S slots, T new tokens, d head width.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WASTE = 4  # at most one slot in so many belongs to no token of the longest row


@dataclass(frozen=True)
class KeyValues:
    """Each layer's keys and values, [B, H, S, d], and the slots that each row has filled."""

    layers: tuple[tuple[Tensor, Tensor], ...]
    spans: tuple[range, ...]

    @property
    def slots(self) -> int:
        return int(self.layers[0][0].shape[-2])

    @property
    def held(self) -> tuple[int, ...]:
        """Tokens of each row."""
        return tuple(len(span) for span in self.spans)

    def select(self, rows: Sequence[int]) -> KeyValues:
        """These rows, in this order."""
        spans = [self.spans[row] for row in rows]
        first, last = min(span.start for span in spans), max(span.stop for span in spans)

        def chosen(slots: Tensor) -> Tensor:
            return slots[..., first:last, :].index_select(0, torch.tensor(rows, device=slots.device))

        return KeyValues(
            tuple((chosen(keys), chosen(values)) for keys, values in self.layers),
            tuple(range(span.start - first, span.stop - first) for span in spans),
        )

    def crop(self, counts: Sequence[int]) -> KeyValues:
        """Without the last counts[b] tokens of row b."""
        spans = zip(self.spans, counts, strict=True)
        return KeyValues(self.layers, tuple(range(span.start, span.stop - count) for span, count in spans))

    def join(self, others: Sequence[KeyValues]) -> KeyValues:
        """The rows of all, one behind the other, in as few slots as the longest has tokens."""
        pasts = [self, *others]
        spans = tuple(itertools.chain.from_iterable(past.spans for past in pasts))
        longest = max(len(span) for span in spans)

        def together(layer: int, part: int) -> Tensor:
            rows = [row for past in pasts for row in _rows(past.layers[layer][part], past.spans)]
            return _ends_together(rows)

        return KeyValues(
            tuple((together(layer, 0), together(layer, 1)) for layer in range(len(self.layers))),
            tuple(range(longest - len(span), longest) for span in spans),
        )

    def grown(self, layers: tuple[tuple[Tensor, Tensor], ...], counts: Sequence[int]) -> KeyValues:
        """After reading counts[b] tokens in row b; `layers` were made by `extend`."""
        longest = max(self.held)
        spans = (range(longest - held, longest + count) for held, count in zip(self.held, counts, strict=True))
        return KeyValues(layers, tuple(spans)).compact()

    def compact(self) -> KeyValues:
        """Itself, or a copy in fewer slots where many are wasted."""
        wasted = self.slots - max(self.held)
        return self.join([]) if wasted * WASTE > self.slots else self

    def dense(self) -> list[tuple[Tensor, Tensor]]:
        """The layers, where all rows have as many tokens, without slots that no row has."""
        (span,) = set(self.spans)
        return [
            (keys[..., span.start : span.stop, :], values[..., span.start : span.stop, :])
            for keys, values in self.layers
        ]


def extend(slots: Tensor, new: Tensor, spans: Sequence[range]) -> Tensor:
    """The spans of each row, their ends together, and new slots behind; one copy, as appending makes anyway."""
    if len({span.stop for span in spans}) == 1:
        first = min(span.start for span in spans)
        return torch.cat([slots[..., first : spans[0].stop, :], new], dim=-2)
    return _ends_together(_rows(slots, spans), new)


def _rows(slots: Tensor, spans: Sequence[range]) -> list[Tensor]:
    return [slots[row, ..., span.start : span.stop, :] for row, span in enumerate(spans)]


def _ends_together(rows: Sequence[Tensor], new: Tensor | None = None) -> Tensor:
    """Rows [H, n, d] padded on the left with zeros, then the new slots [B, H, T, d]."""
    longest = max(row.shape[-2] for row in rows)
    total = longest + (0 if new is None else new.shape[-2])
    out = rows[0].new_empty(len(rows), *rows[0].shape[:-2], total, rows[0].shape[-1])
    for line, row in zip(out, rows, strict=True):
        begin = longest - row.shape[-2]
        line[..., :begin, :] = 0
        line[..., begin:longest, :] = row
    if new is not None:
        out[..., longest:, :] = new
    return out
