"""The adaptive softmax against torch's and a full softmax; the Transformer against its own definition."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from gnnlm.lm.adaptive_softmax import AdaptiveHead, AdaptiveInput, load_head
from gnnlm.lm.adaptive_transformer import AdaptiveOptions, AdaptiveTransformer, sinusoids
from gnnlm.predict.knn import knn_target_log_probs, mix_log_probs, mixed_log_probs, neighbour_weights

SMALL = AdaptiveOptions(vocab_size=40, width=16, layers=3, heads=2, ffn=32, cutoffs=(8, 20), factor=2)


def make_head(tie: bool = True) -> AdaptiveHead:
    torch.manual_seed(0)
    return AdaptiveHead.beside(AdaptiveInput((8, 20, 40), (16, 8, 4), 16), tie, tie, 0.0)


def test_adaptive_softmax_is_torchs() -> None:
    head = make_head()
    peer = nn.AdaptiveLogSoftmaxWithLoss(16, 40, cutoffs=[8, 20], div_value=2.0, head_bias=False)
    peer.head.weight.data = torch.cat([head.words[0], head.classes]).data
    for band, tail in enumerate(peer.tail):
        tail[0].weight.data = head.projections[band].data.T.contiguous()
        tail[1].weight.data = head.words[band + 1].data
    states, targets = torch.randn(30, 16), torch.randint(40, (30,))
    torch.testing.assert_close(head.log_probs(states), peer.log_prob(states))
    torch.testing.assert_close(head.target_log_probs(states, targets), peer(states, targets).output)


def test_one_band_is_a_full_softmax() -> None:
    words = torch.randn(11, 6)
    head = AdaptiveHead([words], [], torch.empty(0, 6))
    states = torch.randn(5, 6)
    torch.testing.assert_close(head.log_probs(states), (states @ words.T).log_softmax(-1))


@pytest.mark.parametrize("tie", [True, False])
def test_full_and_target_only_agree(tie: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gnnlm.lm.head.CHUNK_LOGITS", 100)  # several chunks
    head = make_head(tie)
    states, targets = torch.randn(30, 16, dtype=torch.float64), torch.randint(40, (30,))
    head = head.double().on("cpu")
    whole = head.log_probs(states)
    torch.testing.assert_close(whole.exp().sum(-1), torch.ones(30), check_dtype=False)
    torch.testing.assert_close(head.target_log_probs(states, targets), whole.gather(1, targets[:, None])[:, 0])


def test_gradient_through_a_frozen_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gnnlm.lm.head.CHUNK_LOGITS", 100)
    head = make_head()
    targets = torch.randint(40, (30,))
    learning, frozen = torch.randn(30, 16).requires_grad_(), None
    head.target_log_probs(learning, targets).square().sum().backward()
    frozen = learning.detach().clone().requires_grad_()
    head.on("cpu").target_log_probs(frozen, targets).square().sum().backward()
    torch.testing.assert_close(frozen.grad, learning.grad)


def test_mixes_with_knn() -> None:
    head = make_head().on("cpu")
    states, targets = torch.randn(6, 16), torch.randint(40, (6,))
    tokens, similarity = torch.randint(40, (6, 9)), torch.rand(6, 9)
    weights = neighbour_weights(similarity, 0.3)
    whole = mixed_log_probs(head.log_probs(states), tokens, weights, torch.full((6,), 0.25))
    one = mix_log_probs(head.target_log_probs(states, targets), knn_target_log_probs(tokens, weights, targets), 0.25)
    torch.testing.assert_close(whole.exp().sum(-1), torch.ones(6))
    torch.testing.assert_close(whole.gather(1, targets[:, None])[:, 0], one)


def test_embeddings_score_as_the_head_does() -> None:
    head = make_head().on("cpu")
    states = torch.randn(4, 16)
    scores = states @ head.embeddings_VD.T
    for low, high in ((0, 8), (8, 20), (20, 40)):  # a softmax within a band is that of its embeddings
        within = head.log_probs(states)[:, low:high].log_softmax(-1)
        torch.testing.assert_close(within, scores[:, low:high].log_softmax(-1))


def test_heads_survive_saving(tmp_path: Path) -> None:
    head = make_head(tie=False)
    head.save(tmp_path / "h.safetensors")
    states = torch.randn(4, 16)
    torch.testing.assert_close(load_head(tmp_path / "h.safetensors").log_probs(states), head.log_probs(states))


def test_input_and_softmax_share_their_weights() -> None:
    model = AdaptiveTransformer(SMALL)
    assert all(a is b for a, b in zip(model.inputs.words, model.head.words, strict=True))
    assert all(a is b for a, b in zip(model.inputs.projections[1:], model.head.projections, strict=True))


def test_input_by_band() -> None:
    inputs = AdaptiveInput((8, 20, 40), (16, 8, 4), 16)
    tokens = torch.arange(40)
    want = torch.cat([words @ p.T for words, p in zip(inputs.words, inputs.projections, strict=True)])
    torch.testing.assert_close(inputs(tokens), want)


def test_positions() -> None:
    table = sinusoids(2, 5, 6, torch.device("cpu"))
    for line in range(5):
        for i in range(3):
            angle = (line + 2) * 10_000 ** (-i / 2)
            assert table[line, i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[line, 3 + i].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_transformer_is_causal_and_streams() -> None:
    torch.manual_seed(0)
    model = AdaptiveTransformer(SMALL).eval()
    tokens = torch.randint(40, (2, 12))
    whole = model.stream(tokens)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 40
    torch.testing.assert_close(model.stream(changed).states[:, :7], whole.states[:, :7])
    assert not torch.allclose(model.stream(changed).states[:, 7:], whole.states[:, 7:])
    parts, past = [], None
    for part in tokens.split([5, 1, 1, 5], dim=1):
        out = model(part, past)
        parts.append(out.states)
        past = out.past
    torch.testing.assert_close(torch.cat(parts, 1), whole.states)


def test_the_papers_models_have_its_parameters() -> None:
    with torch.device("meta"):
        wikitext = AdaptiveTransformer(AdaptiveOptions(vocab_size=267_744))
    assert round(sum(p.numel() for p in wikitext.parameters()) / 1e6) == 247
