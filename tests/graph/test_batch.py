"""Graph tensors against loops."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnlm.datastore.store import Segment, Store
from gnnlm.graph.batch import band_mask, distinct_rows
from gnnlm.predict.graphs import GraphBuilder


@given(data=st.data())
def test_distinct_rows_round_trip(data: st.DataObject) -> None:
    table = data.draw(st.lists(st.lists(st.integers(-1, 9), min_size=2, max_size=2), min_size=1, max_size=8))
    neighbours = torch.tensor([table])
    rows, place, real = distinct_rows(neighbours)
    assert len(set(rows.tolist())) == len(rows)
    for t, line in enumerate(table):
        for k, row in enumerate(line):
            assert bool(real[0, t, k]) == (row >= 0)
            if row >= 0:
                assert int(rows[place[0, t, k]]) == row


@given(
    documents=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    context=st.integers(1, 7),
    past=st.integers(0, 5),
    gaps=st.lists(st.integers(1, 4), min_size=24, max_size=24),
    pad=st.integers(0, 3),
)
def test_band_mask_against_loop(documents: list[int], context: int, past: int, gaps: list[int], pad: int) -> None:
    """Positions count, not lines: where some are left out, what lies far apart in the text is not adjacent."""
    ids = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents))[None]
    place = torch.tensor(gaps[: ids.shape[1]]).cumsum(0)[None]
    ids[0, :pad] = -1
    past = min(past, ids.shape[1] - 1)
    tokens = ids.shape[1] - past
    mask = band_mask(place, ids, tokens, context)
    for t in range(tokens):
        for s in range(ids.shape[1]):
            i = past + t
            near = 0 <= int(place[0, i] - place[0, s]) < context and ids[0, s] == ids[0, i]
            assert bool(mask[0, t, s]) == (s == i if ids[0, i] < 0 else near)


def test_windows_stay_inside_their_document() -> None:
    states, tokens = torch.arange(14, dtype=torch.float16).view(7, 2), torch.tensor([5, 6, -1, 7, 8, 9, -1])
    store = Store([Segment(states, tokens, torch.tensor([0, 3, 7]))])
    windows = GraphBuilder(store, left=2, right=1).windows(torch.tensor([0, 1, 3, 5]))
    assert windows.slot_UW.tolist() == [
        [False, False, True, True],
        [False, True, True, True],
        [False, False, True, True],
        [True, True, True, True],
    ]
    assert GraphBuilder(store, left=0, right=2).windows(torch.tensor([1, 3])).slot_UW.tolist() == [
        [True, True, False],
        [True, True, True],
    ]
    # the last token of a document (6 at row 1) can be read by the state one past it
    assert windows.tokens_P[windows.place_UW[1]].tolist()[1:] == [5, 6, -1]
    assert windows.states_PD[windows.place_UW[3], 0].tolist() == [6, 8, 10, 12]
