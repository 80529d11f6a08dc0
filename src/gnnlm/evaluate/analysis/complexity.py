"""Complexity: nodes, edges, parameters, memory and time of this run beside the paper's formulas (paper, section 4.1).

    nodes       |V| tokens grow by (l + r + 1) k nodes each
    edges       (l + r + 1) k |V| are added; a Transformer has |V|^2

The formulas count a window of its own for every retrieved row, whole at document bounds. Here the graphs of real
batches are counted. Tokens that retrieve the same row share its window, and windows of different rows share the states
that they read from the store.

Shapes: B blocks, T tokens, K neighbours, U rows, W window slots.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gnnlm.artifact import Artifact, human_bytes
from gnnlm.evaluate.analysis.figure import axes_of
from gnnlm.evaluate.analysis.memory import MEASURED, base_bytes, network_bytes
from gnnlm.evaluate.analysis.part import AnalysisPart
from gnnlm.evaluate.analysis.section import AnalysisSection, Figure, PartResult
from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.evaluate.table import Cell, Table, number, percent, text
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


class GraphCounts(PartResult):
    """What a graph holds. `slots` are window slots within their documents: of every retrieved row, and of each once."""

    tokens: float = 0
    retrieved: float = 0
    rows: float = 0
    slots: float = 0
    slots_shared: float = 0
    states: float = 0
    inter_edges: float = 0
    context_edges: float = 0
    window_edges: float = 0
    window_edges_shared: float = 0

    def __add__(self, other: GraphCounts) -> GraphCounts:
        return GraphCounts(**{name: value + getattr(other, name) for name, value in self})

    @property
    def per_token(self) -> dict[str, float]:
        return {name: value / self.tokens for name, value in self}


class BatchCounts(GraphCounts):
    """The counts of some batches for each token."""

    name: str
    blocks: int
    block: int
    batches: int


class PaperFormula(PartResult):
    """The paper's counts for each token of the context."""

    nodes: int
    added_edges: int
    context_edges: int
    transformer_edges: int

    @classmethod
    def of(cls, options: GnnOptions, k: int, lm_window: int) -> PaperFormula:
        """
        >>> from types import SimpleNamespace
        >>> PaperFormula.of(SimpleNamespace(window=3, context=128), 32, 512).nodes
        97
        """
        added = options.window * k
        return cls(nodes=1 + added, added_edges=added, context_edges=options.context, transformer_edges=lm_window)


class ComplexityResult(PartResult):
    """What the run's network costs. `batches` are counted as they are scored and as they are trained on."""

    k: int
    left: int
    right: int
    window: int
    context: int
    layers: int
    inter: str
    neighbour_updates: bool
    lm_window: int
    parameters: dict[str, int]
    memory_bytes: dict[str, int]
    ms_per_token: dict[str, float]
    stored_bytes: dict[str, int]
    batches: tuple[BatchCounts, BatchCounts]
    formula: PaperFormula


def count_graph(subject: Subject, searched: SearchedText, positions_BT: Tensor, near: Neighbours) -> GraphCounts:
    """The nodes and edges of the graph of some positions with these neighbours."""
    predictor = subject.snapshot.predictor
    assert predictor.gnn is not None
    options = predictor.gnn.options
    graph = predictor.graphs(searched.context(positions_BT), near)
    windows = graph.windows
    used = graph.rows_BTK[graph.edge_BTK]  # the row of every inter edge bundle
    distinct = used.unique()
    slots_U = windows.slot_UW.sum(1)
    edges_U = window_edges(windows.slot_UW, options)
    first_BT = searched.text.bounds(positions_BT)[0]
    return GraphCounts(
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


def measure(subject: Subject) -> ComplexityResult:
    parts, config, report = subject.snapshot, subject.config, subject.report
    assert parts.gnn is not None
    options = parts.gnn.options
    k = min(parts.predictor.graph_k, subject.test.table.k)
    memory = {
        "base": base_bytes(subject),
        "network": network_bytes(subject, replace(parts.predictor, cache=None)),
    }
    if parts.predictor.cache is not None:
        memory["network with cache"] = network_bytes(subject, parts.predictor)
    return ComplexityResult(
        k=k,
        left=options.left,
        right=options.right,
        window=options.window,
        context=options.context,
        layers=options.layers,
        inter=options.inter,
        neighbour_updates=options.neighbour_updates,
        lm_window=config.lm.window,
        parameters={"base": parts.lm.parameters, "gnn": sum(p.numel() for p in parts.gnn.parameters())},
        memory_bytes=memory,
        ms_per_token={
            part: 1e3 * report.seconds[part] / report.test_tokens for part in SPEED_PARTS if part in report.seconds
        },
        stored_bytes={name: _size(subject.artifact(name)) for name in ("encode", "codec", "index", "search", "cache")},
        batches=(
            _batches(subject, "scoring", subject.test, 1, config.eval.block, k),
            _batches(subject, "training", parts.searched("train"), config.train.batch_blocks, config.train.block, k),
        ),
        formula=PaperFormula.of(options, k, config.lm.window),
    )


def _batches(subject: Subject, name: str, searched: SearchedText, blocks: int, block: int, k: int) -> BatchCounts:
    """Count batches of blocks of positions that have neighbours, drawn at random."""
    lines = len(searched.table)
    block = min(block, lines)
    starts = np.arange(0, lines - block + 1, block)
    drawn = np.random.default_rng(subject.seed).permutation(starts)[: BATCHES * blocks]
    batches = [np.sort(drawn[at : at + blocks]) for at in range(0, len(drawn), blocks)]
    total = GraphCounts()
    for begin in batches:
        positions_BT = searched.table.positions(torch.from_numpy(begin[:, None] + np.arange(block)))
        total += count_graph(subject, searched, positions_BT, searched.table.at(positions_BT, k))
    return BatchCounts(name=name, blocks=blocks, block=block, batches=len(batches), **total.per_token)


def _size(artifact: Artifact) -> int:
    """The bytes of an artifact's files and of its parts'."""
    own = sum(entry.bytes for entry in artifact.manifest.files.values())
    return own + sum(map(_size, artifact.parts))


def show(result: ComplexityResult) -> AnalysisSection:
    scoring, training = result.batches
    times, memory, parameters = result.ms_per_token, result.memory_bytes, result.parameters
    base = times["encode"] + times["head"]
    saved = 1 - scoring.slots_shared / scoring.slots if scoring.slots else 0.0
    network = memory.get("network with cache", memory["network"])
    findings = [
        f"The paper's formula gives {result.formula.nodes:,.0f} nodes for each token of the context with k = "
        f"{result.k}; the graphs here have {1 + scoring.slots:,.1f}, of which sharing leaves "
        f"{1 + scoring.slots_shared:,.1f} to compute ({100 * saved:.0f}% of the neighbour nodes are saved in blocks "
        f"of {scoring.block} tokens).",
        f"A token takes {base:.2f} ms of base model and softmax, {times['gnn']:.2f} ms of graph network "
        f"({times['gnn'] / base:.2f} times as long) and {times['search']:.2f} ms of search; the paper's network makes "
        "its model 8 to 20 times slower, search left out.",
        f"The network has {parameters['gnn']:,} parameters, {100 * parameters['gnn'] / parameters['base']:.1f}% of the "
        f"base model's {parameters['base']:,}; {MEASURED} tokens take {human_bytes(network)} in it and "
        f"{human_bytes(memory['base'])} in the base model.",
    ]
    return AnalysisSection(
        [
            f"Counts are for each token of the context, with l = {result.left}, r = {result.right} and k = "
            f"{result.k}, in {scoring.batches} blocks of {scoring.block} test tokens as they are scored, and "
            f"in {training.batches} batches of {training.blocks} x {training.block} train tokens as they are "
            "trained on, drawn at random. Windows end at document bounds, and a window that several tokens of a batch "
            "retrieve is computed once. Memory is the peak of tensors; time is that of the report.",
            *findings,
        ],
        [_graph_table(result), *_cost_tables(result)],
        [_figure(result, findings[0])],
        findings[:1],
    )


def _graph_table(result: ComplexityResult) -> Table:
    formula = result.formula
    inter = "(l+r+1)k" if result.inter == "window" else "(l+r+1)k; here the centre only: k"
    kinds: list[tuple[str, str, float | None, str]] = [
        ("retrieved rows", "k", result.k, "retrieved"),
        ("distinct rows in the batch", "", None, "rows"),
        ("neighbour nodes, a window for each retrieved row", "(l+r+1)k", formula.added_edges, "slots"),
        ("neighbour nodes, each distinct row once", "", None, "slots_shared"),
        ("states read from the store", "", None, "states"),
        ("edges from neighbours to the context", inter, formula.added_edges, "inter_edges"),
        ("edges within the context", "up to gnn.context", formula.context_edges, "context_edges"),
    ]
    if result.neighbour_updates:
        kinds.append(("edges within windows, each distinct row once", "", None, "window_edges_shared"))
    rows: list[list[Cell]] = [
        [name, words, value, *(getattr(batch, key) for batch in result.batches)] for name, words, value, key in kinds
    ]
    whole = "|V|, as |E| = |V|^2; |V| = lm.window"
    rows.append(["the base model's edges, in each layer", whole, formula.transformer_edges, None, None])
    return Table.of(
        "complexity_graph",
        "Nodes and edges",
        rows,
        text("for each token", lambda row: row[0]),
        text("paper", lambda row: row[1]),
        number("paper, here", lambda row: row[2], 0),
        number("scoring", lambda row: row[3], 1),
        number("training", lambda row: row[4], 1),
    )


def _cost_tables(result: ComplexityResult) -> list[Table]:
    parameters, memory = result.parameters, result.memory_bytes
    total = sum(result.ms_per_token.values())
    return [
        Table.of(
            "complexity_parameters",
            "Parameters",
            [("base model, frozen", parameters["base"]), ("graph network", parameters["gnn"])],
            text("model", lambda row: row[0]),
            number("parameters", lambda row: row[1], 0),
        ),
        Table.of(
            "complexity_memory",
            f"Peak memory of {MEASURED} tokens",
            memory.items(),
            text("model", lambda row: row[0]),
            number("MB", lambda row: row[1] / 1e6),
            number("KB a token", lambda row: row[1] / 1e3 / MEASURED, 1),
            number("times the base model", lambda row: row[1] / memory["base"] if memory["base"] else None),
        ),
        Table.of(
            "complexity_time",
            "Time a token",
            result.ms_per_token.items(),
            text("part", lambda row: SPEED_PARTS[row[0]]),
            number("ms", lambda row: row[1], 3),
            percent("share", lambda row: row[1] / total),
        ),
        Table.of(
            "complexity_disk",
            "On disk",
            result.stored_bytes.items(),
            text("artifact", lambda row: row[0]),
            number("MB", lambda row: row[1] / 1e6, 1),
        ),
    ]


def _figure(result: ComplexityResult, finding: str) -> Figure:
    figure, (nodes, times) = axes_of(2, height=3.2)
    scoring, training = result.batches
    counts = {
        "paper's formula": result.formula.added_edges,
        "within documents": scoring.slots,
        "shared, scoring": scoring.slots_shared,
        "shared, training": training.slots_shared,
        "states read, scoring": scoring.states,
    }
    spent = {SPEED_PARTS[part]: took for part, took in result.ms_per_token.items()}
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
    return Figure("complexity", "Neighbour nodes and time, for each token", finding, figure)


PART = AnalysisPart(
    "complexity",
    "Complexity",
    ComplexityResult,
    lambda m: measure(m.subject),
    show,
    lambda subject: 10.0,
    stages=("tune", "eval"),
    gnn=True,
)
