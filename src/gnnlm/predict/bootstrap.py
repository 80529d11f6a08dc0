"""Intervals by bootstrap over whole documents: tokens of one document are too alike to be drawn on their own.

With one seed, the same documents are drawn whatever is measured on them. A change between two predictors is measured
token by token before anything is drawn (a paired bootstrap): how hard a document is cancels out.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gnnlm.predict.predictor import perplexity

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
CHUNK_DRAWS = 2**22  # documents drawn at once


def bootstrap_means(values: Floats, document: Ints, samples: int, seed: int) -> Floats:
    """Return the mean of all tokens' values in each resample of the documents, in ascending order."""
    count = int(document.max()) + 1
    sums = np.bincount(document, weights=values, minlength=count)
    sizes = np.bincount(document, minlength=count)
    rng = np.random.default_rng(seed)
    parts = []
    step = max(1, CHUNK_DRAWS // count)
    for start in range(0, samples, step):
        drawn = rng.integers(count, size=(min(step, samples - start), count))
        parts.append(sums[drawn].sum(1) / np.maximum(sizes[drawn].sum(1), 1))
    return np.sort(np.concatenate(parts))


def bootstrap_interval(scores: Floats, document: Ints, samples: int, seed: int) -> tuple[float, float]:
    """Return the 95% interval of perplexity, from the log-probability of each token."""
    means = bootstrap_means(-scores, document, samples, seed)  # not interpolated: a mean may be infinite
    return perplexity(means[int(0.025 * (samples - 1))]), perplexity(means[round(0.975 * (samples - 1))])


def change_interval(gains: Floats, document: Ints, samples: int, seed: int) -> tuple[float, float] | None:
    """Return the 95% interval of the relative change of perplexity, from each token's gain; None for one document.

    A gain is the difference of two log-probabilities of one token, so its "perplexity" is a ratio of perplexities.
    """
    if len(np.unique(document)) < 2:
        return None
    low, high = bootstrap_interval(gains, document, samples, seed)
    return low - 1, high - 1
