"""A frozen base model, as the rest of the project sees it."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gnnlm.errors import ModelError
from gnnlm.lm.head import Head


class ModelPast(Protocol):
    """What a model keeps of the tokens it has read, in one row or several. Immutable: reading on makes a new past.

    A method returns None if the model does not support the operation; the tokens must then be read again.
    """

    def select(self, rows: Sequence[int]) -> ModelPast | None:
        """Return these rows, in this order; a row may be taken more than once."""
        ...

    def crop(self, counts: Sequence[int]) -> ModelPast | None:
        """Return the past without the last counts[b] tokens of row b."""
        ...

    def join(self, others: Sequence[Any]) -> ModelPast | None:
        """Return the rows of all pasts, one after the other."""
        ...


class StreamOutput(NamedTuple):
    """States [B, T, D], the input of the last feed-forward layer if asked for, and the past after these tokens."""

    states: Tensor
    keys: Tensor | None
    past: ModelPast | None


class TokenText(Protocol):
    """The text of tokens, as a vocabulary or a tokenizer knows it."""

    def tokenize(self, text: str) -> tuple[list[int], list[int]]:
        """Return the token ids of a text, without special tokens, and the character at which each token starts.

        A token ends where the next one starts, and the last one at the end of the text. Tokens that are parts of one
        character all start at that character, so only the last of them has text by this rule; `piece` shows the others.
        """
        ...

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of tokens; bytes that make no character become U+FFFD."""
        ...

    def piece(self, token: int) -> str:
        """Return a token as text for people to read; a byte that is only part of a character is written as <0xE2>."""
        ...

    def bytes_of(self, token: int) -> bytes:
        """Return a token's bytes, which may be only part of a character."""
        ...


class BaseLM(ABC):
    """A frozen causal language model: the network, its softmax (`head`) and the text of its tokens (`text`).

    Shapes: B batch, T tokens, D width, V vocabulary.
    """

    start_token: int  # the id that the model reads before the first token of a text
    start_always: bool  # whether a window in the middle of a text begins with it too, not with the token before it

    def __init__(self, model: Any, head: Head, dtype: str) -> None:
        self.model = model.eval().requires_grad_(False)
        self.head = head
        self._dtype = dtype

    @property
    def width(self) -> int:
        return self.head.width

    @property
    def vocab_size(self) -> int:
        return self.head.vocab_size

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def end_tokens(self) -> frozenset[int]:
        """The ids that end a text; empty for a model that has learned none."""
        return frozenset()

    @property
    def receptive_field(self) -> int | None:
        """The number of tokens that a state depends on, its own included; None for all that were read."""
        return None

    @property
    def segment(self) -> int | None:
        """The number of tokens that a model with a memory reads at once; None for other models."""
        return None

    # -- states --------------------------------------------------------------------------------------------

    @abstractmethod
    def encode(self, tokens_BT: Tensor) -> Tensor:
        """Return states [B, T, D]; the state at t has read tokens 0..t and predicts token t + 1."""

    @abstractmethod
    def encode_keys(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return states, and the input of the last feed-forward layer, both [B, T, ...]."""

    @property
    @abstractmethod
    def ragged(self) -> bool:
        """Whether the rows of a past may have read different numbers of tokens."""

    @abstractmethod
    def stream(
        self, tokens_BT: Tensor, past: Any = None, counts: Sequence[int] | None = None, keys: bool = False
    ) -> StreamOutput:
        """Read on from a past. A ragged model reads only the first counts[b] tokens of row b; the rest is padding."""

    @torch.inference_mode()
    def log_probs(self, states: Tensor) -> Tensor:
        """Return log-probabilities over the vocabulary, [..., V]."""
        return self.head.log_probs(states)

    # -- text ----------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def text(self) -> TokenText: ...

    def tokenize(self, text: str) -> tuple[list[int], list[int]]:
        return self.text.tokenize(text)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self.text.detokenize(ids)

    def piece(self, token: int) -> str:
        return self.text.piece(token)

    def bytes_of(self, token: int) -> bytes:
        return self.text.bytes_of(token)

    @abstractmethod
    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the ids of a conversation in the model's own template, up to where its answer begins."""

    # -- for subclasses ------------------------------------------------------------------------------------

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
