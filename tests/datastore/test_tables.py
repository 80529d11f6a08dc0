"""Tables of several segments, read as one."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnlm.datastore.quantize import CodedTable, train_quantizer
from gnnlm.datastore.tables import JoinedTable, Table


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    shape=st.sampled_from([(0,), (0, 3), (1,), (7,), (4, 3)]),
    coded=st.booleans(),
    seed=st.integers(0, 99),
)
def test_lines_are_those_of_one_table(sizes: list[int], shape: tuple[int, ...], coded: bool, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(sum(sizes), 4, generator=random)
    lines = torch.randint(sum(sizes), shape, generator=random)
    whole: Table = rows
    parts: list[Table] = list(rows.split(sizes))
    if coded:
        quantizer = QUANTIZER
        codes = torch.from_numpy(quantizer.encode(rows.numpy()))
        whole, parts = CodedTable(codes, quantizer), [CodedTable(part, quantizer) for part in codes.split(sizes)]
    want = whole[lines] if isinstance(whole, torch.Tensor) else whole.gather(lines)
    got = JoinedTable(parts).gather(lines)
    assert got.shape == (*shape, 4)
    assert torch.equal(got, want)


QUANTIZER = train_quantizer(torch.randn(300, 4, generator=torch.Generator().manual_seed(0)).numpy(), 2, seed=0)
