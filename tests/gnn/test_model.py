"""Carrying states from block to block, causality, saving."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnlm.config import GnnConfig
from gnnlm.errors import ArtifactError, ConfigError
from gnnlm.gnn.carry import Carry
from gnnlm.gnn.gnn_options import resolve_options
from gnnlm.gnn.model import GnnModel
from gnnlm.graph.batch import Graph
from tests.gnn.graphs import random_graph
from tests.gnn.test_layer import CASES, EMBEDDINGS, HEAD, Embeddings, make_model
from tests.reference.layer import run_model

PER_TOKEN = ("context_BTD", "position_BT", "document_BT", "rows_BTK", "edge_BTK", "similarity_BTK")


def cut(graph: Graph, start: int, stop: int) -> Graph:
    return dataclasses.replace(graph, **{name: getattr(graph, name)[:, start:stop] for name in PER_TOKEN})


@given(
    cuts=st.lists(st.integers(1, 19), max_size=5),
    context=st.integers(1, 9),
    preset=st.sampled_from(["paper", "default"]),
)
def test_blocks_equal_one_pass(cuts: list[int], context: int, preset: str) -> None:
    model = make_model(GnnConfig(preset=preset, heads=2, context=context, dropout=0))
    graph = random_graph(tokens=20)
    whole, _ = model(graph)
    edges = [0, *sorted(set(cuts)), 20]
    carry: Carry | None = None
    parts = []
    for start, stop in itertools.pairwise(edges):
        states, carry = model(cut(graph, start, stop), carry)
        assert carry.layers[0][0].shape[1] == carry.document_BM.shape[1] <= max(0, context - 1)
        parts.append(states)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["paper", "released", "default", "default with neighbour updates", "no copying"])
@given(token=st.integers(0, 6), seed=st.integers(0, 50))
def test_nothing_before_a_change_moves(name: str, token: int, seed: int) -> None:
    model = make_model(CASES[name])
    graph = random_graph(seed=seed)
    before, _ = model(graph)
    changed = {n: getattr(graph, n).clone() for n in PER_TOKEN}
    changed["context_BTD"][:, token] += 1
    changed["rows_BTK"][:, token:] = 0
    changed["edge_BTK"][:, token:] = True
    changed["similarity_BTK"][:, token:] *= 0.5
    after, _ = model(dataclasses.replace(graph, **changed))
    torch.testing.assert_close(after[:, :token], before[:, :token], rtol=0, atol=0)
    assert not torch.equal(after[:, token:], before[:, token:])


def test_documents_do_not_see_each_other() -> None:
    model = make_model(CASES["default"])
    graph = random_graph(tokens=10)
    graph.document_BT[:] = (torch.arange(10) >= 5).long()
    before, _ = model(graph)
    changed = graph.context_BTD.clone()
    changed[:, :5] += 1
    after, _ = model(dataclasses.replace(graph, context_BTD=changed))
    torch.testing.assert_close(after[:, 5:], before[:, 5:], rtol=0, atol=0)


def test_a_token_without_neighbours_is_fine() -> None:
    model = make_model(CASES["released"])
    graph = random_graph()
    graph.edge_BTK[:] = False
    want = run_model(model, graph, EMBEDDINGS)  # edge by edge
    torch.testing.assert_close(model(graph)[0], want, rtol=1e-10, atol=1e-10)


def test_save_and_load(tmp_path: Path) -> None:
    model = make_model(CASES["default"]).float()
    model.save(tmp_path / "m.safetensors")
    again = GnnModel.load(tmp_path / "m.safetensors", HEAD)
    assert again.options == model.options
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    with pytest.raises(ArtifactError, match="width 8, the store has 5"):
        GnnModel.load(tmp_path / "m.safetensors", Embeddings(torch.zeros(3, 5)))


def test_heads_must_divide_width() -> None:
    with pytest.raises(ConfigError, match="must divide the GNN's width 8"):
        resolve_options(GnnConfig(heads=3), 8)
