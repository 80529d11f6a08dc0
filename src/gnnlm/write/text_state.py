"""Texts in progress: the settings of each, and what has been written of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from gnnlm.predict.open_book import OpenBook
from gnnlm.retrieval.index import Allowed
from gnnlm.write.detokenizer import Detokenizer
from gnnlm.write.drafter import Chances
from gnnlm.write.generate_options import GenerateOptions


@dataclass(frozen=True)
class TextSettings:
    """A request for one text, resolved against a book: the options, the predictor, what may be looked up.

    With each token, the `top` likeliest ones are recorded; with `scored`, those of the prompt are recorded too. With
    `max_tokens` of 0, the prompt is only read.
    """

    options: GenerateOptions
    predictor: str
    max_tokens: int
    allowed: Allowed | None = None
    top: int = 0
    scored: bool = False

    @classmethod
    def of(cls, options: GenerateOptions, model: OpenBook, allowed: Allowed | None) -> TextSettings:
        """Return settings for a model; refuse a predictor that it does not have."""
        predictor = options.predictor or model.predictor.names[-1]
        model.predictor.check((predictor,))
        return cls(options, predictor, options.max_tokens, allowed)


@dataclass(frozen=True)
class Voters:
    """The neighbours whose token was written, with their weights and their shares in the token's probability."""

    positions: Tensor
    similarity: Tensor
    weight: Tensor
    share: Tensor  # zero where the predictor has no p_kNN


@dataclass(frozen=True)
class ScoredToken:
    """A token, its log-probability under the predictor (before temperature and filters), and the likeliest ones."""

    id: int
    log_prob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class WrittenToken:
    """A token that was written."""

    id: int
    log_prob: float  # under the predictor, before temperature and filters
    base_state: Tensor  # [D], for the base model's own opinion
    voters: Voters
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens and their log-probabilities


@dataclass(eq=False)
class TextState:
    """A text in progress."""

    prompt: list[int]
    settings: TextSettings
    sample: int
    detokenizer: Detokenizer
    tokens: list[WrittenToken] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)  # the tokens of the prompt, if they are asked for
    finish_reason: str | None = None
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    searches: int = 0
    seconds: float = 0.0
    chances: Chances = field(default_factory=Chances)

    @property
    def shown(self) -> int:
        """How many tokens a finished text has: those before a stop string; an end token, which has no text, counts."""
        return self.detokenizer.kept + len(self.tokens) - len(self.detokenizer.offsets)

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def last(self) -> int:
        return self.tokens[-1].id
