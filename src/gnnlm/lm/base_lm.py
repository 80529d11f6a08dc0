"""The interface of a base model to the rest of the project."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from gnnlm.lm.head import Head


class ModelPast(Protocol):
    """What a model keeps of the tokens it has read, in one row or several. A value: reading on makes a new one.

    A method returns None if the model cannot do it; the tokens must then be read again.
    """

    def select(self, rows: Sequence[int]) -> ModelPast | None:
        """These rows, in this order, each as often as it is named."""
        ...

    def crop(self, counts: Sequence[int]) -> ModelPast | None:
        """Without the last counts[b] tokens of row b."""
        ...

    def join(self, others: Sequence[Any]) -> ModelPast | None:
        """The rows of all, one after the other."""
        ...


class StreamOutput(NamedTuple):
    """States [B, T, D], what the last feed-forward read if asked for, and the past with the tokens just read."""

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
        """The id that is read before the first token of a text."""
        ...

    @property
    def end_tokens(self) -> frozenset[int]:
        """The ids that end a text; none for a model that has not learned any."""
        ...

    @property
    def start_always(self) -> bool:
        """Whether a window in the middle of a text begins with the start token, not with the token before it."""
        ...

    @property
    def receptive_field(self) -> int | None:
        """The number of tokens that a state depends on, its own included; None: all that were read."""
        ...

    @property
    def segment(self) -> int | None:
        """The number of tokens that a model with a memory reads at once; None for other models."""
        ...

    def encode(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """States [B, T, D]; the state at t has read tokens 0..t and predicts token t + 1."""
        ...

    def encode_keys(self, tokens_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States, and the input of the last feed-forward layer, both [B, T, ...]."""
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
        """Read on from a past. Of row b, a ragged model reads only the first counts[b] tokens; the rest is padding."""
        ...

    def log_probs(self, states: torch.Tensor) -> torch.Tensor:
        """Log-probabilities over the vocabulary, [..., V]."""
        ...

    def tokenize(self, text: str) -> tuple[list[int], list[int]]:
        """Token ids of the text (no special tokens) and the character each token starts at.

        A token ends where the next one starts, the last at the end of the text. Tokens that are parts of one
        character all start at it, so only the last of them has text by this rule; `piece` shows the others.
        """
        ...

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of some tokens; bytes that make no character become U+FFFD."""
        ...

    def piece(self, token: int) -> str:
        """The token as text, for people to read; bytes that are only part of a character are written as <0xE2>."""
        ...

    def bytes_of(self, token: int) -> bytes:
        """The token's bytes, which may be only part of a character."""
        ...

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a conversation in the model's own template, up to where its answer begins."""
        ...
