"""The paper's layer over explicit edge lists, one edge and one head at a time."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

CONTEXT, NEIGHBOUR = 0, 1
INTRA, INTER = 0, 1


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    x = (x - x.mean()) / torch.sqrt(x.var(unbiased=False) + 1e-5)
    return x if weight is None else x * weight + bias


def edges_of(graph: Any, options: Any) -> list[tuple[tuple[Any, ...], int, tuple[Any, ...], tuple[int, float]]]:
    """(source node, edge type, target node, (slot, similarity)) for one graph.

    Nodes are ("c", b, t) and ("n", u, w).
    """
    edges: list[Any] = []
    blocks, tokens = graph.document_BT.shape
    for b in range(blocks):
        for t in range(tokens):
            for s in range(t + 1):
                if graph.document_BT[b, s] == graph.document_BT[b, t] and t - s < options.context:
                    edges.append((("c", b, s), INTRA, ("c", b, t), (0, 0.0)))
            for k in range(graph.rows_BTK.shape[2]):
                if not graph.edge_BTK[b, t, k]:
                    continue
                u = int(graph.rows_BTK[b, t, k])
                slots = range(options.window) if options.inter == "window" else [options.left]
                for w in slots:
                    if graph.windows.slot_UW[u, w]:
                        similarity = float(graph.similarity_BTK[b, t, k])
                        edges.append((("n", u, w), INTER, ("c", b, t), (w, similarity)))
    for u in range(graph.windows.slot_UW.shape[0]):
        for w in range(options.window):
            for v in range(options.window):
                adjacent = abs(w - v) == 1 or (options.self_loops and w == v)
                if adjacent and graph.windows.slot_UW[u, v]:
                    edges.append((("n", u, v), INTRA, ("n", u, w), (0, 0.0)))
    return edges


def run_layer(layer: Any, states: dict[Any, Tensor], tokens: dict[Any, Tensor], edges: list[Any]) -> dict[Any, Tensor]:
    """New states of all nodes. `tokens` holds the token embedding of neighbour nodes, where they count."""
    o = layer.options
    size = o.head_width
    kind = {"c": CONTEXT, "n": NEIGHBOUR}
    x = {node: layer_norm(h) if o.norm == "pre" else h for node, h in states.items()}

    def project(node: Any, name: str, vector: Tensor) -> Tensor:
        type_ = kind[node[0]]
        out = getattr(layer, name)[type_] @ vector
        return out + getattr(layer, f"{name}_bias")[type_] if o.bias else out

    def key(node: Any) -> Tensor:
        out = project(node, "key", x[node])
        return out + layer.token_key_DE @ tokens[node] if node in tokens else out

    def value(node: Any) -> Tensor:
        out = project(node, "value", x[node])
        return out + layer.token_value_DE @ tokens[node] if node in tokens else out

    into = defaultdict(list)
    for source, edge, target, extra in edges:
        into[target].append((source, edge, extra))
    new = {}
    for node, h in states.items():
        query = project(node, "query", x[node])
        total = torch.zeros(o.width, dtype=h.dtype)
        for edge in (INTRA, INTER):
            sources = [(s, extra) for s, e, extra in into[node] if e == edge]
            if not sources:
                continue
            # with token features, intra edges among neighbours still read states alone
            plain = edge == INTRA and node[0] == "n"
            heads = []
            for head in range(o.heads):
                part = slice(head * size, (head + 1) * size)
                scores, messages = [], []
                for s, (slot, similarity) in sources:
                    k = (project(s, "key", x[s]) if plain else key(s))[part]
                    v = (project(s, "value", x[s]) if plain else value(s))[part]
                    type_ = (kind[s[0]], edge, kind[node[0]])
                    mu = layer.mu[type_] if o.mu == "type" else layer.mu[edge, head]
                    scale = math.sqrt(o.width if o.scale == "width" else size)
                    score = k @ layer.attention_EHdd[edge, head] @ query[part] * mu / scale
                    if o.edge_bias and edge == INTER:
                        score = score + layer.slot_bias_HW[head, slot] + layer.similarity_H[head] * similarity / 0.01
                    scores.append(score)
                    messages.append(v @ layer.feature_EHdd[edge, head])
                weights = torch.softmax(torch.stack(scores), 0)
                heads.append(sum(w * m for w, m in zip(weights, messages, strict=True)))
            if o.copying and edge == INTER:
                nearest = (max(float(similarity) for _, (_, similarity) in sources) - 1) / 0.01
                heads = [
                    m * torch.sigmoid(layer.near_H[head] + layer.near_slope_H[head] * nearest)
                    for head, m in enumerate(heads)
                ]
            total = total + torch.cat(heads)
        if o.combine == "mean" and node[0] == "c":
            total = total / 2  # two edge types lead to a context node, one to a neighbour
        if node[0] == "n" and not layer.updates_neighbours:
            new[node] = h
            continue
        if o.copying and node[0] == "c":
            total = total * (10 * layer.gate_H).repeat_interleave(size)
        out = h + project(node, "output", total)
        if o.norm == "post":
            norm = layer.norms[kind[node[0]]]
            out = layer_norm(out, norm.weight, norm.bias)
        new[node] = out
    return new


def run_model(model: Any, graph: Any, embeddings: Tensor) -> Tensor:
    """The whole network; updated context states [B, T, D]."""
    o = model.options
    edges = edges_of(graph, o)
    blocks, length = graph.document_BT.shape
    states = {("c", b, t): graph.context_BTD[b, t] for b in range(blocks) for t in range(length)}
    tokens = {}
    for u in range(graph.windows.slot_UW.shape[0]):
        for w in range(o.window):
            place = int(graph.windows.place_UW[u, w])
            states["n", u, w] = graph.windows.states_PD[place]
            if o.token_features:
                token = int(graph.windows.tokens_P[place])
                tokens["n", u, w] = layer_norm(embeddings[max(token, 0)]) * (token >= 0)
    if o.width != o.base_width:
        narrow = {"c": model.narrow, "n": model.narrow_neighbour if o.typed_input else model.narrow}
        states = {n: torch.nn.functional.gelu(narrow[n[0]](h)) for n, h in states.items()}
    for layer in model.layers:
        states = run_layer(layer, states, tokens, edges)
    out = torch.stack([torch.stack([states["c", b, t] for t in range(length)]) for b in range(blocks)])
    if o.width != o.base_width:
        out = model.widen(out) + (graph.context_BTD if o.zero_start else 0)
    return out
