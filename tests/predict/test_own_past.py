"""Own past: a text finds what it has read itself, never what comes, however it is cut into reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import gnnlm
from gnnlm.config import parse_config
from gnnlm.predict.open_book import OpenBook, Past
from gnnlm.predict.own_past import OwnPast
from gnnlm.predict.predictor import PREDICTORS, Prediction
from gnnlm.run import Run
from tests.conftest import merge
from tests.predict.test_open_book import tokens_of
from tests.reference.own_past import findable, read_with_own_past

LENGTH = 150  # past four windows of 48 tokens
FP32 = {"store": {"dtype": "fp32"}, "cache": {"dtype": "fp32"}}
CASES: dict[str, dict[str, Any]] = {
    "projected": FP32,
    "paper, states": merge(FP32, {"gnn": {"preset": "paper"}, "cache": {"form": "states"}}),
    "no context, wide windows, coded cache": merge(
        FP32,
        {
            "lm": {"context": 0},
            "gnn": {"left": 2, "right": 3},
            "cache": {"form": "states", "dtype": "pq", "bytes": 8},
        },
    ),
    "pq codec, no cache": merge(
        FP32, {"codec": {"kind": "pq", "bytes": 8, "train_rows": 1000}, "cache": {"form": "none"}}
    ),
    "ffn_input, fp16": {"store": {"key": "ffn_input", "segment_tokens": 1200}},
}


@pytest.fixture(scope="module", params=CASES)
def model(
    request: pytest.FixtureRequest,
    tiny_values: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
    quick_codes: None,
) -> OpenBook:
    changes = merge({"train": {"curriculum": [{"k": 4, "steps": 4}]}}, CASES[request.param])
    run = Run(parse_config(merge(tiny_values, {"run": str(tmp_path_factory.mktemp("runs") / "run"), **changes})))
    run.build_all()
    return gnnlm.open(run.root).model


def repeating(model: OpenBook, count: int, seed: int) -> list[int]:
    """A text that comes back to what it said before, so that its own rows are near."""
    once = tokens_of(model, 57, seed)
    return (once * (count // len(once) + 1))[:count]


def read(model: OpenBook, texts: list[list[int]], own: bool | list[bool] = True) -> list[Prediction]:
    prediction, _ = model.read(texts, None, PREDICTORS, own_past=own)
    return [prediction[line, prediction.real[line]] for line in range(len(texts))]


def close(got: Prediction, want: Prediction, within: float = 2e-3) -> None:
    """The same log-probabilities, but for a few places where rounding swaps rows that are equally near."""
    for name in PREDICTORS:
        one, other = (prediction.log_probs((name,))[name] for prediction in (got, want))
        apart = (one - other).abs().amax(1) > within
        assert float(apart.float().mean()) <= 0.05, (name, apart.nonzero()[:, 0].tolist())


def test_it_is_what_loops_find(model: OpenBook) -> None:
    text = repeating(model, LENGTH, 1)
    (got,) = read(model, [text])
    if model.reading.key == "state":
        want = read_with_own_past(model, text, got.neighbours.k, PREDICTORS)
        torch.testing.assert_close(got.neighbours.similarity, want.neighbours.similarity, atol=1e-4, rtol=1e-4)
        close(got, want, 1e-3)
    size, own = len(model.store), 0
    for offset, found in enumerate(got.neighbours.positions.tolist()):
        mine = [position - size for position in found if position >= size]
        allowed = findable(offset, LENGTH, model.reading.window, model.reading.context, model.predictor.graphs.right)
        assert set(mine) <= set(allowed)
        own += len(mine)
    assert own > 50
    plain = read(model, [text], own=False)[0]
    assert bool((plain.neighbours.positions < size).all())
    changed = (plain.log_probs(("knn",))["knn"] - got.log_probs(("knn",))["knn"]).abs().amax(1) > 1e-3
    assert not bool(changed[: model.reading.window].any())  # the base model still sees everything
    assert bool(changed[model.reading.window :].any())


@settings(max_examples=8, phases=(Phase.explicit, Phase.reuse, Phase.generate))  # shrinking takes minutes
@given(data=st.data())
def test_any_pieces_give_what_the_whole_gives(model: OpenBook, data: st.DataObject) -> None:
    """Texts with and without their own past in one batch, cut anywhere, cropped, reordered, repeated and joined."""
    batch = data.draw(st.integers(1, 3))
    texts = [repeating(model, data.draw(st.integers(0, LENGTH)), data.draw(st.integers(0, 99))) for _ in range(batch)]
    owning = [data.draw(st.booleans()) for _ in texts]
    want = read(model, texts, owning)
    at, past = [0] * batch, None
    for _ in range(data.draw(st.integers(1, 6))):
        if past is not None and data.draw(st.booleans()):
            drops = [data.draw(st.integers(0, min(n, 40))) for n in at]
            past, at = past.crop(drops), [n - drop for n, drop in zip(at, drops, strict=True)]
        if past is not None and data.draw(st.booleans()):
            rows = data.draw(st.lists(st.integers(0, len(at) - 1), min_size=1, max_size=3))
            split = data.draw(st.integers(0, len(rows)))
            parts = [past.select(some) for some in (rows[:split], rows[split:]) if some]
            past = parts[0].join(parts[1:])
            texts, want, at = [texts[row] for row in rows], [want[row] for row in rows], [at[row] for row in rows]
            owning = [owning[row] for row in rows]
        new = [data.draw(st.integers(0, 70)) for _ in at]
        parts = [text[n : n + count] for text, n, count in zip(texts, at, new, strict=True)]
        first = [0 if past is None else n + 1 for n in at]
        prediction, past = model.read(parts, past, PREDICTORS, own_past=owning)
        at = [n + len(part) for n, part in zip(at, parts, strict=True)]
        for line, (begin, end) in enumerate(zip(first, at, strict=True)):
            if end + 1 > begin:
                got, whole = prediction[line, prediction.real[line]], want[line][begin : end + 1]
                same = got.neighbours.similarity - whole.neighbours.similarity[:, : got.neighbours.k]
                assert float(same.nan_to_num().abs().max()) < 1e-3
        assert [text.read for text in past.own if text is not None] == [
            n + 1 for n, own in zip(at, owning, strict=True) if own
        ]


def test_steps_blocks_and_batches_predict_alike(model: OpenBook) -> None:
    text, other = repeating(model, 120, 2), repeating(model, 75, 3)
    want = read(model, [text])[0]
    past: Past | None = None
    parts: list[Prediction] = []
    for start in range(0, len(text), 1):
        prediction, past = model.read([text[start : start + 1]], past, PREDICTORS, own_past=True)
        parts += [prediction[0, place : place + 1] for place in range(prediction.real.shape[1])]
    assert len(parts) == 121
    for name in PREDICTORS:
        got = torch.cat([part.log_probs((name,))[name] for part in parts])
        apart = (got - want.log_probs((name,))[name]).abs().amax(1) > 2e-3
        assert float(apart.float().mean()) <= 0.05, name
    together = read(model, [other, text, text], [True, True, False])
    close(together[1], want)
    close(together[2], read(model, [text], own=False)[0])


def test_rows_can_be_found_when_their_windows_have_been_read() -> None:
    for window, context, right in ((4, 0, 1), (48, 0, 3), (48, 16, 1), (8, 7, 0), (5, 2, 4)):
        predictor: Any = SimpleNamespace(graphs=SimpleNamespace(right=right))
        own = OwnPast(predictor, window, context, "l2", torch.float16)
        for offset in range(200):
            assert [*range(own.open(offset))] == findable(offset, 200, window, context, right)


def test_causality(model: OpenBook) -> None:
    """A changed token moves nothing before it, wherever it stands in a window."""
    text = repeating(model, LENGTH, 4)
    (before,) = read(model, [text])
    for place in (47, 64, 79, 80, 81, 96, 112, 149):
        changed = [*text[:place], (text[place] + 1) % model.lm.vocab_size, *text[place + 1 :]]
        (after,) = read(model, [changed])
        for name in PREDICTORS:
            one, other = (p[: place + 1].log_probs((name,))[name] for p in (before, after))
            torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-3)
        if place + 1 < LENGTH:
            moved = (p[place + 1 :].log_probs(("knn",))["knn"] for p in (before, after))
            assert not torch.allclose(*moved, atol=1e-6)


def test_predictions_sum_to_one(model: OpenBook) -> None:
    (got,) = read(model, [repeating(model, 130, 5)])
    for log_probs in got.log_probs(PREDICTORS).values():
        torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(131), rtol=1e-4, atol=1e-4)


def test_a_past_without_own_rows_is_read_again(model: OpenBook) -> None:
    text = repeating(model, 120, 6)
    want = read(model, [text])[0]
    _, past = model.read([text[:100]], None, PREDICTORS)
    got, past = model.read([text[100:]], past, PREDICTORS, own_past=True)
    close(got[0], want[101:])
    got, past = model.read([[1]], past, PREDICTORS)
    assert past.own == (None,)
