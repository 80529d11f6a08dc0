"""A mapped tensor whose blocks are checked when something in them is first read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gnnlm.artifact import CheckedArray

_DESCRIBING = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad", "itemsize", "nbytes")
} | {Tensor.__len__, Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.element_size, Tensor.is_contiguous}
_BY_ROW = {Tensor.__getitem__, Tensor.index_select, torch.index_select}


class CheckedTensor(Tensor):
    """Lines of a `CheckedArray` as a tensor. What is read of it is a plain tensor, of blocks that were found whole.

    Any operation but reading lines by their numbers reads the whole tensor, and so checks it all.
    """

    source: CheckedArray

    @classmethod
    def over(cls, source: CheckedArray, tensor: Tensor) -> CheckedTensor:
        """`tensor`: the memory of the array, as it is."""
        checked = tensor.as_subclass(cls)
        checked.source = source
        return checked

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _DESCRIBING:
                return func(*args, **named)
            if func in _BY_ROW and isinstance(args[0], cls):
                args[0].source.check(_rows_of(func, args, named))
                return func(*args, **named)
            made = func(*args, **named)
            if not (args and made is args[0]):  # `to` a device that it is on already reads nothing
                for tensor in _checked_in(cls, (args, list(named.values()))):
                    tensor.source.check()
            return made


def _rows_of(func: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Return the numbers of the lines that are read; None if they cannot be told."""
    if func is Tensor.__getitem__:
        key = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
    else:
        dimension, key = (*args[1:], named.get("dim"), named.get("index"))[:2]
        key = key if dimension == 0 else None
    return key.detach().cpu().numpy() if isinstance(key, Tensor) else key


def _checked_in(kind: type[CheckedTensor], values: Any) -> list[CheckedTensor]:
    if isinstance(values, kind):
        return [values]
    return [tensor for each in values for tensor in _checked_in(kind, each)] if isinstance(values, list | tuple) else []
