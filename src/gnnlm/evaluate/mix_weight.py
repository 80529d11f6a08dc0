"""One weight, buckets or a gate: each is fitted on valid, and cross-validation over documents chooses among them.

k and T are chosen beforehand, on all of valid; what is cross-validated are the weights.

Shapes: N positions, K neighbours, F features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gnnlm.datastore.store import Store
from gnnlm.lm.head import Confidence
from gnnlm.predict.gate import LOGIT, Gate, features, standardised
from gnnlm.predict.knn import Evidence, Mix, bucket_of, knn_target_log_probs, mix_log_probs
from gnnlm.predict.split_scoring import SearchedText
from gnnlm.retrieval.neighbours import Neighbours

VARIANTS = ("one weight", "buckets", "gate")  # the simplest first: it wins ties
FOLDS = 5
PRIOR = 6.0  # of the gate's weights: a penalty of this times their squares, in nats over all positions
ITERATIONS = 200
TINY = 1e-300  # the smallest probability that counts


@dataclass(frozen=True)
class Sample:
    """Positions of a text under one k and T: log-probabilities of the next token, and the evidence for its weight."""

    lm_N: Tensor
    knn_N: Tensor  # NaN where there is no neighbour
    evidence: Evidence

    def __getitem__(self, index: Tensor) -> Sample:
        seen = self.evidence
        features_NF = None if seen.features_NF is None else seen.features_NF[index]
        evidence = Evidence(seen.nearest_N[index], seen.read_N[index], features_NF)
        return Sample(self.lm_N[index], self.knn_N[index], evidence)

    def log_probs(self, mix: Mix) -> Tensor:
        """The log-probability of each token under the mix, [N]."""
        return mix_log_probs(self.lm_N, self.knn_N, mix.weight_of(self.evidence))

    def losses(self, weights: Sequence[float]) -> Tensor:
        """The negative log-probability of each token under each of some weights, [weights, N]."""
        mixed = [mix_log_probs(self.lm_N, self.knn_N, weight) for weight in weights]
        return -torch.stack(mixed).clamp(min=math.log(TINY))


def neighbour_tokens(store: Store, found: Neighbours) -> Tensor:
    """The next token of every neighbour; -1 where there is no neighbour."""
    return store.tokens(found.positions.clamp(min=0)).masked_fill_(found.positions < 0, -1)


@torch.inference_mode()
def sample_text(
    text: SearchedText,
    store: Store,
    scores: npt.NDArray[np.float64],
    mix: Mix,
    sure: Confidence | None = None,
    chunk: int = 4096,
) -> Sample:
    """Every token of a text, with its log-probability in `scores`, under the k and T of a mix; a gate needs `sure`."""
    lines = text.text.token_positions()
    parts = []
    for start in range(0, len(lines), chunk):
        part = lines[start : start + chunk]
        found, read_N = text.table.at(part, mix.k), text.read(part)
        tokens_NK = neighbour_tokens(store, found)
        similarity_NK, targets_N = found.similarity, text.text.tokens(part)
        knn_N = knn_target_log_probs(tokens_NK, mix.neighbour_weights(similarity_NK.double()), targets_N)
        columns = [knn_N, similarity_NK[:, 0], read_N]
        if sure is not None:
            here = Confidence(*(each[start : start + chunk] for each in sure))
            columns.append(features(tokens_NK, similarity_NK, mix.neighbour_weights(similarity_NK), here))
        parts.append(columns)
    knn_N, *seen = map(torch.cat, zip(*parts, strict=True))
    return Sample(torch.from_numpy(scores), knn_N, Evidence(*seen))


def folds_of(document_N: Tensor) -> Tensor:
    """The fold of each position: whole documents, or contiguous blocks where there are fewer documents than folds.

    >>> folds_of(torch.tensor([0, 0, 1, 2, 3, 4])).tolist(), folds_of(torch.tensor([0, 0, 0, 0, 0])).tolist()
    ([0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    """
    found, number_N = document_N.unique(return_inverse=True)
    if len(found) < FOLDS:
        return torch.arange(len(document_N)) * FOLDS // len(document_N)
    fold_N: Tensor = number_N * FOLDS // len(found)
    return fold_N


@dataclass(frozen=True)
class FittedVariants:
    """The mix of each variant, fitted on all of valid, and its mean loss on valid by cross-validation."""

    mixes: Mapping[str, Mix]
    losses: Mapping[str, float]

    @property
    def best(self) -> str:
        """The variant with the lowest loss."""
        return min(self.losses, key=lambda name: self.losses[name])

    def as_dict(self) -> dict[str, Any]:
        return {name: {"valid_loss": self.losses[name], "mix": mix.as_dict()} for name, mix in self.mixes.items()}


def choose_weights(
    samples: Mapping[str, tuple[Mix, Sample]], document_N: Tensor, lambdas: Sequence[float]
) -> FittedVariants:
    """Fit each variant, given its k, T and edges and the sample of valid under them, and cross-validate it."""
    mixes, losses = {}, {}
    fold_N = folds_of(document_N)
    for variant, (given, sample) in samples.items():
        total = 0.0
        for fold in fold_N.unique().tolist():
            mix = fit_weights(variant, given, sample[fold_N != fold], lambdas)
            total -= float(sample[fold_N == fold].log_probs(mix).clamp(min=math.log(TINY)).sum())
        mixes[variant] = fit_weights(variant, given, sample, lambdas)
        losses[variant] = total / len(fold_N)
    return FittedVariants(mixes, losses)


def fit_weights(variant: str, given: Mix, sample: Sample, lambdas: Sequence[float]) -> Mix:
    """The mix of a variant with the weights that are best for a sample."""
    first_N = sample.evidence.read_N == 0
    known_N = ~sample.knn_N.isnan()
    first = fit_first(sample[first_N & known_N], lambdas)
    rest = sample[~first_N & known_N]
    one = fit_one(rest, lambdas)
    mix = replace(given, weight=one, first=first)
    if variant == "gate":
        return replace(mix, edges=(), weights=(), gate=fit_gate(rest, one))
    if variant == "buckets":
        bucket_N = bucket_of(rest.evidence.nearest_N, given.edges)
        members = [rest[bucket_N == number] for number in range(len(given.edges) + 1)]
        return replace(mix, weights=[fit_one(member, lambdas) if len(member.lm_N) else one for member in members])
    return replace(mix, edges=(), weights=())


def fit_one(sample: Sample, lambdas: Sequence[float]) -> float:
    """The best single weight for all positions of a sample."""
    return float(lambdas[int(sample.losses(lambdas).sum(1).argmin())])


def fit_first(sample: Sample, lambdas: Sequence[float]) -> float:
    """The weight for the first tokens of texts: the smallest that is within a standard error of the best.

    There is one such position for each document, too few to tell weights apart that are about as good. And a text
    need not begin as a document of the corpus does, so one more text is counted in that begins as none does.
    """
    weights = sorted({0.0, *lambdas})
    unknown = -torch.log1p(-torch.tensor(weights, dtype=torch.float64))  # p_kNN gives its first token nothing
    losses = torch.cat([sample.losses(weights), unknown[:, None]], dim=1)
    worse = losses - losses[losses.sum(1).argmin()]
    near = worse.mean(1) <= worse.std(1, correction=0) / math.sqrt(losses.shape[1])
    return float(weights[int(torch.nonzero(near)[0, 0])])


def fit_gate(sample: Sample, start: float) -> Gate:
    """The gate with the largest likelihood of the mix, under a weak prior; L-BFGS from the gate that is `start`."""
    features_NF = sample.evidence.features_NF
    assert features_NF is not None, "a gate is fitted on features"
    count, width = features_NF.shape
    mean = [0.0] * width
    spread = [1.0] * width
    if count:
        mean = [_rounded(value, 9) for value in features_NF.mean(0).tolist()]
        spread = [_rounded(s, 9) if s > 1e-9 else 1.0 for s in features_NF.std(0, correction=0).tolist()]
    inputs_NF = standardised(features_NF, mean, spread)
    p_lm_N, p_knn_N = sample.lm_N.exp(), sample.knn_N.exp()
    beginning = torch.tensor(start, dtype=torch.float64).logit().clamp(-LOGIT / 2, LOGIT / 2)
    values = torch.cat([inputs_NF.new_zeros(inputs_NF.shape[1]), beginning[None]]).requires_grad_()
    optimizer = torch.optim.LBFGS([values], max_iter=ITERATIONS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        weight_N = (inputs_NF @ values[:-1] + values[-1]).clamp(-LOGIT, LOGIT).sigmoid()
        mixed_N = weight_N * p_knn_N + (1 - weight_N) * p_lm_N
        total: Tensor = PRIOR * values[:-1].square().sum() - mixed_N.clamp(min=TINY).log().sum()
        total = total / max(1, count)
        total.backward()
        return total

    with torch.enable_grad():
        optimizer.step(loss)
    *weights, bias = (_rounded(value, 6) for value in values.tolist())
    return Gate(mean, spread, weights, bias)


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
