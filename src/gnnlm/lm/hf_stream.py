"""How a transformers model reads on from a past.

Most families keep keys and values, and take position ids and a mask: texts of different length then go through the
model together. Others do less, and some do not do what their arguments promise. So nothing is assumed: the ways are
tried on a probe, the best first, and the first that gives the states of one pass is taken.
"""

from __future__ import annotations

import copy
import enum
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from gnnlm.lm.past import Growth, KeyValues
from gnnlm.lm.protocol import Past, Streamed

CACHES = ("past_key_values", "cache_params", "state")  # what families call it
TOLERANCE = 0.05  # of the largest state; a way that does not work is off by about as much as the states are large

# tokens, whether keys are wanted and the model's other arguments -> states, keys and the model's own output
Forward = Callable[..., tuple[Tensor, Tensor | None, Any]]


class Way(enum.Enum):
    RAGGED = "keys and values, of texts of different length"
    EVEN = "keys and values, of texts of equal length"
    CHUNKS = "the model's own cache, several tokens at a time"
    STEPS = "the model's own cache, token by token"
    NONE = "nothing: every window is read whole"


class HFStream:
    """One model's way to read on."""

    def __init__(self, base: nn.Module, vocab_size: int, forward: Forward) -> None:
        self._config, self._vocab_size, self._forward = base.config, vocab_size, forward
        self._arguments = set(inspect.signature(base.forward).parameters)
        self._cache = next((name for name in CACHES if name in self._arguments), None)

    @cached_property
    def way(self) -> Way:
        return next(way for way in self._ways() if way is Way.NONE or self._agrees(way))

    @property
    def ragged(self) -> bool:
        return self.way is Way.RAGGED

    def read(
        self, tokens_BT: Tensor, past: Any, counts: Sequence[int] | None, keys: bool, way: Way | None = None
    ) -> Streamed:
        way = way or self.way
        if way in (Way.RAGGED, Way.EVEN):
            return self._read_slots(tokens_BT, past, counts or [tokens_BT.shape[1]] * len(tokens_BT), keys)
        if way is Way.NONE:
            assert past is None, "there is no past to read on from"
            return Streamed(*self._forward(tokens_BT, keys, use_cache=False)[:2], None)
        parts = tokens_BT.split(1 if way is Way.STEPS and past is not None else tokens_BT.shape[1], dim=1)
        cache = None if past is None else copy.deepcopy(past.cache)  # the model writes into it
        read = []
        for part_BT in parts:
            states, read_keys, out = self._forward(part_BT, keys, use_cache=True, **{str(self._cache): cache})
            read.append((states, read_keys))
            cache = getattr(out, str(self._cache))
        made, made_keys = zip(*read, strict=True)
        return Streamed(torch.cat(made, dim=1), torch.cat(made_keys, dim=1) if keys else None, OwnCache(cache))

    def _read_slots(self, tokens_BT: Tensor, past: KeyValues | None, counts: Sequence[int], keys: bool) -> Streamed:
        cache = DynamicCache()  # without a config every layer keeps all of the window, sliding or not
        if past is None:
            states, read, _ = self._forward(tokens_BT, keys, use_cache=True, past_key_values=cache)
            layers = tuple((layer.keys, layer.values) for layer in cache.layers)
            return Streamed(states, read, KeyValues.of(layers, counts))
        growth, placing = Growth(past, tokens_BT.shape[1]), _placing(past.held, counts, tokens_BT.shape[1])
        cache.layers = [Slots(layer, growth) for layer in past.layers]
        states, read, _ = self._forward(tokens_BT, keys, use_cache=True, past_key_values=cache, **placing)
        return Streamed(states, read, growth.grown(tuple(layer.slots for layer in cache.layers), counts))

    def _ways(self) -> list[Way]:
        ways = [Way.NONE]
        if self._cache is not None:
            ways = [Way.CHUNKS, Way.STEPS, *ways]
        if self._cache == "past_key_values":
            kinds = {type(layer) for layer in DynamicCache(config=self._config).layers}
            if kinds <= {DynamicLayer, DynamicSlidingWindowLayer}:
                ways = [Way.EVEN, *ways]
                if {"attention_mask", "position_ids"} <= self._arguments:
                    ways = [Way.RAGGED, *ways]
        return ways

    @torch.inference_mode()
    def _agrees(self, way: Way) -> bool:
        """Whether two texts, read this way in pieces, get the states of one pass."""
        texts = [[(row + step) % self._vocab_size for step in range(8)] for row in (0, 5)]
        wanted_BTD = self._forward(torch.tensor(texts), use_cache=False)[0]
        margin = TOLERANCE * wanted_BTD.abs().max()
        cuts = [((4, 2), (1, 3))] if way is Way.RAGGED else [((4, 4), (2, 2)), ((1, 1), (3, 3))]
        try:
            for counts, more in cuts:
                tokens = torch.tensor([text[: max(counts)] for text in texts])
                past = self.read(tokens, None, counts, False, way).past
                tokens = torch.tensor([texts[row][counts[row] :][: max(more)] for row in (1, 0)])
                states_BTD = self.read(tokens, past and past.select([1, 0]), more, False, way).states
                for got_TD, row, count in zip(states_BTD, (1, 0), more, strict=True):
                    wanted_TD = wanted_BTD[row, counts[row] :][:count]
                    if not (got_TD[:count] - wanted_TD).abs().max() < margin:
                        return False
        except Exception:  # a family that cannot do it may fail in any way
            return False
        return True


class Slots(DynamicLayer):  # type: ignore[misc]
    """A layer of a past as transformers sees it, for one forward pass."""

    def __init__(self, slots: tuple[Tensor, Tensor], growth: Growth) -> None:
        super().__init__()
        self.slots, self._growth = slots, growth
        self.dtype, self.device, self.is_initialized = slots[0].dtype, slots[0].device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        old_keys, old_values = self.slots
        self.slots = self._growth.append(old_keys, key_states), self._growth.append(old_values, value_states)
        self.keys, self.values = (self._growth.seen(slots) for slots in self.slots)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self._growth.before if self.keys is None else int(self.keys.shape[-2])


@dataclass(frozen=True)
class OwnCache:
    """A model's own cache, of which little is known."""

    cache: Any

    def select(self, rows: Sequence[int]) -> OwnCache | None:
        if not hasattr(self.cache, "reorder_cache"):
            return None
        cache = copy.deepcopy(self.cache)
        cache.reorder_cache(torch.tensor(rows))
        return OwnCache(cache)

    def crop(self, counts: Sequence[int]) -> OwnCache | None:
        return None if any(counts) else self

    def join(self, others: Sequence[Past]) -> None:
        return None


def _placing(held: Sequence[int], counts: Sequence[int], new: int) -> dict[str, Tensor]:
    """Mask and position ids of new tokens behind rows of different length; without them a model counts slots.

    New slots are never masked, though some are padding: no token before them sees them, and a line of a mask with
    nothing in it would give values that are not numbers.
    """
    longest = max(held)
    if min(held) == longest:
        return {}
    held_B = torch.tensor(held)
    last = max(before + count for before, count in zip(held, counts, strict=True)) - 1
    positions_BT = (held_B[:, None] + torch.arange(new)).clamp(max=last)  # padding, too, must have a position
    mask_BS = torch.arange(longest + new) >= longest - held_B[:, None]
    return {"position_ids": positions_BT, "attention_mask": mask_BS.long()}
