"""What the base models in PyTorch have in common: a frozen model, its softmax, its tokens and its arithmetic."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from gnnlm.errors import ModelError
from gnnlm.lm.head import Head


class TokenText(Protocol):
    """The text of tokens, as a vocabulary or a tokenizer knows it; the methods are those of `BaseLM`."""

    def tokenize(self, text: str) -> tuple[list[int], list[int]]: ...

    def detokenize(self, ids: Sequence[int]) -> str: ...

    def piece(self, token: int) -> str: ...

    def bytes_of(self, token: int) -> bytes: ...


class FrozenLM(ABC):
    """The shared part of `HFModel` and `NativeLM`; see `gnnlm.lm.base_lm.BaseLM` for what each member means."""

    def __init__(self, model: Any, head: Head, dtype: str) -> None:
        self.model = model.eval().requires_grad_(False)
        self.head = head
        self._dtype = dtype

    @property
    @abstractmethod
    def text(self) -> TokenText:
        """The text of the model's tokens."""

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def width(self) -> int:
        return self.head.width

    @property
    def vocab_size(self) -> int:
        return self.head.vocab_size

    @property
    def receptive_field(self) -> int | None:
        return None

    @property
    def segment(self) -> int | None:
        return None

    @torch.inference_mode()
    def log_probs(self, states: Tensor) -> Tensor:
        return self.head.log_probs(states)

    def tokenize(self, text: str) -> tuple[list[int], list[int]]:
        return self.text.tokenize(text)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self.text.detokenize(ids)

    def piece(self, token: int) -> str:
        return self.text.piece(token)

    def bytes_of(self, token: int) -> bytes:
        return self.text.bytes_of(token)

    def _placed(self, tokens_BT: Tensor) -> Tensor:
        """Return the tokens on the model's device; ids outside the vocabulary are refused."""
        if tokens_BT.numel() and not 0 <= int(tokens_BT.min()) <= int(tokens_BT.max()) < self.vocab_size:
            raise ModelError(
                f"expected token ids from 0 to {self.vocab_size - 1}, got {int(tokens_BT.min())} to "
                f"{int(tokens_BT.max())}"
            )
        return tokens_BT.to(self.head.device)

    def _arithmetic(self) -> contextlib.AbstractContextManager[object]:
        """Calculate in the precision of `lm.dtype`."""
        if self._dtype == "bf16":
            return torch.autocast(self.head.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()
