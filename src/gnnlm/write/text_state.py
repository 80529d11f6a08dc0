"""Texts in progress: what is asked for each, and what has been written of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from gnnlm.retrieval.index import Allowed
from gnnlm.write.detokenizer import TextStream
from gnnlm.write.drafter import Chances
from gnnlm.write.sampling import Sampling


@dataclass(frozen=True)
class Order:
    """What is asked for: by which predictor, how tokens are chosen, where to stop, what may be looked up.

    With `own_past`, the text itself is looked up too, as far as the base model no longer sees it.

    With each token, the `top` likeliest ones are recorded; with `scored`, those of the prompt are recorded too. With
    `max_tokens` of 0, the prompt is only read.
    """

    predictor: str
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 64
    stop: tuple[str, ...] = ()
    draft: bool = True
    allowed: Allowed | None = None
    top: int = 0
    scored: bool = False
    own_past: bool = False


@dataclass(frozen=True)
class Voters:
    """The neighbours with the token that was written: how heavy each is, and its share in the token's probability."""

    positions: Tensor
    similarity: Tensor
    weight: Tensor
    share: Tensor  # zero where the predictor has no p_kNN


@dataclass(frozen=True)
class Scored:
    """A token, its log-probability under the predictor (before temperature and filters), and the likeliest ones."""

    id: int
    log_prob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Written:
    """A token that was written."""

    id: int
    log_prob: float  # under the predictor, before temperature and filters
    base_state: Tensor  # [D], for the base model's own opinion
    voters: Voters
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens and their log-probabilities


@dataclass(eq=False)
class Writing:
    """A text in progress."""

    prompt: list[int]
    order: Order
    sample: int
    stream: TextStream
    tokens: list[Written] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)  # the tokens of the prompt, if they are asked for
    finish_reason: str | None = None
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    searches: int = 0
    seconds: float = 0.0
    chances: Chances = field(default_factory=Chances)

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def last(self) -> int:
        return self.tokens[-1].id
