"""Other implementations of the same network: edge lists with PyTorch Geometric, and dense textbook tensors.

Both take the weights of a `GnnModel` with the preset `released` and compute the same output, for one block. Both are
written in the idiom of their library: vectorised, projections once per node, no loop over edges or heads. Every
neighbour of every token is a separate node, as in the paper's graph; `shared` gives the edge lists one window per
distinct row instead.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnnlm.gnn.layer import GnnLayer
from gnnlm.gnn.layer_weights import CONTEXT, INTER, INTRA, NEIGHBOUR
from gnnlm.gnn.model import GnnModel
from gnnlm.graph.batch import Graph, band_mask


def project(layer: GnnLayer, name: str, kind: int, states: Tensor) -> Tensor:
    return F.linear(states, getattr(layer, name)[kind], getattr(layer, f"{name}_bias")[kind])


def finish(layer: GnnLayer, states: Tensor, sums: Tensor, kind: int) -> Tensor:
    out: Tensor = layer.norms[kind](states + project(layer, "output", kind, sums))
    return out


class EdgeLists(nn.Module):
    """The released layer as message passing over edge lists, with a scatter softmax per edge type."""

    def __init__(self, model: GnnModel, graph: Graph, shared: bool) -> None:
        super().__init__()
        from torch_geometric.nn import MessagePassing
        from torch_geometric.utils import softmax

        class Attention(MessagePassing):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__(aggr="sum", node_dim=0)

            def forward(self, edges: Tensor, key: Tensor, query: Tensor, value: Tensor, size: tuple[int, int]) -> Any:
                return self.propagate(edges, key=(key, None), query=(None, query), value=(value, None), size=size)

            def message(self, key_j: Tensor, query_i: Tensor, value_j: Tensor, index: Tensor, size_i: int) -> Tensor:
                weights = softmax((query_i * key_j).sum(-1), index, num_nodes=size_i)
                return weights[..., None] * value_j

        self.model, self.attention = model, Attention()
        options, windows = model.options, graph.windows
        (tokens, k), width = graph.rows_BTK.shape[1:], options.window
        band = band_mask(graph.position_BT, graph.document_BT, tokens, options.context)[0]
        target, source = band.nonzero().unbind(1)
        self.context_edges = torch.stack([source, target])
        real = graph.edge_BTK[0]
        rows = graph.rows_BTK[0]
        numbers = rows if shared else torch.arange(tokens * k).view(tokens, k)  # window of each neighbour
        row_of = torch.arange(len(windows.rows_U)) if shared else rows.flatten()
        self.place = windows.place_UW[row_of].flatten()
        slot = windows.slot_UW[row_of]
        edges = []
        for offset in (-1, 0, 1):
            for w in range(width):
                if 0 <= w + offset < width:
                    valid = slot[:, w + offset].nonzero()[:, 0]
                    edges.append(torch.stack([valid * width + w + offset, valid * width + w]))
        self.window_edges = torch.cat(edges, dim=1)
        token = torch.arange(tokens)[:, None].expand(tokens, k)
        self.inter_edges = torch.stack([numbers[real] * width + options.left, token[real]])

    def forward(self, context_TD: Tensor, states_PD: Tensor) -> Tensor:
        window_ND = states_PD[self.place]
        for number in range(self.model.options.layers):
            layer = self.model.layer(number)
            query_TD = project(layer, "query", CONTEXT, context_TD)
            intra = self.attend(layer, self.context_edges, context_TD, CONTEXT, INTRA, query_TD)
            inter = self.attend(layer, self.inter_edges, window_ND, NEIGHBOUR, INTER, query_TD)
            context_TD = finish(layer, context_TD, (intra + inter) / 2, CONTEXT)
            if layer.updates_neighbours:
                query_ND = project(layer, "query", NEIGHBOUR, window_ND)
                sums = self.attend(layer, self.window_edges, window_ND, NEIGHBOUR, INTRA, query_ND)
                window_ND = finish(layer, window_ND, sums, NEIGHBOUR)
        return context_TD

    def attend(self, layer: GnnLayer, edges: Tensor, source: Tensor, kind: int, edge: int, query: Tensor) -> Tensor:
        key = self.related(project(layer, "key", kind, source), layer.attention_EHdd[edge])
        key = key * layer.mu[edge][:, None] / math.sqrt(self.model.options.head_width)
        value = self.related(project(layer, "value", kind, source), layer.feature_EHdd[edge])
        out: Tensor = self.attention(edges, key, self.split(query), value, (len(source), len(query)))
        return out.flatten(1)

    def split(self, states: Tensor) -> Tensor:
        return states.view(len(states), self.model.options.heads, -1)

    def related(self, states: Tensor, relation_Hdd: Tensor) -> Tensor:
        return torch.bmm(self.split(states).transpose(0, 1), relation_Hdd).transpose(0, 1)


class Dense(nn.Module):
    """The textbook: all nodes of every token projected, [tokens, k, window, width], and masked softmaxes."""

    def __init__(self, model: GnnModel, graph: Graph) -> None:
        super().__init__()
        self.model = model
        rows_TK, windows = graph.rows_BTK[0], graph.windows
        self.place_TKW = windows.place_UW[rows_TK]
        self.slot_TKW = windows.slot_UW[rows_TK]
        self.edge_TK = graph.edge_BTK[0]
        width = model.options.window
        near = (torch.arange(width)[:, None] - torch.arange(width)).abs() <= 1
        self.near_TKWW = near & self.slot_TKW[:, :, None]
        self.band_TT = band_mask(graph.position_BT, graph.document_BT, len(rows_TK), model.options.context)[0]

    def forward(self, context_TD: Tensor, states_PD: Tensor) -> Tensor:
        options = self.model.options
        window = states_PD[self.place_TKW]
        for number in range(options.layers):
            layer = self.model.layer(number)
            query_TD = project(layer, "query", CONTEXT, context_TD)
            intra = self.attend(layer, query_TD, context_TD, CONTEXT, INTRA, self.band_TT)
            centre = window[:, :, options.left]
            inter = self.attend(layer, query_TD[:, None], centre, NEIGHBOUR, INTER, self.edge_TK[:, None])[:, 0]
            context_TD = finish(layer, context_TD, (intra + inter) / 2, CONTEXT)
            if layer.updates_neighbours:
                query = project(layer, "query", NEIGHBOUR, window)
                sums = self.attend(layer, query, window, NEIGHBOUR, INTRA, self.near_TKWW)
                window = finish(layer, window, sums, NEIGHBOUR)
        return context_TD

    def attend(self, layer: GnnLayer, query: Tensor, source: Tensor, kind: int, edge: int, mask: Tensor) -> Tensor:
        """query [..., Q, D], source [..., S, D], mask [..., Q, S]."""
        key = self.split(project(layer, "key", kind, source)) @ layer.attention_EHdd[edge]
        value = self.split(project(layer, "value", kind, source)) @ layer.feature_EHdd[edge]
        scale = math.sqrt(self.model.options.head_width)
        scores = self.split(query) @ key.mT * layer.mu[edge][:, None, None] / scale
        mask = mask[..., None, :, :]
        weights = scores.masked_fill(~mask, -1e30).softmax(-1) * mask
        return (weights @ value).transpose(-2, -3).flatten(-2)

    def split(self, states: Tensor) -> Tensor:
        return states.view(*states.shape[:-1], self.model.options.heads, -1).transpose(-2, -3)
