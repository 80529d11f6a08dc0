"""The weights of one layer of the graph network: parameters, initial values, and the products that a pass uses.

Shapes: H heads, D width, d = D / H, E width of token embeddings, W window slots, C width of a source: D, or D + E with
token features. In names of relations, E is the edge type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gnnlm.gnn.gnn_options import GnnOptions

CONTEXT, NEIGHBOUR = 0, 1  # node types
INTRA, INTER = 0, 1  # edge types

OTHER_SLOTS = -4.0  # a copier's initial attention bias on slots that do not hold the token to copy
NEAR_START = (2.0, 0.3)  # initial bias and slope of the similarity gate: 0.88 at an exact match, 0.5 at 7 units away

Weights = tuple[Tensor, Tensor | None]  # a matrix and perhaps a bias


@dataclass(frozen=True)
class FoldedWeights:
    """The matrices that a forward pass multiplies with: products of parameters."""

    intra_query: Weights
    intra_key: Weights
    intra_value: Weights
    inter_query: Weights
    inter_key_HdC: Tensor
    inter_value_HdC: Tensor
    inter_value_bias_Hd: Tensor | None
    output: Weights


class LayerWeights(nn.Module):
    """The parameters of a layer, one of each kind for each type of node (context, neighbour) or edge (intra, inter)."""

    def __init__(self, options: GnnOptions, last: bool) -> None:
        super().__init__()
        self.options = options
        self.updates_neighbours = options.neighbour_updates and not last
        width, heads, head_width = options.width, options.heads, options.head_width
        self.query, self.key, self.value, self.output = (_per_node_type(width, width) for _ in range(4))
        self.attention_EHdd = nn.Parameter(torch.empty(2, heads, head_width, head_width))  # W_ATT
        self.feature_EHdd = nn.Parameter(torch.empty(2, heads, head_width, head_width))  # W_FEA
        self.mu = nn.Parameter(torch.ones((2, 2, 2) if options.mu == "type" else (2, heads)))
        if options.bias:
            self.query_bias, self.key_bias, self.value_bias, self.output_bias = (
                _per_node_type(width) for _ in range(4)
            )
        if options.norm == "post":
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        if options.edge_bias:
            self.slot_bias_HW = nn.Parameter(torch.zeros(heads, options.window))
            self.similarity_H = nn.Parameter(torch.linspace(0.0, 1.0, heads))
        if options.token_features:
            self.token_key_DE = nn.Parameter(torch.empty(width, options.base_width))
            self.token_value_DE = nn.Parameter(torch.empty(width, options.base_width))
        if options.copying:
            self.gate_H = nn.Parameter(torch.zeros(heads))
            self.near_H, self.near_slope_H = (nn.Parameter(torch.full((heads,), start)) for start in NEAR_START)
        self.dropout, self.neighbour_dropout = nn.Dropout(options.dropout), nn.Dropout(options.neighbour_dropout)
        self.attention_dropout = nn.Dropout(options.attention_dropout)
        self._frozen: FoldedWeights | None = None
        self._reset()

    # -- initial values ------------------------------------------------------------------------------------

    def _reset(self) -> None:
        if self.options.zero_start:
            self._reset_as_base_model()
        else:
            self._reset_as_released()
        if self.options.token_features:
            nn.init.zeros_(self.token_key_DE)
            nn.init.xavier_uniform_(self.token_value_DE)
        if self.options.copying:
            self._reset_as_copier()
        if not self.updates_neighbours:
            self._freeze_unused()

    def _reset_as_base_model(self) -> None:
        """Relations start as the identity, and the output at zero: the layer changes nothing."""
        for matrix in (*self.query, *self.key, *self.value, *self.output):
            nn.init.xavier_uniform_(matrix)
        for matrix in (*self.attention_EHdd.flatten(0, 1), *self.feature_EHdd.flatten(0, 1)):
            nn.init.eye_(matrix)
        nn.init.zeros_(self.output[CONTEXT])

    def _reset_as_released(self) -> None:
        """The public code's start: linear layers as PyTorch makes them, relations very small.

        It takes xavier's fans from the whole tensor of relations, not from one matrix of it.
        """
        bound = 1 / math.sqrt(self.options.width)
        biases = (self.query_bias, self.key_bias, self.value_bias, self.output_bias) if self.options.bias else ()
        for parameters in (self.query, self.key, self.value, self.output, *biases):
            for parameter in parameters:
                nn.init.uniform_(parameter, -bound, bound)
        for relations in (self.attention_EHdd, self.feature_EHdd):
            nn.init.xavier_uniform_(relations)

    def _reset_as_copier(self) -> None:
        """Once its gate opens, the layer adds the embeddings of its neighbours' tokens and nothing else."""
        nn.init.eye_(self.token_value_DE)
        nn.init.eye_(self.output[CONTEXT])
        for matrix in self.value:
            nn.init.zeros_(matrix)
        nn.init.ones_(self.similarity_H)
        nn.init.constant_(self.slot_bias_HW, OTHER_SLOTS)
        nn.init.zeros_(self.slot_bias_HW[:, self.options.left])

    def _freeze_unused(self) -> None:
        """Do not train parameters that the equations list but no output depends on."""
        unused = [self.query[NEIGHBOUR], self.output[NEIGHBOUR]]
        if self.options.bias:
            unused += [self.query_bias[NEIGHBOUR], self.key_bias[NEIGHBOUR], self.output_bias[NEIGHBOUR]]
        if self.options.norm == "post":
            unused += self.norms[NEIGHBOUR].parameters()
        for parameter in unused:
            parameter.requires_grad_(False)

    # -- folded weights ------------------------------------------------------------------------------------

    def folded(self) -> FoldedWeights:
        return self._frozen or self._fold()

    def freeze(self) -> None:
        """Keep the folded weights until `thaw`: the layer is not trained or moved in between."""
        with torch.inference_mode(False), torch.no_grad():
            self._frozen = self._fold()

    def thaw(self) -> None:
        self._frozen = None

    def _fold(self) -> FoldedWeights:
        feature_Hdd = self.feature_EHdd[INTER]
        key_HdC, value_HdC = self._split_rows(self.key[NEIGHBOUR]), self._split_rows(self.value[NEIGHBOUR])
        if self.options.token_features:
            key_HdC = torch.cat([key_HdC, self._split_rows(self.token_key_DE)], dim=-1)
            value_HdC = torch.cat([value_HdC, self._split_rows(self.token_value_DE)], dim=-1)
        value_bias_Hd = None
        if self.options.bias:
            value_bias_Hd = (self._split(self.value_bias[NEIGHBOUR])[:, None] @ feature_Hdd)[:, 0]
        return FoldedWeights(
            intra_query=self._query_weights(CONTEXT, INTRA, CONTEXT),
            intra_key=self._weights("key", CONTEXT),
            intra_value=self._value_weights(CONTEXT, INTRA),
            inter_query=self._query_weights(NEIGHBOUR, INTER, CONTEXT),
            inter_key_HdC=key_HdC,
            inter_value_HdC=feature_Hdd.mT @ value_HdC,
            inter_value_bias_Hd=value_bias_Hd,
            output=self._weights("output", CONTEXT),
        )

    def _query_weights(self, source: int, edge: int, target: int) -> Weights:
        """Return W_q with W_ATT, mu and the scale folded in: score = key . query."""
        options = self.options
        scale = math.sqrt(options.width if options.scale == "width" else options.head_width)
        mu = self.mu[source, edge, target] if options.mu == "type" else self.mu[edge][:, None, None]
        return self._weights("query", target, self.attention_EHdd[edge] * (mu / scale))

    def _value_weights(self, node_type: int, edge: int) -> Weights:
        """Return W_v with W_FEA folded in."""
        return self._weights("value", node_type, self.feature_EHdd[edge].mT)

    def _weights(self, name: str, node_type: int, relation_Hdd: Tensor | None = None) -> Weights:
        """Return a projection of a node type, with a relation of each head folded in."""
        matrix_DD: Tensor = getattr(self, name)[node_type]
        bias_D: Tensor | None = getattr(self, f"{name}_bias")[node_type] if self.options.bias else None
        if relation_Hdd is None:
            return matrix_DD, bias_D
        folded_DD = (relation_Hdd @ self._split_rows(matrix_DD)).flatten(0, 1)
        return folded_DD, None if bias_D is None else (relation_Hdd @ self._split(bias_D)[..., None]).flatten()

    def window_weights(self) -> tuple[Weights, Weights, Weights]:
        """Return the folded query, key and value weights of the edges within windows, for `update_windows`."""
        query = self._query_weights(NEIGHBOUR, INTRA, NEIGHBOUR)
        return query, self._weights("key", NEIGHBOUR), self._value_weights(NEIGHBOUR, INTRA)

    def _split(self, states: Tensor) -> Tensor:
        return states.view(*states.shape[:-1], self.options.heads, self.options.head_width)

    def _split_rows(self, matrix: Tensor) -> Tensor:
        return matrix.view(self.options.heads, self.options.head_width, -1)


def _per_node_type(*shape: int) -> nn.ParameterList:
    """Return a parameter of zeros for each node type."""
    return nn.ParameterList(nn.Parameter(torch.zeros(shape)) for _ in (CONTEXT, NEIGHBOUR))
