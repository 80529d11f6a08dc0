"""Products in the other order are the same products."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gnnlm.matmul import FEW, product, speed_up


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 17, FEW, FEW + 1])
def test_products_are_those_of_a_linear_layer(count: int) -> None:
    torch.manual_seed(count)
    layer = nn.Linear(33, 70)
    rows = torch.randn(1, count, 33)
    torch.testing.assert_close(product(rows, layer.weight, layer.bias), layer(rows))
    torch.testing.assert_close(product(rows[0], layer.weight), layer(rows[0]) - layer.bias)


def test_a_sped_up_model_keeps_its_weights_and_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4, bias=False))
    rows = torch.randn(6, 8, requires_grad=True)
    before = model(rows)
    (slope,) = torch.autograd.grad(before.square().sum(), rows)
    names = {name: value.clone() for name, value in model.state_dict().items()}
    speed_up(model)
    after = model(rows)
    torch.testing.assert_close(after, before)
    torch.testing.assert_close(torch.autograd.grad(after.square().sum(), rows)[0], slope)
    assert names.keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in names.items())
