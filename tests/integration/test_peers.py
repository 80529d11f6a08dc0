"""The graph network gives what message passing over edge lists gives, in PyTorch Geometric, with the same weights."""

from __future__ import annotations

import pytest

from gnnlm.run import Run
from tests.test_benchmarks import last_line

pytestmark = pytest.mark.integration


def test_the_network_and_its_peers_agree(tiny_run: Run) -> None:
    given = ("--run", str(tiny_run.root), "--k", "4", "--d", "32", "--heads", "2", "--json")
    (case,) = last_line("gnn_layer.py", *given)["cases"]
    assert case["max_error"] < 1e-5
    fields = ("unique_ratio", "forward_speedup", "uncached_speedup", "train_speedup", "memory_ratio")
    assert all(case[name] > 0 for name in fields)
