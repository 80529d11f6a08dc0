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
from gnnlm.datastore.encode import encode_tokens, encode_windows, round_states, text_windows
from gnnlm.errors import ModelError
from gnnlm.lm.base_lm import BaseLM
from gnnlm.lm.load_lm import load_lm


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


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    window=st.integers(4, 24),
    context=st.integers(0, 23),
    lines=st.booleans(),
)
def test_a_continuous_text_is_read_across_documents(lengths: list[int], window: int, context: int, lines: bool) -> None:
    """Each position's state has read what stands before it in the whole split, as far as its window reaches."""
    context = min(context, window - 1)
    tokens = (np.arange(sum(lengths)) * 7) % 11
    places = np.concatenate([np.arange(n + 1) + o for n, o in zip(lengths, np.cumsum([0, *lengths]), strict=False)])
    config = LMConfig(window=window, context=context, whole_lines=lines, continuous=True, batch_tokens=64)
    got = encode_windows(Counting(), list(text_windows(tokens, places, Counting(), config)), 64, "state").states
    assert len(got) == len(tokens) + len(lengths)
    for place, (read, last) in zip(places, got.tolist(), strict=True):
        assert last == (tokens[place - 1] if place else 0)  # it has just read the token before it
        assert min(place, context) + 1 <= read <= window


class Counting:
    """A model whose state tells how many tokens it has read and which one last."""

    width, vocab_size, start_token, start_always, receptive_field, segment = 2, 11, 0, False, None, None

    def encode(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        count = torch.arange(1, tokens_BT.shape[1] + 1).expand_as(tokens_BT)
        return torch.stack([count, tokens_BT], dim=-1).float()


def test_last_feed_forward_as_key(lm: BaseLM) -> None:
    tokens = np.arange(20) % 256
    made = encode_tokens(lm, tokens, LMConfig(window=32, context=8), key="ffn_input")
    read: list[torch.Tensor] = []
    layer = lm.model.model.layers[-1]
    hook = layer.post_attention_layernorm.register_forward_hook(lambda *args: read.append(args[2]))
    states = one_pass(lm, tokens)
    hook.remove()
    assert made.keys is not None
    torch.testing.assert_close(torch.from_numpy(made.keys), read[0][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.from_numpy(made.states), states, rtol=1e-4, atol=1e-5)
