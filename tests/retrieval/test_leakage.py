"""Nothing that a train position retrieves, itself or through its block, has read the token it is to predict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gnnlm.config import Config, LMConfig, parse_config
from gnnlm.datastore.encode import encode_tokens
from gnnlm.gnn.gnn_options import resolve_options
from gnnlm.gnn.model import GnnModel
from gnnlm.graph.batch import Context, Windows, build_graph, window_positions
from gnnlm.lm.base_lm import BaseLM
from gnnlm.lm.load_lm import load_lm
from gnnlm.retrieval.exact import ExactIndex
from gnnlm.retrieval.index import Allowed
from gnnlm.retrieval.search import LeakageRule
from gnnlm.run import Run
from gnnlm.run.stages import STAGES

FIELD, LENGTH, K = 16, 260, 40
READING = LMConfig(window=FIELD, context=FIELD - 1, batch_tokens=256)


class Embeddings:
    width = 32
    embeddings_VD = torch.randn(300, 32, generator=torch.Generator().manual_seed(1))


def random_network(config: Config) -> GnnModel:
    torch.manual_seed(0)
    model = GnnModel(resolve_options(config.gnn, 32), Embeddings())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.freeze()


@torch.inference_mode()
def output(lm: BaseLM, tokens: np.ndarray, at: int, rule: LeakageRule, model: GnnModel, block: int) -> torch.Tensor:
    """What the network makes of position `at`, the last of its training block: encoded, searched and updated anew."""
    states = encode_tokens(lm, tokens, READING).states
    rows, last = torch.arange(LENGTH + 1), np.array([LENGTH])
    positions = np.arange(max(0, at - block + 1), at + 1)
    low, high = rule.excluded(positions, 0 * last, last)
    barred = torch.from_numpy(np.asarray(low)), torch.from_numpy(np.asarray(high))
    queries = torch.from_numpy(states[positions])
    found = ExactIndex.over(states, rows, "cosine").search(queries, K, Allowed(barred)).padded(K)

    def windows_of(rows_U: torch.Tensor) -> Windows:
        places, inside = window_positions(
            rows_U, torch.zeros_like(rows_U), torch.full_like(rows_U, LENGTH), model.options.left, model.options.right
        )
        own = torch.from_numpy(np.append(tokens, -1))
        return Windows(rows_U, places, inside, torch.from_numpy(states), own)

    here = torch.from_numpy(positions)[None]
    context = Context(queries[None], here, torch.zeros_like(here))
    graph = build_graph(context, found.positions[None], found.similarity[None], windows_of)
    return model(graph)[0][0, -1]


@pytest.mark.parametrize("preset", ["default", "paper"])
@pytest.mark.parametrize(("block", "context", "carried"), [(24, 4, 6), (10, 12, 9)])
def test_the_token_to_predict_moves_nothing(
    preset: str, block: int, context: int, carried: int, tiny_lm_dir: Path
) -> None:
    values: dict[str, Any] = {"gnn": {"preset": preset, "heads": 4, "context": context}, "train": {"block": block}}
    config = parse_config({"run": "x", "search": {"exclude": "receptive-field"}, **values})
    lm, model = load_lm(READING.model_copy(update={"model": str(tiny_lm_dir)})), random_network(config)
    rule = LeakageRule.of(config, FIELD)
    assert rule.carried == carried
    alone = LeakageRule(rule.receptive_field, rule.reach, whole_document=False)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 8, LENGTH)  # few tokens: a row is often like another
    moved = {alone: 0, rule: 0}
    for at in rng.integers(60, 200, 8):
        changed = tokens.copy()
        changed[at] = 9
        for each in moved:
            before, after = (output(lm, text, int(at), each, model, block) for text in (tokens, changed))
            moved[each] += not torch.allclose(before, after, atol=1e-4)
    assert moved[alone] > 0  # a rule for each query on its own is not enough
    assert moved[rule] == 0


def test_the_span_is_an_input_only_where_it_is_used(tiny_run: Run, tiny_values: dict[str, Any]) -> None:
    def inputs(**changes: Any) -> dict[str, Any]:
        values = {**tiny_values, **{name: {**tiny_values[name], **section} for name, section in changes.items()}}
        return Run(parse_config({"run": str(tiny_run.root), **values}), reading=True).inputs(STAGES["search"]) or {}

    assert "leakage span" not in inputs()
    assert inputs() == inputs(gnn={"layers": 2})
    assert inputs(search={"exclude": "receptive-field"})["leakage span"] == 48 + 1 + 22
    assert inputs(search={"exclude": "receptive-field"}, gnn={"layers": 2})["leakage span"] == 48 + 1 + 11
    assert inputs(search={"exclude": "receptive-field"}, gnn={"layers": 0})["leakage span"] == 48 + 1
