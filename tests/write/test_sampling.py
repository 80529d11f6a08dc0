"""Choosing tokens: against transformers' own filters, and by frequency."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnlm.errors import ConfigError
from gnnlm.write.generate_options import GenerateOptions
from gnnlm.write.sampling import choose_token, filtered_probs, uniform

NOTHING = torch.empty(0, dtype=torch.long)


@given(
    seed=st.integers(0, 999),
    temperature=st.floats(0.2, 3.0),
    top_k=st.integers(0, 20),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.9),
)
def test_filters_are_those_of_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(1, 17, generator=generator, dtype=torch.float64).mul(2).log_softmax(-1)
    chain = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        chain.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        chain.append(TopPLogitsWarper(top_p))
    if min_p > 0.0:
        chain.append(MinPLogitsWarper(min_p))
    want = chain(torch.zeros(1, 1, dtype=torch.long), scores).softmax(-1)[0]
    got = filtered_probs(GenerateOptions(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p), scores[0])
    torch.testing.assert_close(got / got.sum(), want)


def test_the_penalty_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    scores = torch.randn(1, 9).log_softmax(-1)
    seen = torch.tensor([3, 3, 7])
    want = RepetitionPenaltyLogitsProcessor(1.7)(seen[None], scores)[0].argmax()
    assert choose_token(GenerateOptions(repetition_penalty=1.7), scores[0], seen, 0, 0) == int(want)


def test_samples_have_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.0, 0.2, 0.3])
    options = GenerateOptions(temperature=1.0, seed=3)
    drawn = [choose_token(options, probs.log(), NOTHING, 0, place) for place in range(4000)]
    counts = np.bincount(drawn, minlength=4) / 4000
    assert counts[1] == 0
    np.testing.assert_allclose(counts, probs, atol=0.03)


def test_uniform_numbers_depend_on_all_three() -> None:
    numbers = {uniform(seed, sample, place) for seed in (0, 1) for sample in (0, 1) for place in range(50)}
    assert len(numbers) == 200
    assert all(0 <= number < 1 for number in numbers)
    assert 0.4 < np.mean([uniform(7, 0, place) for place in range(500)]) < 0.6


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "hot"},
        {"temperature": True},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.5},
        {"repetition_penalty": 0.0},
        {"seed": -1},
        {"seed": 2**63},
    ],
)
def test_bad_values_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(wrong))}: expected"):
        GenerateOptions.checked(**wrong)
