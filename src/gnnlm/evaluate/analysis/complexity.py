"""Complexity: nodes, edges, parameters, memory and time of this run beside the paper's formulas (paper, section 4.1).

    nodes       |V| tokens grow by (l + r + 1) k nodes each
    edges       (l + r + 1) k |V| are added; a Transformer has |V|^2

The formulas count a window of its own for every retrieved row, whole at document bounds. Here the graphs of real
batches are counted. Tokens that retrieve the same row share its window, and windows of different rows share the states
that they read from the store.

Shapes: B blocks, T tokens, K neighbours, U rows, W window slots.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnlm.artifact import Artifact, human_bytes
from gnnlm.evaluate.analysis.figure import axes_of
from gnnlm.evaluate.analysis.memory import MEASURED, base_bytes, network_bytes
from gnnlm.evaluate.analysis.section import Cell, Figure, Section, Table, number, percent, text
from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.gnn.gnn_options import GnnOptions
from gnnlm.gnn.model import edge_mask
from gnnlm.predict.split_scoring import SearchedText
from gnnlm.retrieval.neighbours import Neighbours

BATCHES = 16  # that are counted, at most
SPEED_PARTS = {
    "encode": "base model",
    "head": "softmax",
    "search": "search",
    "gnn": "graph network",
    "knn": "kNN and mix",
}


@dataclass(frozen=True)
class Counts:
    """What a graph holds. `slots` are window slots within their documents: of every retrieved row, and of each once."""

    tokens: int = 0
    retrieved: int = 0
    rows: int = 0
    slots: int = 0
    slots_shared: int = 0
    states: int = 0
    inter_edges: int = 0
    context_edges: int = 0
    window_edges: int = 0
    window_edges_shared: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


def count_graph(subject: Subject, text_: SearchedText, positions_BT: Tensor, near: Neighbours) -> Counts:
    """The nodes and edges of the graph of some positions with these neighbours."""
    predictor = subject.parts.predictor
    assert predictor.gnn is not None
    options = predictor.gnn.options
    graph = predictor.graphs(text_.context(positions_BT), near)
    windows, used = graph.windows, graph.rows_BTK[graph.edge_BTK]  # the row of every inter edge bundle
    distinct = used.unique()
    slots_U, edges_U = windows.slot_UW.sum(1), window_edges(windows.slot_UW, options)
    first_BT = text_.text.bounds(positions_BT)[0]
    return Counts(
        tokens=positions_BT.numel(),
        retrieved=len(used),
        rows=len(distinct),
        slots=int(slots_U[used].sum()),
        slots_shared=int(slots_U[distinct].sum()),
        states=len(windows.place_UW[distinct][windows.slot_UW[distinct]].unique()),
        inter_edges=int(edge_mask(graph, options.inter_slots).sum()),
        context_edges=int((positions_BT - first_BT + 1).clamp(max=options.context).sum()),
        window_edges=int(edges_U[used].sum()),
        window_edges_shared=int(edges_U[distinct].sum()),
    )


def window_edges(slot_UW: Tensor, options: GnnOptions) -> Tensor:
    """Edges among the slots of each window, [U]: adjacent ones both ways, self-loops where the network has them.

    There are none where the network does not update its neighbours.
    """
    if not options.neighbour_updates:
        return torch.zeros(len(slot_UW), dtype=torch.long)
    pairs_U = (slot_UW[:, 1:] & slot_UW[:, :-1]).sum(1)
    return 2 * pairs_U + (slot_UW.sum(1) if options.self_loops else 0)


def measure(subject: Subject) -> dict[str, Any]:
    parts, config = subject.parts, subject.config
    assert parts.gnn is not None
    options, k = parts.gnn.options, min(parts.predictor.graph_k, subject.test.table.k)
    cached = parts.predictor.cache is not None
    plain = replace(parts.predictor, cache=None)
    memory = {"base": base_bytes(subject), "network": network_bytes(subject, plain)}
    if cached:
        memory["network with cache"] = network_bytes(subject, parts.predictor)
    seconds, tokens = subject.report.seconds, subject.report.test_tokens
    found = {
        "k": k,
        "left": options.left,
        "right": options.right,
        "window": options.window,
        "context": options.context,
        "layers": options.layers,
        "inter": options.inter,
        "neighbour_updates": options.neighbour_updates,
        "lm_window": config.lm.window,
        "parameters": {"base": parts.lm.parameters, "gnn": sum(p.numel() for p in parts.gnn.parameters())},
        "memory_bytes": memory,
        "ms_per_token": {part: 1e3 * seconds[part] / tokens for part in SPEED_PARTS if part in seconds},
        "stored_bytes": {
            name: _size(subject.artifact(name)) for name in ("encode", "codec", "index", "search", "cache")
        },
        "batches": [
            _batches(subject, "scoring", subject.test, 1, config.eval.block, k),
            _batches(subject, "training", parts.searched("train"), config.train.batch_blocks, config.train.block, k),
        ],
    }
    return found | {"formula": formula(options, k, config.lm.window)}


def formula(options: GnnOptions, k: int, lm_window: int) -> dict[str, float]:
    """The paper's counts for each token of the context.

    >>> from types import SimpleNamespace
    >>> formula(SimpleNamespace(window=3, context=128), 32, 512)
    {'nodes': 97, 'added_edges': 96, 'context_edges': 128, 'transformer_edges': 512}
    """
    added = options.window * k
    return {"nodes": 1 + added, "added_edges": added, "context_edges": options.context, "transformer_edges": lm_window}


def _batches(subject: Subject, name: str, text_: SearchedText, blocks: int, block: int, k: int) -> dict[str, Any]:
    """Batches of blocks of positions that have neighbours, drawn at random: their counts for each token."""
    lines, total = len(text_.table), Counts()
    block = min(block, lines)
    starts = np.arange(0, lines - block + 1, block)
    chosen = np.random.default_rng(subject.seed).permutation(starts)[: BATCHES * blocks]
    batches = [np.sort(chosen[at : at + blocks]) for at in range(0, len(chosen), blocks)]
    for begin in batches:
        positions_BT = text_.table.positions(torch.from_numpy(begin[:, None] + np.arange(block)))
        total += count_graph(subject, text_, positions_BT, text_.table.at(positions_BT, k))
    each = {key: value / total.tokens for key, value in asdict(total).items() if key != "tokens"}
    return {"name": name, "blocks": blocks, "block": block, "batches": len(batches), **each}


def _size(artifact: Artifact) -> int:
    """The bytes of an artifact's files and of its parts'."""
    own = sum(entry.bytes for entry in artifact.manifest.files.values())
    return own + sum(map(_size, artifact.parts))


def show(found: dict[str, Any]) -> Section:
    scoring, training = found["batches"]
    times, memory, parameters = found["ms_per_token"], found["memory_bytes"], found["parameters"]
    base = times["encode"] + times["head"]
    saved = 1 - scoring["slots_shared"] / scoring["slots"] if scoring["slots"] else 0.0
    network = memory.get("network with cache", memory["network"])
    said = [
        f"The paper's formula gives {found['formula']['nodes']:,.0f} nodes for each token of the context with k = "
        f"{found['k']}; the graphs here have {1 + scoring['slots']:,.1f}, of which sharing leaves "
        f"{1 + scoring['slots_shared']:,.1f} to compute ({100 * saved:.0f}% of the neighbour nodes are saved in blocks "
        f"of {scoring['block']} tokens).",
        f"A token takes {base:.2f} ms of base model and softmax, {times['gnn']:.2f} ms of graph network "
        f"({times['gnn'] / base:.2f} times as long) and {times['search']:.2f} ms of search; the paper's network makes "
        "its model 8 to 20 times slower, search left out.",
        f"The network has {parameters['gnn']:,} parameters, {100 * parameters['gnn'] / parameters['base']:.1f}% of the "
        f"base model's {parameters['base']:,}; {MEASURED} tokens take {human_bytes(network)} in it and "
        f"{human_bytes(memory['base'])} in the base model.",
    ]
    return Section(
        "complexity",
        "Complexity",
        [
            f"Counts are for each token of the context, with l = {found['left']}, r = {found['right']} and k = "
            f"{found['k']}, in {scoring['batches']} blocks of {scoring['block']} test tokens as they are scored, and "
            f"in {training['batches']} batches of {training['blocks']} x {training['block']} train tokens as they are "
            "trained on, drawn at random. Windows end at document bounds, and a window that several tokens of a batch "
            "retrieve is computed once. Memory is the peak of tensors; time is that of the report.",
            *said,
        ],
        [_graph_table(found), *_cost_tables(found)],
        [_figure(found, said[0])],
        said[:1],
    )


def _graph_table(found: dict[str, Any]) -> Table:
    exact, inter = found["formula"], "(l+r+1)k" if found["inter"] == "window" else "(l+r+1)k; here the centre only: k"
    kinds: list[tuple[str, str, float | None, str]] = [
        ("retrieved rows", "k", found["k"], "retrieved"),
        ("distinct rows in the batch", "", None, "rows"),
        ("neighbour nodes, a window for each retrieved row", "(l+r+1)k", exact["added_edges"], "slots"),
        ("neighbour nodes, each distinct row once", "", None, "slots_shared"),
        ("states read from the store", "", None, "states"),
        ("edges from neighbours to the context", inter, exact["added_edges"], "inter_edges"),
        ("edges within the context", "up to gnn.context", exact["context_edges"], "context_edges"),
    ]
    if found["neighbour_updates"]:
        kinds.append(("edges within windows, each distinct row once", "", None, "window_edges_shared"))
    rows: list[list[Cell]] = [
        [name, words, value, *(batch[key] for batch in found["batches"])] for name, words, value, key in kinds
    ]
    whole = "|V|, as |E| = |V|^2; |V| = lm.window"
    rows.append(["the base model's edges, in each layer", whole, exact["transformer_edges"], None, None])
    columns = [text("for each token"), text("paper"), number("paper, here", 0), number("scoring", 1)]
    return Table("complexity_graph", "Nodes and edges", [*columns, number("training", 1)], rows)


def _cost_tables(found: dict[str, Any]) -> list[Table]:
    parameters, memory, times = found["parameters"], found["memory_bytes"], found["ms_per_token"]
    total = sum(times.values())
    return [
        Table(
            "complexity_parameters",
            "Parameters",
            [text("model"), number("parameters", 0)],
            [["base model, frozen", parameters["base"]], ["graph network", parameters["gnn"]]],
        ),
        Table(
            "complexity_memory",
            f"Peak memory of {MEASURED} tokens",
            [text("model"), number("MB"), number("KB a token", 1), number("times the base model")],
            [
                [name, peak / 1e6, peak / 1e3 / MEASURED, peak / memory["base"] if memory["base"] else None]
                for name, peak in memory.items()
            ],
        ),
        Table(
            "complexity_time",
            "Time a token",
            [text("part"), number("ms", 3), percent("share")],
            [[SPEED_PARTS[part], took, took / total] for part, took in times.items()],
        ),
        Table(
            "complexity_disk",
            "On disk",
            [text("artifact"), number("MB", 1)],
            [[name, size / 1e6] for name, size in found["stored_bytes"].items()],
        ),
    ]


def _figure(found: dict[str, Any], said: str) -> Figure:
    figure, (nodes, times) = axes_of(2, height=3.2)
    scoring, training = found["batches"]
    counts = {
        "paper's formula": found["formula"]["added_edges"],
        "within documents": scoring["slots"],
        "shared, scoring": scoring["slots_shared"],
        "shared, training": training["slots_shared"],
        "states read, scoring": scoring["states"],
    }
    spent = {SPEED_PARTS[part]: took for part, took in found["ms_per_token"].items()}
    for axes, values, colour, label in (
        (nodes, counts, "#d55e00", "neighbour nodes for each token"),
        (times, spent, "#0072b2", "ms a token"),
    ):
        axes.barh(list(values), list(values.values()), facecolor="white", edgecolor=colour, hatch="//", lw=1.2)
        axes.invert_yaxis()
        axes.set_xlabel(label)
        for place, value in enumerate(values.values()):
            axes.annotate(f"{value:,.3g}", (value, place), (3, 0), textcoords="offset points", va="center", fontsize=8)
        axes.margins(x=0.15)
    return Figure("complexity", "Neighbour nodes and time, for each token", said, figure)
