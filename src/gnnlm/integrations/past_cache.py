"""An open book's past as a cache of transformers: columns of ids on their side, texts on ours.

transformers counts columns of a padded batch; padding may be on the left, on the right or anywhere. An open book counts
the tokens of each text, without padding and without the start token. A cache knows both.

Shapes: B rows, S columns read so far, T new columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from gnnlm.errors import ConfigError
from gnnlm.predict.open_book import Past


@dataclass(frozen=True)
class LookupView:
    """The predictor, and the documents that may be looked up: what a past depends on beside its tokens."""

    predictor: str
    only: tuple[str, ...] | None = None
    exclude: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return f"predictor {self.predictor}, only {self.only}, exclude {self.exclude}"


@dataclass(frozen=True)
class Columns:
    """Columns of ids: which are real, and whether the first real one of a row is the start token."""

    real_BS: Tensor
    given_B: Tensor

    @staticmethod
    def none(rows: int) -> Columns:
        return Columns(torch.zeros(rows, 0, dtype=torch.bool), torch.zeros(rows, dtype=torch.bool))

    @property
    def fresh_B(self) -> Tensor:
        """Rows of which nothing has been read."""
        return ~self.real_BS.any(1)

    @property
    def lengths_B(self) -> Tensor:
        """The tokens of each row's text, without the start token."""
        return self.real_BS.sum(1) - self.given_B.long()

    def grown(self, ids_BT: Tensor, real_BT: Tensor, start: int) -> Columns:
        """Return the columns with new ones behind them."""
        first_B = ids_BT.gather(1, real_BT.long().argmax(1, keepdim=True))[:, 0]
        given_B = torch.where(self.fresh_B, real_BT.any(1) & (first_B == start), self.given_B)
        return Columns(torch.cat([self.real_BS, real_BT], 1), given_B)

    def cropped(self, count: int) -> Columns:
        """Return the columns without the last ones."""
        real_BS = self.real_BS[:, : max(0, self.real_BS.shape[1] - count)]
        return Columns(real_BS, self.given_B & real_BS.any(1))

    def selected(self, rows: Sequence[int]) -> Columns:
        return Columns(self.real_BS[list(rows)], self.given_B[list(rows)])


class OpenBookCache(Cache):  # type: ignore[misc]
    """What an open book has read of a batch. Changed in place, as transformers expects; its past is immutable."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.past: Past | None = None
        self.columns: Columns | None = None
        self.view: LookupView | None = None

    def put(self, past: Past, columns: Columns, view: LookupView) -> None:
        """Store what has been read so far."""
        self.past, self.columns, self.view = past, columns, view

    def check(self, rows: int, view: LookupView) -> None:
        """Refuse to continue with other texts, another predictor or other documents than before."""
        if self.columns is not None and len(self.columns.given_B) != rows:
            raise ConfigError(f"the cache holds {len(self.columns.given_B)} texts, input_ids has {rows} rows")
        if self.view is not None and self.view != view:
            raise ConfigError(f"the cache was made with {self.view}; it cannot be read on from with {view}")

    # -- what transformers asks for ------------------------------------------------------------------------

    def __len__(self) -> int:
        return 1  # a cache without layers would count as false

    def __repr__(self) -> str:
        return f"OpenBookCache({self.batch_size} texts, {self.get_seq_length()} columns)"

    def __deepcopy__(self, memo: dict[int, Any]) -> OpenBookCache:
        copy = OpenBookCache()
        copy.past, copy.columns, copy.view = self.past, self.columns, self.view  # immutable
        return copy

    @property
    def batch_size(self) -> int:
        return -1 if self.columns is None else len(self.columns.given_B)

    @property
    def is_initialized(self) -> bool:
        return self.past is not None

    @property
    def is_croppable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self.columns is None else self.columns.real_BS.shape[1]

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def reset(self) -> None:
        self.past = self.columns = self.view = None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last columns; `tokens_to_remove` is minus their number, as in transformers."""
        if tokens_to_remove > 0:
            raise ConfigError(f"crop expects minus the number of columns to remove, got {tokens_to_remove}")
        if not tokens_to_remove or self.columns is None or self.past is None:
            return
        columns = self.columns.cropped(-tokens_to_remove)
        if not columns.real_BS.any():
            self.reset()
            return
        self.past = self.past.crop((self.columns.lengths_B - columns.lengths_B).tolist())
        self.columns = columns

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order; a mask of rows works too."""
        if self.columns is None or self.past is None:
            return
        chosen = torch.as_tensor(indices).cpu()
        rows = (chosen.nonzero()[:, 0] if chosen.dtype == torch.bool else chosen.remainder(self.batch_size)).tolist()
        self.past, self.columns = self.past.select(rows), self.columns.selected(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.columns is not None:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))
