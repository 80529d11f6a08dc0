"""The gate against loops; the mix with a gate sums to one; the first token of a text has its own weight."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gnnlm
from gnnlm.lm import head as head_module
from gnnlm.lm.adaptive_softmax import AdaptiveHead, AdaptiveInput
from gnnlm.lm.head import Confidence, Head, SoftmaxHead
from gnnlm.predict.gate import FEATURES, Gate
from gnnlm.predict.knn import Mix
from gnnlm.predict.predictor import PREDICTORS, Predictor
from gnnlm.predict.split_scoring import score_text
from gnnlm.run import Run
from tests.reference.gate import gate_features, gate_weight

VOCAB = 6
COUNT = len(FEATURES)
GATE = Gate(
    mean=[0.8, 0.4, 1.0, 0.7, 0.5, 1.2, 0.2],
    spread=[0.1, 0.3, 0.5, 0.4, 0.3, 0.6, 0.2],
    weights=[0.9, 0.4, -0.5, 0.3, -0.7, 0.6, 0.2, 0.25],
    bias=-0.4,
)
similarities = st.one_of(st.floats(0.3, 1.0), st.floats(-1e4, 0.0))  # cosine, or minus squared distances
found_at = st.lists(
    st.tuples(st.integers(0, VOCAB - 1), st.one_of(similarities, st.just(-math.inf))), min_size=1, max_size=7
).map(lambda found: sorted(found, key=lambda pair: -pair[1]))


def softmax(seed: int) -> torch.Tensor:
    return (3 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))).log_softmax(-1)


@given(
    found=found_at,
    k=st.integers(1, 8),
    temperature=st.sampled_from([0.01, 0.5, 300.0]),
    read=st.integers(0, 3000),
    first=st.sampled_from([None, 0.0, 0.3]),
    seed=st.integers(0, 99),
)
def test_against_a_loop(
    found: list[tuple[int, float]], k: int, temperature: float, read: int, first: float | None, seed: int
) -> None:
    tokens, similarity = [t if s != -math.inf else -1 for t, s in found], [s for _, s in found]
    mix, lm = Mix(k, temperature, 0.5, first=first, gate=GATE), softmax(seed)
    similarity_NK = torch.tensor([similarity], dtype=torch.float64)
    evidence = mix.evidence(
        torch.tensor([tokens]),
        similarity_NK,
        mix.neighbour_weights(similarity_NK),
        torch.tensor([read]),
        Confidence.of(lm),
    )
    got = mix.weight_of(evidence).item()
    if similarity[0] == -math.inf:
        assert got == 0
    elif read == 0 and first is not None:
        assert got == first
    else:
        seen = gate_features(tokens, similarity, k, temperature, lm[0].double().exp().tolist())
        assert evidence.features_NF is not None
        assert evidence.features_NF[0].tolist() == pytest.approx(seen, abs=1e-4)
        assert got == pytest.approx(gate_weight(GATE, seen), abs=1e-4)


@given(
    found=found_at,
    k=st.integers(1, 8),
    temperature=st.floats(1e-6, 1e6),
    weights=st.lists(st.floats(-1e3, 1e3), min_size=COUNT + 1, max_size=COUNT + 1),
    bias=st.floats(-1e3, 1e3),
    read=st.integers(0, 10**9),
)
def test_a_weight_for_any_neighbours(
    found: list[tuple[int, float]], k: int, temperature: float, weights: list[float], bias: float, read: int
) -> None:
    """Also for the most extreme gate: at least 0, below 1, and finite, in single precision."""
    mix = Mix(k, temperature, 0.5, gate=Gate([0.0] * COUNT, [1e-9] * COUNT, weights, bias))
    tokens = torch.tensor([[t if s != -math.inf else -1 for t, s in found]])
    similarity = torch.tensor([[s for _, s in found]], dtype=torch.float32)
    votes = mix.neighbour_weights(similarity)
    weight = mix.weight_of(mix.evidence(tokens, similarity, votes, torch.tensor([read]), Confidence.of(softmax(1))))
    assert weight.dtype == torch.float32
    assert 0 <= weight.item() < 1


def test_a_mix_survives_json() -> None:
    for mix in (
        Mix(4, 0.1, 0.2),
        Mix(4, 0.1, 0.0, (0.5,), (0.1, 0.3)),
        Mix(4, 0.1, 0.2, first=0.0),
        Mix(1, 1.0, 0.2, first=0.1, gate=GATE),
    ):
        again = Mix.of(json.loads(json.dumps(mix.as_dict())))
        assert json.dumps(again.as_dict()) == json.dumps(mix.as_dict())
        assert again.gate == mix.gate
    assert Mix(4, 0.1, 0.2).as_dict() == {"k": 4, "temperature": 0.1, "weight": 0.2}


@pytest.mark.parametrize("kind", ["softmax", "adaptive"])
def test_confidence_of_a_head(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    adaptive = AdaptiveHead.beside(AdaptiveInput((8, 20, 40), (16, 8, 4), 16), True, True, 0.0).on("cpu")
    head: Head = adaptive if kind == "adaptive" else SoftmaxHead(torch.randn(40, 16), torch.randn(40), 0.7, 5.0)
    monkeypatch.setattr(head_module, "CHUNK_LOGITS", 3 * 40)
    states, targets = torch.randn(11, 16), torch.randint(40, (11,))
    values, sure = head.target_confidence(states, targets)
    torch.testing.assert_close(values, head.target_log_probs(states, targets))
    for line, probs in enumerate(head.log_probs(states).exp().double().tolist()):
        assert sure.token[line] == max(range(40), key=lambda token, probs=probs: probs[token])
        assert sure.log_prob[line].item() == pytest.approx(math.log(max(probs)), abs=1e-5)
        assert sure.entropy[line].item() == pytest.approx(-sum(p * math.log(p) for p in probs), abs=1e-5)
    for alone, together in zip(head.confidence(states), sure, strict=True):
        assert alone.equal(together)


# -- in a run --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gated(tiny_run: Run) -> Predictor:
    """A predictor whose mixes both have a gate that looks at everything."""
    similarity = tiny_run.snapshot.searched("test").table.similarity
    mean = [float(similarity.mean()), *GATE.mean[1:]]
    gate = replace(GATE, mean=mean, spread=[float(similarity.std()), *GATE.spread[1:]])
    mix = Mix(8, 0.1, 0.5, first=0.05, gate=gate)
    return tiny_run.snapshot.predictor_with({"base": mix, "gnn": replace(mix, k=4, temperature=0.3)})


def test_the_mix_sums_to_one_and_agrees_with_targets(tiny_run: Run, gated: Predictor) -> None:
    text = tiny_run.snapshot.searched("test")
    for positions, prediction in text.predictions(gated, 100, PREDICTORS):
        tokens = text.text.tokens(positions)
        prediction, tokens = prediction[tokens >= 0], tokens[tokens >= 0]
        full, targets = prediction.log_probs(PREDICTORS), prediction.target_log_probs(tokens, PREDICTORS)
        for name in PREDICTORS:
            torch.testing.assert_close(full[name].exp().sum(-1), torch.ones(len(tokens)), rtol=0, atol=1e-5)
            picked = full[name].gather(1, tokens[:, None])[:, 0]
            torch.testing.assert_close(picked, targets[name], rtol=0, atol=1e-5)


def test_the_weight_is_that_of_the_mix(tiny_run: Run, gated: Predictor) -> None:
    """p = lambda p_kNN + (1 - lambda) p_LM, solved for lambda where the two differ most."""
    text = tiny_run.snapshot.searched("test")
    _, prediction = next(text.predictions(gated, 60, PREDICTORS))
    mixed = prediction.log_probs(PREDICTORS)
    for name, state in (("knn", "base"), ("gnn_knn", "gnn")):
        weight = prediction.distribution(name).knn_weight_N
        assert len(weight.unique()) > 20  # the gate tells positions apart
        mix, lm = gated.mixes[state], mixed[state].double().exp()
        for line in range(60):
            found = prediction.neighbours[line]
            if found.positions[0] < 0:
                continue
            top = int(prediction.tokens[line, 0])
            near = (found.similarity[: mix.k].double() / mix.temperature).softmax(-1)
            p_knn = near[prediction.tokens[line, : mix.k] == top].sum()
            solved = (mixed[name][line, top].double().exp() - lm[line, top]) / (p_knn - lm[line, top])
            assert weight[line].item() == pytest.approx(solved.item(), abs=2e-3)


def test_first_tokens_have_their_own_weight(tiny_run: Run, gated: Predictor) -> None:
    text = tiny_run.snapshot.searched("test")
    starts, seen = text.text.document_starts.tolist(), 0
    for positions, prediction in text.predictions(gated, 64, ("knn",)):
        weight = prediction.distribution("knn").knn_weight_N
        for line, position in enumerate(positions.tolist()):
            first = position in starts
            assert prediction.read[line] == position - max(start for start in starts if start <= position)
            assert (weight[line].item() == pytest.approx(0.05)) == first
            seen += first
    assert seen == len(starts) - 1
    whole = replace(text, continuous=True)  # read as one text, whose first token is that of the split
    assert whole.read(torch.tensor([0, starts[1]])).tolist() == [0, starts[1]]


def test_an_open_book_weighs_as_a_stored_text(tiny_run: Run, gated: Predictor) -> None:
    """Read in pieces, with the first token where nothing was read, and the same scores."""
    model = replace(gnnlm.open(tiny_run.root).model, predictor=gated)
    text = tiny_run.snapshot.searched("test")
    want, _ = score_text(gated, text, 64, "score", PREDICTORS)
    ids = text.text.tokens(torch.arange(int(text.text.document_starts[1]) - 1)).tolist()
    pieces, past = [], None
    for part in (ids[:10], ids[10:11], ids[11:-1]):
        prediction, past = model.read([part], past, PREDICTORS)
        pieces.append(prediction[0])
    assert torch.cat([piece.read for piece in pieces]).tolist() == list(range(len(ids)))
    assert pieces[0].distribution("knn").knn_weight_N[0].item() == pytest.approx(0.05)
    for name in PREDICTORS:
        full = torch.cat([piece.log_probs((name,))[name] for piece in pieces])
        got = full.gather(1, torch.tensor(ids)[:, None])[:, 0].double()
        assert (got - torch.from_numpy(want[name][: len(ids)])).abs().median() < 1e-3
