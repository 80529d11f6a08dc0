"""Products of a few rows with a large matrix, in the order that is fast on a CPU.

Generation multiplies one to a few dozen rows with every weight of a model. With torch's own matrix products, x W^T (the
order of `nn.Linear`) is then two to four times slower than (W x^T)^T (benchmarks/results.md).

Shapes: N rows, D width, V columns of the result.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

FEW = 64  # most rows that are multiplied as (W x^T)^T
PADDED = 16  # fewer rows than this are padded to a multiple of four: three rows take longer than four
LARGE = 2**22  # values of a matrix for which even a single row is faster, padded to two


def few_rows(rows_ND: Tensor, weight_VD: Tensor) -> bool:
    """Return whether (W x^T)^T is the faster order for these rows."""
    supported = rows_ND.device.type == "cpu" and rows_ND.dtype == torch.float32
    least = 1 if weight_VD.numel() >= LARGE else 2
    return supported and least <= len(rows_ND) <= FEW


def product(rows: Tensor, weight_VD: Tensor, bias_V: Tensor | None = None) -> Tensor:
    """Return rows @ weight.T + bias, [..., V], for rows [..., D].

    >>> product(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0]]))
    tensor([[3., 1., 2.],
            [1., 0., 1.]])
    """
    rows_ND = rows.reshape(-1, rows.shape[-1])
    if not few_rows(rows_ND, weight_VD):
        return nn.functional.linear(rows, weight_VD, bias_V)
    count = len(rows_ND)
    if count % 4 and count < PADDED:
        rows_ND = nn.functional.pad(rows_ND, (0, 0, 0, 1 if count == 1 else -count % 4))
    out_NV = (weight_VD @ rows_ND.T)[:, :count].T.contiguous()
    if bias_V is not None:
        out_NV = out_NV + bias_V
    return out_NV.view(*rows.shape[:-1], len(weight_VD))


class FewRowsLinear(nn.Linear):
    """A linear layer that is fast for a few rows."""

    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.weight, self.bias)


def speed_up(model: nn.Module) -> None:
    """Make the linear layers of a frozen model use `product`; weights and names stay as they are."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FewRowsLinear
