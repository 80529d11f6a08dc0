"""The interface of a base model to the rest of the project."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

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

    states: torch.Tensor
    keys: torch.Tensor | None
    past: ModelPast | None


class BaseLM(Protocol):
    """A frozen causal language model.

    Shapes: B batch, T tokens, D width, V vocabulary.
    """

    @property
    def width(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        ...

    @property
    def head(self) -> Head: ...

    @property
    def start_token(self) -> int:
        """The id that the model reads before the first token of a text."""
        ...

    @property
    def end_tokens(self) -> frozenset[int]:
        """The ids that end a text; empty for a model that has learned none."""
        ...

    @property
    def start_always(self) -> bool:
        """Whether a window in the middle of a text begins with the start token, not with the token before it."""
        ...

    @property
    def receptive_field(self) -> int | None:
        """The number of tokens that a state depends on, its own included; None for all that were read."""
        ...

    @property
    def segment(self) -> int | None:
        """The number of tokens that a model with a memory reads at once; None for other models."""
        ...

    def encode(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return states [B, T, D]; the state at t has read tokens 0..t and predicts token t + 1."""
        ...

    def encode_keys(self, tokens_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return states, and the input of the last feed-forward layer, both [B, T, ...]."""
        ...

    @property
    def ragged(self) -> bool:
        """Whether the rows of a past may have read different numbers of tokens."""
        ...

    def stream(
        self,
        tokens_BT: torch.Tensor,
        past: Any = None,
        counts: Sequence[int] | None = None,
        keys: bool = False,
    ) -> StreamOutput:
        """Read on from a past. A ragged model reads only the first counts[b] tokens of row b; the rest is padding."""
        ...

    def log_probs(self, states: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities over the vocabulary, [..., V]."""
        ...

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

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the ids of a conversation in the model's own template, up to where its answer begins."""
        ...
