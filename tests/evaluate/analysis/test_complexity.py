"""Nodes and edges counted by loops over the neighbour table; formulas by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gnnlm.evaluate.analysis.complexity import count_graph, window_edges
from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.graph.batch import band_mask
from gnnlm.run import Run
from gnnlm.run.analyze import Analysis
from tests.evaluate.analysis.copies import copied_run


@pytest.fixture(scope="module")
def subject(tiny_run: Run) -> Subject:
    return Analysis(tiny_run).subject


def test_counts_against_loops(subject: Subject) -> None:
    test, predictor = subject.test, subject.snapshot.predictor
    store = subject.snapshot.streams["train"]
    positions_BT = torch.tensor([[*range(30)], [*range(200, 230)]])
    near = test.table.at(positions_BT, 5)
    near.positions[0, 3, 2:] = -1  # a token with two neighbours
    counts = count_graph(subject, test, positions_BT, near)

    def window(row: int) -> list[int]:
        document = int(store.document_of(row))
        inside = range(int(store.starts[document]), int(store.starts[document + 1]))
        return [
            place for place in range(row - predictor.graphs.left, row + predictor.graphs.right + 1) if place in inside
        ]

    retrieved = [row for row in near.positions.flatten().tolist() if row >= 0]
    assert counts.tokens == 60
    assert counts.retrieved == len(retrieved) == 60 * 5 - 3
    assert counts.rows == len(set(retrieved)) < len(retrieved)
    assert counts.slots == counts.inter_edges == sum(len(window(row)) for row in retrieved)
    assert counts.slots_shared == sum(len(window(row)) for row in set(retrieved))
    assert counts.states == len({place for row in retrieved for place in window(row)}) < counts.slots_shared
    assert counts.window_edges == 0  # the preset `default` does not update windows


def test_context_edges_are_those_of_the_band(subject: Subject) -> None:
    """Of a text that is read from its beginning, so that no edge comes from an earlier block."""
    test, gnn = subject.test, subject.snapshot.gnn
    assert gnn is not None
    positions_BT = torch.arange(len(test.text))[None]
    context = test.context(positions_BT)
    band = band_mask(context.position_BT, context.document_BT, positions_BT.shape[1], gnn.options.context)
    assert count_graph(subject, test, positions_BT, test.table.at(positions_BT, 1)).context_edges == int(band.sum())


def test_window_edges(subject: Subject) -> None:
    assert subject.snapshot.gnn is not None
    options = replace(subject.snapshot.gnn.options, neighbour_updates=True, self_loops=False)
    slots = torch.tensor([[True, True, True], [False, True, True], [False, True, False]])
    assert window_edges(slots, options).tolist() == [4, 2, 0]
    assert window_edges(slots, replace(options, self_loops=True)).tolist() == [7, 4, 1]
    assert window_edges(slots, replace(options, neighbour_updates=False)).tolist() == [0, 0, 0]


def test_the_part(tiny_run: Run, tmp_path: Path) -> None:
    analysis = Analysis(copied_run(tiny_run, tmp_path))
    found = analysis.build(analysis.plan(["complexity"]))["complexity"]
    report = analysis.subject.report
    width = found["left"] + 1 + found["right"]
    assert found["formula"]["nodes"] == 1 + width * found["k"]
    for batch in found["batches"]:
        assert 0 < batch["states"] <= batch["slots_shared"] <= batch["slots"] <= width * found["k"]
    assert report.training is not None
    assert found["parameters"] == {"base": tiny_run.snapshot.lm.parameters, "gnn": report.training.parameters}
    assert found["ms_per_token"]["gnn"] == pytest.approx(1e3 * report.seconds["gnn"] / report.test_tokens)
    assert all(peak > 0 for peak in found["memory_bytes"].values())
    assert (analysis.root / "complexity" / "complexity.png").exists()
