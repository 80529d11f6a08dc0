"""p_kNN and the mix against dictionaries; sums to one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnlm.predict.knn import knn_target_log_probs, mix_log_probs, mixed_log_probs, neighbour_weights
from tests.reference.knn import knn_distribution, mix

VOCAB = 5
neighbours = st.lists(
    st.tuples(st.integers(0, VOCAB - 1), st.one_of(st.floats(0.3, 1.0), st.just(-math.inf))), min_size=1, max_size=9
).map(lambda found: sorted(found, key=lambda pair: -pair[1]))
positive = st.floats(0.005, 2.0)
weights = st.one_of(st.just(0.0), st.just(1.0), st.floats(0.01, 0.99))


@given(found=neighbours, k=st.integers(1, 9), temperature=positive, weight=weights, seed=st.integers(0, 99))
def test_against_dictionaries(
    found: list[tuple[int, float]], k: int, temperature: float, weight: float, seed: int
) -> None:
    tokens = [t if s != -math.inf else -1 for t, s in found]
    similarity = [s for _, s in found]
    lm = torch.randn(VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)
    want = mix(
        {t: float(p) for t, p in enumerate(lm.exp())}, knn_distribution(tokens, similarity, k, temperature), weight
    )
    tokens_NK = torch.tensor([tokens] * VOCAB)
    similarity_NK = torch.tensor([similarity] * VOCAB, dtype=torch.float64)
    weight_N = torch.tensor([weight], dtype=torch.float64)
    weights_NK = neighbour_weights(similarity_NK[:, :k], temperature)
    got = mixed_log_probs(lm[None], tokens_NK[:1], weights_NK[:1], weight_N)[0].exp()
    assert got.sum().item() == pytest.approx(1, abs=1e-9)
    target = mix_log_probs(lm, knn_target_log_probs(tokens_NK, weights_NK, torch.arange(VOCAB)), weight).exp()
    for token in range(VOCAB):
        assert got[token].item() == pytest.approx(want[token], abs=1e-9)
        assert target[token].item() == pytest.approx(want[token], abs=1e-9)


def test_weight_zero_means_no_effect() -> None:
    lm = torch.randn(4).log_softmax(-1)
    assert mix_log_probs(lm, torch.full((4,), -math.inf), 0.0).equal(lm)


def test_weight_one_keeps_impossible_tokens_impossible() -> None:
    lm = torch.zeros(2).log_softmax(-1)
    knn = torch.tensor([0.0, -math.inf])
    assert mix_log_probs(lm, knn, 1.0).tolist() == [0.0, -math.inf]


@given(each=st.lists(weights, min_size=3, max_size=3), seed=st.integers(0, 99))
def test_a_weight_for_each_position(each: list[float], seed: int) -> None:
    torch.manual_seed(seed)
    lm = torch.randn(3, VOCAB, dtype=torch.float64).log_softmax(-1)
    knn = torch.randn(3, VOCAB, dtype=torch.float64).masked_fill(torch.rand(3, VOCAB) < 0.4, -math.inf)
    knn[:, 0] = 0.5
    knn = knn.log_softmax(-1)
    got = mix_log_probs(lm, knn, torch.tensor(each, dtype=torch.float64))
    torch.testing.assert_close(got.exp().sum(-1), torch.ones(3, dtype=torch.float64))
    for row, weight in enumerate(each):
        torch.testing.assert_close(got[row], mix_log_probs(lm[row], knn[row], weight))
