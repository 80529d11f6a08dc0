"""What the rest of the project needs of a base model, and nothing else."""

from __future__ import annotations

from typing import Protocol

import torch

from gnnlm.lm.head import SoftmaxHead


class BaseLM(Protocol):
    """A frozen causal language model.

    Shapes: B batch, T tokens, D width, V vocabulary.
    """

    @property
    def width(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def head(self) -> SoftmaxHead: ...

    @property
    def start_token(self) -> int:
        """The id put before the first token of every window."""
        ...

    def encode(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """States [B, T, D]; the state at t has read tokens 0..t and predicts token t + 1."""
        ...

    def tokenize(self, text: str) -> tuple[list[int], list[int]]:
        """Token ids of the text (no special tokens) and the character each token starts at."""
        ...

    def piece(self, token: int) -> str:
        """The token as text, for people to read."""
        ...
