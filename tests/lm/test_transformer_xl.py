"""Relative positions against the formula; memory against one long pass."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnlm.config import LMConfig
from gnnlm.datastore.encode import _check_memory, encode_tokens
from gnnlm.lm.native_lm import NativeLM, load_native
from gnnlm.lm.transformer_xl import TransformerXL, TransformerXLOptions, distance_sinusoids

SMALL = TransformerXLOptions(vocab_size=20, width=16, layers=3, heads=2, ffn=32, segment=4, memory=4)


def make_model(**changes: object) -> TransformerXL:
    torch.manual_seed(0)
    model = TransformerXL(dataclasses.replace(SMALL, **changes)).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(
    "changes", [{}, {"same_length": True}, {"clamp": 2}, {"shared_biases": False}, {"pre_norm": True}]
)
def test_attention_is_the_formula(changes: dict[str, object]) -> None:
    """One layer, one segment behind a memory, edge by edge."""
    model = make_model(layers=1, **changes)
    options, layer, (u, v) = model.options, model.layers[0], model.biases[0]
    past, tokens = torch.randn(1, 4, 16), torch.randint(20, (1, 3))
    x = model.inputs(tokens)[0] * 4
    seen = torch.cat([past[0], x])
    if options.pre_norm:
        seen = layer.attention_norm(seen)
    d = options.head_size
    distances = distance_sinusoids(torch.arange(8).clamp(max=options.clamp or 99), 16)
    out = torch.empty(3, 16)
    for t in range(3):
        for h in range(2):
            own = slice(h * d, (h + 1) * d)
            q = layer.query.weight[own] @ seen[4 + t]
            scores, values = [], []
            for s in range(4 + t + 1):
                r = 4 + t - s
                if options.same_length and r >= options.memory:
                    continue
                k, value = (weight[own] @ seen[s] for weight in layer.key_value.weight.chunk(2))
                position = layer.position.weight[own] @ distances[r]
                scores.append(((q + u[h]) @ k + (q + v[h]) @ position) / math.sqrt(d))
                values.append(value)
            out[t, own] = torch.stack(scores).softmax(0) @ torch.stack(values)
    x = x + layer.output(out)
    if options.pre_norm:
        want = x + layer.narrow(layer.widen(layer.ffn_norm(x)).relu())
    else:
        x = layer.attention_norm(x)
        want = layer.ffn_norm(x + layer.narrow(layer.widen(x).relu()))
    torch.testing.assert_close(model(tokens, [past]).states[0], want)


def test_memory_equals_one_long_pass() -> None:
    """Where the memory holds everything before, segments change nothing."""
    tokens = torch.randint(20, (2, 12))
    model = make_model(memory=12)
    whole = model(tokens).states
    torch.testing.assert_close(model.stream(tokens).states, whole)
    parts, past = [], None
    for part in tokens.split([5, 1, 6], dim=1):
        out = model(part, past)
        parts.append(out.states)
        past = out.past
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_one_layer_with_same_length_needs_no_more_memory() -> None:
    """Every token attends to `memory` tokens whatever the segment: with one layer that is one long pass, banded."""
    tokens = torch.randint(20, (1, 12))
    model = make_model(layers=1, same_length=True)
    torch.testing.assert_close(model.stream(tokens).states, model(tokens).states)


@pytest.mark.parametrize("memory", [4, 8, 6, 2])
def test_receptive_field(memory: int) -> None:
    """A change further back than the receptive field moves nothing; one right at its edge does."""
    model = make_model(layers=2, memory=memory)
    field = model.receptive_field
    tokens = torch.randint(20, (1, 40))
    before = model.stream(tokens).states[0]
    reach = 0
    for t in range(40):
        changed = tokens.clone()
        changed[0, t] = (changed[0, t] + 1) % 20
        moved = (model.stream(changed).states[0] - before).abs().amax(1) > 1e-7
        assert not moved[:t].any()
        reach = max(reach, int(moved.nonzero().max()) - t + 1)
    assert reach <= field
    if memory % 4 == 0:
        assert reach == field


def test_adaptive_bands_train() -> None:
    model = make_model(cutoffs=(5, 9), factor=2.0).train()
    out = model(torch.randint(20, (2, 4)))
    model.head.target_log_probs(out.states.flatten(0, 1), torch.arange(8) * 2).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_papers_model_has_its_parameters() -> None:
    with torch.device("meta"):
        enwik8 = TransformerXL(TransformerXLOptions(vocab_size=208))
    assert round(sum(p.numel() for p in enwik8.parameters()) / 1e6) == 41


def test_windows_that_overlap_enough_carry_the_memory_exactly() -> None:
    """Windows in whole segments that repeat the receptive field give the states of one pass over the whole text."""
    model = make_model(layers=2)
    lm = NativeLM(model)
    tokens = np.random.default_rng(0).integers(20, size=70)
    config = LMConfig(window=12 + 16, context=12, batch_tokens=64)
    assert model.receptive_field == config.context
    got = encode_tokens(lm, tokens, config).states
    read = torch.tensor([[lm.start_token, *tokens.tolist()]])
    torch.testing.assert_close(torch.from_numpy(got), model.stream(read).states[0])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
@settings(deadline=None, max_examples=25)
@pytest.mark.parametrize("changes", [{}, {"memory": 6}, {"memory": 3, "same_length": True}, {"memory": 0}])
def test_a_stream_cut_anywhere_is_the_whole_text(changes: dict[str, object], cuts: list[int]) -> None:
    lm = NativeLM(make_model(**changes))
    tokens = torch.randint(20, (2, sum(cuts)))
    parts, past = [], None
    for part in tokens.split(cuts, dim=1):
        out = lm.stream(part, past)
        parts.append(out.states)
        past = out.past
    torch.testing.assert_close(torch.cat(parts, 1), lm.encode(tokens))


def test_windows_that_cut_the_memory_short_are_told(logged: Callable[[], str]) -> None:
    lm = NativeLM(make_model())
    field = lm.receptive_field
    assert field == 16
    for window, context, told in ((32, 16, False), (32, 12, True), (30, 16, True), (34, 18, True)):
        _check_memory(lm, LMConfig(continuous=True, window=window, context=context))
        assert ("cut this model's memory short" in logged()) == told
    _check_memory(lm, LMConfig(window=30, context=2))  # every document by itself
    assert not logged()


def test_tied_projections_are_one_parameter(tmp_path: Path) -> None:
    """Also of a copy and of what is loaded: else an optimizer would step the first of them twice."""
    model = make_model(cutoffs=(8,), factor=2.0)
    for one in (model, copy.deepcopy(model)):
        assert one.head.head_projection is one.inputs.projections[0]
        assert one.head.projections[0] is one.inputs.projections[1]
        assert len(list(one.parameters())) == len({p.data_ptr() for p in one.parameters()})
    NativeLM(copy.deepcopy(model)).save(tmp_path)
    tokens = torch.randint(20, (1, 9))
    torch.testing.assert_close(load_native(tmp_path).encode(tokens), NativeLM(model).encode(tokens))
