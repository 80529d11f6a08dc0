"""A change of perplexity with its 95% interval, and how figures are written everywhere in the project."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from gnnlm.predict.bootstrap import Floats, Ints, change_interval
from gnnlm.predict.predictor import perplexity


class PerplexityChange(BaseModel):
    """A perplexity and its relative change against another one, with a 95% interval if there are several documents."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ppl: float
    change: float
    change_low: float | None
    change_high: float | None

    @classmethod
    def paired(cls, scores: Floats, against: Floats, document: Ints, samples: int, seed: int) -> PerplexityChange:
        """Compare two log-probabilities of each token, with a paired bootstrap over the documents of the tokens."""
        gains = scores - against
        low, high = change_interval(gains, document, samples, seed) or (None, None)
        return cls(
            ppl=perplexity(-float(scores.mean())),
            change=perplexity(-float(gains.mean())) - 1,
            change_low=low,
            change_high=high,
        )

    @property
    def is_better(self) -> bool:
        """Whether the perplexity is significantly lower."""
        return self.change_high is not None and self.change_high < 0

    @property
    def is_worse(self) -> bool:
        """Whether the perplexity is significantly higher."""
        return self.change_low is not None and self.change_low > 0

    @property
    def is_significant(self) -> bool:
        return self.is_better or self.is_worse

    @property
    def words(self) -> str:
        return change_words(self.change, self.change_low, self.change_high)


def change_words(change: float | None, low: float | None, high: float | None) -> str:
    """
    >>> change_words(-0.1, -0.125, -0.08), change_words(0.1, None, None), change_words(None, None, None)
    ('-10.0% (-12.5 to -8.0)', '+10.0%', 'inf')
    """
    if change is None:
        return "inf"
    interval = "" if low is None or high is None else f" ({_percent(low)} to {_percent(high)})"
    return f"{_percent(change)}%{interval}"


def _percent(share: float) -> str:
    return f"{100 * share:+.1f}" if share < 100 else f"{100 * share:+.3g}"


def short(value: float | None) -> str:
    """
    >>> short(8.174), short(102.34), short(1149776.2)
    ('8.17', '102.3', '1.15e+06')
    """
    if value is None:
        return "inf"
    if value < 100:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 1e4 else f"{value:.3g}"
