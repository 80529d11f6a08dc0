"""The network alone against edge lists (PyTorch Geometric) and dense tensors, with the same weights.

    .venv/bin/pip install -c constraints.txt -e '.[bench]'
    .venv/bin/python benchmarks/gnn_layer.py [--json]

Three layers, 128 context tokens, l = r = 1, preset `released`. Rows come from a real run's neighbour table; states are
random, because the widths are not the run's. Times are measured in this process, one implementation after the other on
the same threads. Peak memory is that of a forward and backward pass in a separate process.

`forward`, `uncached`, `train`: the speedup per token over the edge lists, for a forward pass with cached neighbour
states, for one that computes them, and for forward + backward. The edge lists are timed with one block and, if memory
allows, with two at once; the better time counts. `shared`: the speedup over edge lists with one window per distinct
row, as in `gnnlm`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import torch
from common import arguments, best_seconds, in_a_process, one_by_one, open_run, peak_bytes, report
from peers import Dense, EdgeLists
from torch import Tensor

from gnnlm.config import GnnConfig
from gnnlm.datastore.store import Segment, Store
from gnnlm.gnn.gnn_options import resolve_options
from gnnlm.gnn.model import GnnModel
from gnnlm.graph.batch import Context, Graph, Windows, build_graph, window_positions
from gnnlm.lm.head import SoftmaxHead
from gnnlm.predict.window_cache import WindowCache, make_tables

TOKENS = 128
TWO_BLOCKS_UP_TO = 32  # the largest k for which two blocks fit into the memory of a small machine


@dataclass
class Case:
    k: int
    d: int
    heads: int

    def model(self) -> GnnModel:
        torch.manual_seed(0)
        config = GnnConfig(preset="released", heads=self.heads, dropout=0, attention_dropout=0, neighbour_dropout=0)
        model = GnnModel(resolve_options(config, self.d), SoftmaxHead(torch.empty(1, self.d)))
        for name, parameter in model.named_parameters():
            if "bias" in name or name.endswith("mu"):
                parameter.data.add_(0.1 * torch.randn_like(parameter))
        return model.eval()

    def graph(self, run: str, blocks: int = 1) -> Graph:
        """Consecutive test positions of the run as one block of context, with its own neighbours."""
        made = open_run(run)
        source, store = made.snapshot.searched("test"), made.snapshot.store
        generator = torch.Generator().manual_seed(1)
        lines = torch.arange(len(source.text) // 2)[: TOKENS * blocks]
        ids = source.table.at(lines, self.k).positions[None]

        def windows(rows_U: Tensor) -> Windows:
            positions, inside = window_positions(rows_U, *store.bounds(rows_U), 1, 1)
            distinct_P, place_UW = torch.unique(positions, return_inverse=True)
            states_PD = torch.randn(len(distinct_P), self.d, generator=generator)
            return Windows(rows_U, place_UW, inside, states_PD, store.tokens(distinct_P))

        states = torch.randn(1, len(lines), self.d, generator=generator)
        context = Context(states, lines[None], torch.arange(len(lines))[None] // TOKENS)
        return build_graph(context, ids, torch.ones(ids.shape), windows)


def trained(model: torch.nn.Module, work: Any) -> None:
    model.zero_grad(set_to_none=True)
    work().square().mean().backward()


def cached(model: GnnModel, graph: Graph) -> tuple[Graph, WindowCache]:
    """The graph with a cache that holds only its windows, in their order."""
    with torch.inference_mode():
        tables = [table.flatten(0, -2) for table in make_tables(model, graph.windows, projected=True)]
    rows_U = torch.arange(len(graph.windows.rows_U))
    store = Store([Segment(graph.windows.states_PD, graph.windows.tokens_P, torch.tensor([0, len(tables[0])]))])
    return replace(graph, windows=replace(graph.windows, rows_U=rows_U)), WindowCache(model, store, True, tables)


def measure(case: Case, run: str) -> dict[str, Any]:
    model, graph = case.model(), case.graph(run)
    context, states = graph.context_BTD[0], graph.windows.states_PD
    lists, shared, dense = EdgeLists(model, graph, False), EdgeLists(model, graph, True), Dense(model, graph)
    own, cache = cached(model, graph)
    with torch.inference_mode():
        ours, kept = model(graph)[0][0], model(own, cache=cache)[0][0]
        error = max(float((out - ours).abs().max()) for out in (kept, *(p(context, states) for p in (lists, dense))))
        model.freeze()
        forward = best_seconds(lambda: model(own, cache=cache), tries=7)
        model.train().eval()
        uncached = best_seconds(lambda: model(graph))
        build = best_seconds(lambda: make_tables(model, graph.windows, True))
        lists_forward = best_seconds(lambda: lists(context, states))
        shared_forward = best_seconds(lambda: shared(context, states))
        dense_forward = best_seconds(lambda: dense(context, states))
    train = best_seconds(lambda: trained(model, lambda: model(graph)[0]))
    lists_train = best_seconds(lambda: trained(model, lambda: lists(context, states)))
    shared_train = best_seconds(lambda: trained(model, lambda: shared(context, states)))
    if case.k <= TWO_BLOCKS_UP_TO:
        two = case.graph(run, blocks=2)
        context, states = two.context_BTD[0], two.windows.states_PD
        lists = EdgeLists(model, two, False)
        with torch.inference_mode():
            lists_forward = min(lists_forward, best_seconds(lambda: lists(context, states)) / 2)
        lists_train = min(lists_train, best_seconds(lambda: trained(model, lambda: lists(context, states))) / 2)
    memory = {
        side: in_a_process(__file__, ["--run", run], {**vars(case), "side": side})["bytes"]
        for side in ("ours", "lists")
    }
    rows = len(graph.windows.rows_U)
    return {
        **vars(case),
        "tokens": TOKENS,
        "unique_ratio": float(graph.edge_BTK.sum()) / rows,
        "max_error": error,
        "forward_ms": forward * 1e3,
        "forward_speedup": lists_forward / forward,
        "uncached_speedup": lists_forward / uncached,
        "train_speedup": lists_train / train,
        "memory_ratio": memory["ours"] / memory["lists"],
        "shared_forward": shared_forward / forward,
        "shared_train": shared_train / train,
        "dense_forward": dense_forward / forward,
        "cache_rows_per_s": rows / build,
        "memory_mb": memory["ours"] / 1e6,
        "lists_memory_mb": memory["lists"] / 1e6,
    }


def memory(case: Case, run: str, side: str) -> int:
    """Peak resident size of a process that runs one forward and backward pass."""
    model, graph = case.model(), case.graph(run)
    if side == "ours":
        trained(model, lambda: model(graph)[0])
    else:
        lists = EdgeLists(model, graph, shared=False)
        trained(model, lambda: lists(graph.context_BTD[0], graph.windows.states_PD))
    return peak_bytes()


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--k", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--d", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--heads", type=int, nargs="+", default=[8, 16])
    given = parser.parse_args()
    if given.child:
        child = json.loads(given.child)
        side = child.pop("side")
        print(json.dumps({"bytes": memory(Case(**child), given.run, side)}))
        return
    cases = [Case(k, d, heads) for d in given.d for heads in given.heads for k in given.k]
    results = one_by_one("gnn_layer", cases, lambda case: measure(case, given.run))
    report("GNN, three layers, 128 tokens", results, given.json, rows_from=given.run)


if __name__ == "__main__":
    main()
