"""Encoding against one full pass, and against a loop over windows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnlm.config import LMConfig
from gnnlm.corpus.windows import plan_windows
from gnnlm.datastore.encode import encode_tokens, round_states
from gnnlm.errors import ModelError
from gnnlm.lm.load import load_lm
from gnnlm.lm.protocol import BaseLM


@pytest.fixture(scope="module")
def lm(tiny_lm_dir: Path) -> BaseLM:
    return load_lm(LMConfig(model=str(tiny_lm_dir), window=32, context=8))


def one_pass(lm: BaseLM, tokens: np.ndarray) -> torch.Tensor:
    """The model's own hidden states over start token + tokens, no batching, no windows."""
    ids = torch.tensor([[lm.start_token, *tokens.tolist()]])
    with torch.no_grad():
        out = lm.model(ids, output_hidden_states=True)
    return out.hidden_states[-1][0]


def test_document_that_fits_a_window(lm: BaseLM) -> None:
    tokens = np.arange(20) % 256
    got = encode_tokens(lm, tokens, LMConfig(window=32, context=8)).states
    assert got.shape == (21, 32)
    torch.testing.assert_close(torch.from_numpy(got), one_pass(lm, tokens), rtol=1e-4, atol=1e-5)


@given(length=st.integers(1, 90), window=st.integers(4, 24), context=st.integers(0, 23), batch=st.integers(1, 200))
def test_longer_documents_go_window_by_window(lm: BaseLM, length: int, window: int, context: int, batch: int) -> None:
    context = min(context, window - 1)
    tokens = (np.arange(length) * 7 + length) % 256
    got = encode_tokens(lm, tokens, LMConfig(window=window, context=context, batch_tokens=batch)).states
    for w in plan_windows(length, window, context):
        states = one_pass(lm, tokens[w.start : w.stop])
        want = states[w.first - w.start :]
        torch.testing.assert_close(torch.from_numpy(got[w.first : w.stop + 1]), want, rtol=1e-4, atol=1e-4)


@given(change=st.integers(0, 59))
def test_states_before_a_changed_token_stay(lm: BaseLM, change: int) -> None:
    config = LMConfig(window=16, context=8)
    tokens = np.arange(60) % 200
    before = encode_tokens(lm, tokens, config).states
    tokens[change] = 250
    after = encode_tokens(lm, tokens, config).states
    np.testing.assert_allclose(after[: change + 1], before[: change + 1], rtol=1e-5, atol=1e-5)
    assert not np.allclose(after[change + 1], before[change + 1])


def test_states_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ModelError, match="do not fit in fp16"):
        round_states(np.array([[1e6]], dtype=np.float32), "fp16")
    with pytest.raises(ModelError, match="are not numbers"):
        round_states(np.array([[np.nan]], dtype=np.float32), "fp32")
