"""How a transformers model reads on from a past.

Most families keep keys and values, and take position ids and a mask, so texts of different lengths go through the model
together. Other families support less, and some do not support what their arguments promise (a Mamba ignores its state
if it reads several tokens at once). So the modes are tried on a probe, the best first; the first one whose states equal
those of a single pass is used.
"""

from __future__ import annotations

import copy
import enum
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from gnnlm.lm.base_lm import ModelPast, StreamOutput
from gnnlm.lm.kv_cache import KeyValues, SlotGrowth

MAX_STEPS = 16  # more new tokens than this are not read token by token: the text is read again in one pass
CACHES = ("past_key_values", "cache_params", "state")  # its names in the families of models

# (tokens, whether keys are wanted, arguments for the model) -> (states, keys, the model's own output)
Forward = Callable[..., tuple[Tensor, Tensor | None, Any]]


class StreamMode(enum.Enum):
    """What a model keeps of the tokens it has read, and how new tokens are given to it."""

    RAGGED = "keys and values, for texts of different lengths"
    EVEN = "keys and values, for texts of equal length"
    CHUNKS = "the model's own cache, several tokens at a time"
    STEPS = "the model's own cache, token by token"
    NONE = "none: every window is read from its beginning"


class HFStream:
    """A model that reads on in one of these modes."""

    def __init__(self, base: nn.Module, forward: Forward, mode: StreamMode) -> None:
        self.mode = mode
        self._forward = forward
        self._cache = _cache_argument(base)

    @property
    def ragged(self) -> bool:
        return self.mode is StreamMode.RAGGED

    def read(self, tokens_BT: Tensor, past: Any, counts: Sequence[int] | None, keys: bool) -> StreamOutput:
        if self.mode in (StreamMode.RAGGED, StreamMode.EVEN):
            return self._read_slots(tokens_BT, past, counts or [tokens_BT.shape[1]] * len(tokens_BT), keys)
        if self.mode is StreamMode.NONE:
            assert past is None, "there is no past to read on from"
            return StreamOutput(*self._forward(tokens_BT, keys, use_cache=False)[:2], None)
        return self._read_opaque(tokens_BT.cpu(), past, keys)

    def _read_opaque(self, tokens_BT: Tensor, past: OpaqueCache | None, keys: bool) -> StreamOutput:
        """Read on with the model's own cache, or read the whole text again if token by token would take longer."""
        new = tokens_BT.shape[1]
        text_BT = tokens_BT if past is None else torch.cat([past.tokens_BT, tokens_BT], dim=1)
        step_by_step = self.mode is StreamMode.STEPS
        if past is None or (step_by_step and new > MAX_STEPS):
            cache, parts = None, [text_BT]
        else:
            cache, parts = copy.deepcopy(past.cache), tokens_BT.split(1 if step_by_step else new, dim=1)
        states: list[Tensor] = []
        recorded: list[Any] = []
        for part_BT in parts:
            part_states, part_keys, out = self._forward(part_BT, keys, use_cache=True, **{self._cache: cache})
            states.append(part_states)
            recorded.append(part_keys)
            cache = getattr(out, self._cache)
        keys_BTD = torch.cat(recorded, dim=1)[:, -new:] if keys else None
        return StreamOutput(torch.cat(states, dim=1)[:, -new:], keys_BTD, OpaqueCache(cache, text_BT))

    def _read_slots(self, tokens_BT: Tensor, past: KeyValues | None, counts: Sequence[int], keys: bool) -> StreamOutput:
        cache = DynamicCache()  # made without a config, layers with sliding windows keep everything and can be cropped
        if past is None:
            states, read, _ = self._forward(tokens_BT, keys, use_cache=True, past_key_values=cache)
            layers = tuple((layer.keys, layer.values) for layer in cache.layers)
            return StreamOutput(states, read, KeyValues.of(layers, counts))
        new = tokens_BT.shape[1]
        growth = SlotGrowth(past, new)
        cache.layers = [SlotLayer(layer, growth) for layer in past.layers]
        placing = _positions_and_mask(past.held, new)
        states, read, _ = self._forward(tokens_BT, keys, use_cache=True, past_key_values=cache, **placing)
        return StreamOutput(states, read, growth.grown(tuple(layer.slots for layer in cache.layers), counts))


def find_mode(base: nn.Module, vocab_size: int, forward: Forward) -> StreamMode:
    """Return the best mode that works for a model; `forward` must calculate in full precision."""
    texts = [[(row + step) % vocab_size for step in range(8)] for row in (0, 5)]
    wanted_BTD = forward(torch.tensor(texts), use_cache=False)[0]
    margin = float(wanted_BTD.abs().max()) * 3 * torch.finfo(next(base.parameters()).dtype).eps ** 0.5
    for mode in _possible_modes(base):
        try:
            if _gap(HFStream(base, forward, mode), texts, wanted_BTD) < margin:
                return mode
        except Exception:  # models raise many kinds of errors for what they do not support
            continue
    return StreamMode.NONE


def _possible_modes(base: nn.Module) -> list[StreamMode]:
    """Return the modes that the model has arguments for, the best first."""
    cache = _cache_argument(base)
    modes = [StreamMode.CHUNKS, StreamMode.STEPS] if cache else []
    if cache == CACHES[0]:
        kinds = {type(layer) for layer in DynamicCache(config=base.config).layers}
        if kinds <= {DynamicLayer, DynamicSlidingWindowLayer}:
            ragged = {"attention_mask", "position_ids"} <= _arguments(base)
            modes = [*([StreamMode.RAGGED] if ragged else []), StreamMode.EVEN, *modes]
    return modes


@torch.inference_mode()
def _gap(stream: HFStream, texts: list[list[int]], wanted_BTD: Tensor) -> float:
    """Return the largest error in the states of two texts, read in two pieces and swapped in between."""
    gap = 0.0
    lengths = [((4, 4), (2, 2)), ((1, 1), (3, 3))]
    if stream.mode is StreamMode.RAGGED:
        lengths = [((4, 2), (1, 3))]
    for counts, more in lengths:
        tokens = torch.tensor([text[: max(counts)] for text in texts])
        past = stream.read(tokens, None, counts, False).past
        assert past is not None
        tokens = torch.tensor([texts[row][counts[row] :][: max(more)] for row in (1, 0)])
        states_BTD = stream.read(tokens, past.select([1, 0]), more, False).states
        for got_TD, row, count in zip(states_BTD, (1, 0), more, strict=True):
            gaps = (got_TD[:count] - wanted_BTD[row, counts[row] :][:count]).abs()
            gap = max(gap, float(gaps.max().nan_to_num(math.inf)))
    return gap


def _arguments(base: nn.Module) -> set[str]:
    return set(inspect.signature(base.forward).parameters)


def _cache_argument(base: nn.Module) -> str:
    """Return the name of the argument that takes a cache; empty if there is none."""
    return next((name for name in CACHES if name in _arguments(base)), "")


class SlotLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of a past in the form that transformers expects, for one forward pass."""

    def __init__(self, slots: tuple[Tensor, Tensor], growth: SlotGrowth) -> None:
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


@dataclass(frozen=True, eq=False)
class OpaqueCache:
    """A cache that only the model understands. The model writes into it, so it is copied before every use."""

    cache: Any
    tokens_BT: Tensor  # the tokens that were read

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> OpaqueCache | None:
        if not hasattr(self.cache, "reorder_cache"):
            return None
        cache = copy.deepcopy(self.cache)
        cache.reorder_cache(torch.tensor(rows))
        return OpaqueCache(cache, self.tokens_BT[rows])

    def crop(self, counts: Sequence[int]) -> OpaqueCache | None:
        return None if any(counts) else self

    def join(self, others: Sequence[ModelPast]) -> None:
        return None


def _positions_and_mask(held: Sequence[int], new: int) -> dict[str, Tensor]:
    """Return position ids and the mask for rows of different lengths; rows of equal length need neither.

    New slots are never masked, even those of padding: no real token attends to them in this pass, and the states of a
    token that attends to nothing would be NaN.
    """
    longest = max(held)
    if min(held) == longest:
        return {}
    held_B1 = torch.tensor(held)[:, None]
    mask_BS = torch.arange(longest + new) >= longest - held_B1
    return {"position_ids": held_B1 + torch.arange(new), "attention_mask": mask_BS.long()}
