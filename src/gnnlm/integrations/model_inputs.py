"""Checks of what transformers passes to a model.

Shapes: B rows, S columns read before, T new columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from gnnlm.errors import ConfigError
from gnnlm.integrations.past_cache import OpenBookCache


def own_cache(cache: Cache | None) -> OpenBookCache:
    if isinstance(cache, OpenBookCache):
        return cache
    if cache is not None and (not isinstance(cache, Cache) or cache.get_seq_length()):
        raise ConfigError(f"past_key_values: expected an OpenBookCache, got {type(cache).__name__}")
    return OpenBookCache()


def checked_ids(ids: Any) -> Tensor:
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ConfigError(f"input_ids: expected whole numbers, [texts, tokens], as a tensor; got {got}")
    if not ids.numel():
        raise ConfigError("input_ids: expected at least one token; begin a text with the start token (bos_token_id)")
    return ids.cpu().long()


def new_columns(mask: Any, ids_BT: Tensor, before_BS: Tensor) -> Tensor:
    """Return which of the new columns are real."""
    if mask is None:
        return torch.ones_like(ids_BT, dtype=torch.bool)
    rows, new = ids_BT.shape
    old = before_BS.shape[1]
    if not isinstance(mask, Tensor) or mask.dim() != 2 or len(mask) != rows or mask.shape[1] not in (new, old + new):
        got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ConfigError(f"attention_mask: expected [{rows}, {old + new}] of 0 and 1, got {got}")
    real = mask.cpu().bool()
    if real.shape[1] > new and not torch.equal(real[:, :old], before_BS):
        raise ConfigError("attention_mask: tokens that are in the cache cannot be masked or unmasked afterwards")
    return real[:, -new:]


def kept(count: int | Tensor, columns: int) -> Tensor:
    """Return the numbers of the columns whose predictions are asked for."""
    if isinstance(count, Tensor):
        return torch.arange(columns)[count.cpu()]
    return torch.arange(columns)[-count if count else 0 :]
