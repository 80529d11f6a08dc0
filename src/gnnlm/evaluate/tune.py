"""Choose k, T and lambda on valid from stored neighbours, for base and for GNN.

Shapes: N positions, K neighbours; tables are [bucket, T, k, lambda].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gnnlm.config import TuneConfig
from gnnlm.config.evaluation_config import COSINE_TEMPERATURES, L2_TEMPERATURES
from gnnlm.datastore.store import Store
from gnnlm.evaluate.mix_weight import TINY, FittedVariants, choose_weights, neighbour_tokens, sample_text
from gnnlm.gnn.gnn_options import similarity_unit
from gnnlm.predict.knn import Mix, bucket_of
from gnnlm.predict.predictor import MIXED, STATE_OF
from gnnlm.predict.split_scoring import SearchedText, SplitScores
from gnnlm.progress import Track

BUCKET_POSITIONS = 200  # the fewest positions that a weight is chosen on


def default_temperatures(metric: str, similarity: npt.NDArray[np.float32]) -> tuple[float, ...]:
    if metric == "cosine":
        return COSINE_TEMPERATURES
    return tuple(t * similarity_unit(metric, similarity) for t in L2_TEMPERATURES)


def knn_probs(
    tokens_NK: Tensor, similarity_NK: Tensor, targets_N: Tensor, ks: Sequence[int], temperature: float
) -> Tensor:
    """p_kNN of the target for several k at once, [len(ks), N]; NaN where there is no neighbour.

    One cumulative sum over neighbours, nearest first, holds the answer for every k.
    """
    scaled_NK = similarity_NK.double() / temperature
    weights_NK = (scaled_NK - scaled_NK[:, :1]).exp()
    totals_NK = weights_NK.cumsum(1)
    hits_NK = (weights_NK * (tokens_NK == targets_N[:, None])).cumsum(1)
    columns = torch.tensor([min(k, similarity_NK.shape[1]) - 1 for k in ks])
    return (hits_NK[:, columns] / totals_NK[:, columns]).T


def mix_losses(lm_N: Tensor, knn_kN: Tensor, lambdas: Sequence[float]) -> Tensor:
    """Summed negative log-probability of the mix for every k and lambda, [k, lambda]."""
    p_lm_N = lm_N.double().exp()
    none_N = knn_kN[0].isnan()
    knn_kN = torch.where(none_N, p_lm_N, knn_kN)
    columns = [-((1 - lam) * p_lm_N + lam * knn_kN).clamp(min=1e-300).log().sum(1) for lam in lambdas]
    return torch.stack(columns, dim=1)


@dataclass(frozen=True)
class Grid:
    """The values to try."""

    ks: Sequence[int]
    temperatures: Sequence[float]
    lambdas: Sequence[float]
    buckets: int = 1


@dataclass(frozen=True)
class LossTable:
    """The mean loss of every combination, with one weight for all positions: [T][k][lambda] for each state."""

    ks: list[int]
    temperatures: list[float]
    lambdas: list[float]
    losses: dict[str, list[list[list[float]]]]

    def best(self, state: str) -> Mix:
        """The mix with the lowest loss."""
        losses = np.array(self.losses[state])
        t, k, weight = (int(i) for i in np.unravel_index(int(losses.argmin()), losses.shape))
        return Mix(self.ks[k], float(self.temperatures[t]), float(self.lambdas[weight]))

    def ascending(self) -> LossTable:
        """Sort T and lambda, as k is.

        >>> LossTable([8], [2.0, 1.0], [0.0], {"base": [[[0.2]], [[0.1]]]}).ascending()
        LossTable(ks=[8], temperatures=[1.0, 2.0], lambdas=[0.0], losses={'base': [[[0.1]], [[0.2]]]})
        """
        t, weight = np.argsort(self.temperatures), np.argsort(self.lambdas)
        losses = {name: np.array(values)[t][:, :, weight].tolist() for name, values in self.losses.items()}
        return LossTable(self.ks, sorted(self.temperatures), sorted(self.lambdas), losses)


def grid_of(config: TuneConfig, buckets: int, metric: str, similarity: npt.NDArray[np.float32]) -> Grid:
    """The values of the config; temperatures that suit the metric where the config names none."""
    temperatures = config.temperatures or default_temperatures(metric, similarity)
    return Grid(config.ks, temperatures, config.lambdas, buckets)


def tune_mixes(
    text: SearchedText, store: Store, scores: dict[str, npt.NDArray[np.float64]], grid: Grid, chunk: int = 4096
) -> tuple[dict[str, Mix], LossTable]:
    """The best (k, T, lambda) for base and for GNN, and the loss of every combination.

    With several buckets of positions, by the similarity of the nearest neighbour, each bucket has its own lambda. A
    small valid split gets fewer buckets.
    """
    temperatures = grid.temperatures
    lambdas = grid.lambdas
    ks = sorted({min(k, text.table.k) for k in grid.ks})
    lines = text.text.token_positions()
    nearest_N = text.table.at(lines, 1).similarity[:, 0]
    edges = bucket_edges(nearest_N, max(1, min(grid.buckets, len(lines) // BUCKET_POSITIONS)))
    bucket_N = bucket_of(nearest_N, edges)
    shape = (len(edges) + 1, len(temperatures), len(ks), len(lambdas))
    losses = {name: torch.zeros(shape, dtype=torch.float64) for name in scores}
    with Track("tune", len(lines) * len(temperatures), "mixes") as track:
        for start in range(0, len(lines), chunk):
            part = lines[start : start + chunk]
            found = text.table.at(part)
            tokens_NK = neighbour_tokens(store, found)
            similarity_NK = found.similarity
            targets_N = text.text.tokens(part)
            members = [torch.nonzero(bucket_N[start : start + chunk] == b)[:, 0] for b in range(shape[0])]
            for number, temperature in enumerate(temperatures):
                knn_kN = knn_probs(tokens_NK, similarity_NK, targets_N, ks, temperature)
                for name, values in scores.items():
                    lm_N = torch.from_numpy(values[start : start + chunk])
                    for b, member in enumerate(members):
                        losses[name][b, number] += mix_losses(lm_N[member], knn_kN[:, member], lambdas)
                track.advance(len(part))
    chosen, tables = {}, {}
    for name, table in losses.items():
        t, k = (int(i) for i in np.unravel_index(int(table.amin(-1).sum(0).argmin()), shape[1:3]))
        one = float(lambdas[int(table[:, t, k].sum(0).argmin())])
        each = [float(lambdas[i]) for i in table[:, t, k].argmin(-1).tolist()]
        chosen[name] = Mix(ks[k], float(temperatures[t]), one, edges, each if edges else ())
        tables[name] = (table.sum(0) / len(lines)).tolist()
    return chosen, LossTable(ks, list(temperatures), list(lambdas), tables)


def choose_mixes(
    text: SearchedText, store: Store, scored: SplitScores, tuned: tuple[dict[str, Mix], LossTable]
) -> dict[str, FittedVariants]:
    """Fit one weight, buckets and a gate on valid, for base and for GNN, given the result of `tune_mixes`.

    One weight has its own k and T; the gate shares those of the buckets.
    """
    mixes, table = tuned
    lines = text.text.token_positions()
    document_N = text.text.document_of(lines)
    chosen = {}
    for name, mix in mixes.items():
        scores, one = scored.log_probs[name], table.best(name)
        sample = sample_text(text, store, scores, mix, scored.sure[name])
        samples = {"one weight": (one, sample_text(text, store, scores, one))}
        if mix.weights:
            samples["buckets"] = (mix, sample)
        samples["gate"] = (mix, sample)
        chosen[name] = choose_weights(samples, document_N, table.lambdas)
    return chosen


@dataclass(frozen=True)
class TuningResult:
    """The mixes chosen on valid for base and for GNN, the losses of the grid, and the variants that competed."""

    mixes: dict[str, Mix]
    table: LossTable
    variants: dict[str, FittedVariants]  # empty where no gate was tried


def tune(text: SearchedText, store: Store, scored: SplitScores, grid: Grid, gate: bool) -> TuningResult:
    """Choose the mixes for a scored text; with `gate`, gates compete with the other weights."""
    mixes, table = tune_mixes(text, store, scored.log_probs, grid)
    if not gate:
        return TuningResult(mixes, table, {})
    variants = choose_mixes(text, store, scored, (mixes, table))
    return TuningResult({name: fitted.mixes[fitted.best] for name, fitted in variants.items()}, table, variants)


def losses_of(text: SearchedText, store: Store, scored: SplitScores, mixes: Mapping[str, Mix]) -> dict[str, float]:
    """The mean loss of a scored text under every predictor, mixed with kNN as `mixes` say."""
    found = {name: -float(np.mean(values)) for name, values in scored.log_probs.items()}
    for name in MIXED:
        if (state := STATE_OF[name]) in scored.log_probs:
            mix = mixes[state]
            sample = sample_text(text, store, scored.log_probs[state], mix, scored.sure.get(state))
            found[name] = -float(sample.log_probs(mix).clamp(min=math.log(TINY)).mean())
    return found


def bucket_edges(nearest_N: Tensor, buckets: int) -> list[float]:
    """Similarities that cut positions into buckets of about the same size.

    >>> bucket_edges(torch.tensor([0.1, 0.2, 0.3, 0.4]), 2)
    [0.25]
    """
    real_N = nearest_N[torch.isfinite(nearest_N)].double()
    if buckets == 1 or not len(real_N):
        return []
    shares = torch.arange(1, buckets, dtype=torch.float64) / buckets
    return sorted({round(float(edge), 6) for edge in torch.quantile(real_N, shares)})
