"""One layer of the graph network: the paper's equations, folded and absorbed.

The equations, for an edge of type e from a node s to a node n, per head:

    score   = K(s) W_ATT[e] Q(n) * mu[e] / scale     softmax over the edges of one type into n
    message = V(s) W_FEA[e]                          V(s) = W_v h_s, K(s) = W_k h_s, Q(n) = W_q h_n
    h_n     = h_n + W_o sum_over_types(sum_over_edges(softmax * message))

What is done, without approximation:
- W_ATT, mu and the scale are folded into W_q, W_FEA into W_v: products of weights, made once per pass.
- On inter edges, of which there are far more than nodes, the query is carried on into the space of the
  sources (q' = W_k^T q), raw sources are scored and averaged, and the average is projected once.
- A key bias adds the same to all scores of a softmax and cancels; a value bias is added once.
- No edge leads from context to neighbour, so a window's states depend on its row alone and are updated
  once per distinct row. The last layer needs no neighbour update.

Shapes: B blocks, T tokens, S source tokens, K neighbours, U distinct rows, W window slots, H heads, D width,
d = D / H, E width of token embeddings, C = D, or D + E with token features.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnnlm.gnn.attend import attend, masked_softmax
from gnnlm.gnn.options import GnnOptions
from gnnlm.graph.batch import Graph

CONTEXT, NEIGHBOUR = 0, 1  # node types
INTRA, INTER = 0, 1  # edge types


class GnnLayer(nn.Module):
    """Updates context states, and neighbour states where a later layer needs them."""

    def __init__(self, options: GnnOptions, last: bool) -> None:
        super().__init__()
        self.options = options
        self.updates_neighbours = options.neighbour_updates and not last
        width, heads, head_width = options.width, options.heads, options.head_width
        self.query, self.key, self.value, self.output = (_per_type(width, width) for _ in range(4))
        self.attention_EHdd, self.feature_EHdd = (
            nn.Parameter(torch.empty(2, heads, head_width, head_width)) for _ in range(2)
        )
        self.mu = nn.Parameter(torch.ones((2, 2, 2) if options.mu == "type" else (2, heads)))
        if options.bias:
            self.query_bias, self.key_bias, self.value_bias, self.output_bias = (_per_type(width) for _ in range(4))
        if options.norm == "post":
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        if options.edge_bias:
            self.slot_bias_HW = nn.Parameter(torch.zeros(heads, options.window))
            self.similarity_H = nn.Parameter(torch.linspace(0.0, 1.0, heads))
        if options.token_features:
            self.token_key_DE, self.token_value_DE = (
                nn.Parameter(torch.empty(width, options.base_width)) for _ in range(2)
            )
        self.dropout = nn.Dropout(options.dropout)
        self._reset()

    def _reset(self) -> None:
        options = self.options
        for matrix in (*self.query, *self.key, *self.value, *self.output):
            nn.init.xavier_uniform_(matrix)
        for relation in (self.attention_EHdd, self.feature_EHdd):
            for matrix in relation.flatten(0, 1):
                nn.init.eye_(matrix) if options.zero_start else nn.init.xavier_uniform_(matrix)
        if options.zero_start:
            nn.init.zeros_(self.output[CONTEXT])
        if options.token_features:
            nn.init.zeros_(self.token_key_DE)
            nn.init.xavier_uniform_(self.token_value_DE)
        if not self.updates_neighbours:  # the equations list these, no output depends on them: kept, not trained
            unused = [self.query[NEIGHBOUR], self.output[NEIGHBOUR]]
            if options.bias:
                unused += [self.query_bias[NEIGHBOUR], self.key_bias[NEIGHBOUR], self.output_bias[NEIGHBOUR]]
            if options.norm == "post":
                unused += self.norms[NEIGHBOUR].parameters()
            for parameter in unused:
                parameter.requires_grad_(False)

    def forward(
        self,
        context_BTD: Tensor,
        past_BMD: Tensor,
        band_BTS: Tensor,
        window_UWD: Tensor,
        sources_UWC: Tensor,
        graph: Graph,
    ) -> tuple[Tensor, Tensor]:
        """New context states and new window states.

        `past_BMD` holds this layer's inputs of the tokens before; `sources_UWC` is `sources(window_UWD, ...)`.
        """
        options = self.options
        x_BTD = self._pre_norm(context_BTD)
        sources_BSD = torch.cat([self._pre_norm(past_BMD), x_BTD], dim=1)
        sum_BTD = self._intra_context(x_BTD, sources_BSD, band_BTS) + self._inter(x_BTD, sources_UWC, graph)
        if options.combine == "mean":
            sum_BTD = sum_BTD / 2
        updated_BTD = self._add(context_BTD, sum_BTD, CONTEXT)
        if self.updates_neighbours:
            x_UWD = sources_UWC[..., : options.width]
            window_UWD = self._add(window_UWD, self._intra_window(x_UWD, graph.windows.slot_UW), NEIGHBOUR)
        return updated_BTD, window_UWD

    def sources(self, window_UWD: Tensor, window_tokens_UWE: Tensor | None) -> Tensor:
        """What inter edges read: normalised window states and, beside them, token embeddings, [U, W, C]."""
        x_UWD = self._pre_norm(window_UWD)
        return x_UWD if window_tokens_UWE is None else torch.cat([x_UWD, window_tokens_UWE], dim=-1)

    def _intra_context(self, x_BTD: Tensor, sources_BSD: Tensor, band_BTS: Tensor) -> Tensor:
        query_BHTd = self._query(x_BTD, CONTEXT, INTRA, CONTEXT).transpose(1, 2)
        key_BHSd = self._key(sources_BSD, CONTEXT).transpose(1, 2)
        value_BHSd = self._value(sources_BSD, CONTEXT, INTRA).transpose(1, 2)
        mean_BHTd = F.scaled_dot_product_attention(
            query_BHTd, key_BHSd, value_BHSd, attn_mask=band_BTS[:, None], scale=1.0
        )
        return mean_BHTd.transpose(1, 2).flatten(-2)

    def _inter(self, x_BTD: Tensor, sources_UWC: Tensor, graph: Graph) -> Tensor:
        options, slots = self.options, self.options.inter_slots
        batch, tokens, _ = graph.rows_BTK.shape
        slot_numbers_W = torch.arange(options.window, device=sources_UWC.device)[slots]
        index_BTKW = graph.rows_BTK[..., None] * options.window + slot_numbers_W
        mask_BTKW = graph.edge_BTK[..., None] & graph.windows.slot_UW[graph.rows_BTK][..., slots]
        key_HdC, value_HdC = self._split_rows(self.key[NEIGHBOUR]), self._split_rows(self.value[NEIGHBOUR])
        if options.token_features:
            key_HdC = torch.cat([key_HdC, self._split_rows(self.token_key_DE)], dim=-1)
            value_HdC = torch.cat([value_HdC, self._split_rows(self.token_value_DE)], dim=-1)
        query_NHd = self._query(x_BTD, NEIGHBOUR, INTER, CONTEXT).flatten(0, 1)
        mean_NHC = attend(
            torch.einsum("nhd,hdc->nhc", query_NHd, key_HdC),
            self._edge_bias(graph)[..., slots].reshape(batch * tokens, options.heads, -1),
            sources_UWC.flatten(0, 1),
            index_BTKW.reshape(batch * tokens, -1),
            mask_BTKW.reshape(batch * tokens, -1),
        )
        feature_Hdd = self.feature_EHdd[INTER]
        sum_NHd = torch.einsum("nhc,hdc->nhd", mean_NHC, feature_Hdd.mT @ value_HdC)
        if options.bias:
            has_edge_N = mask_BTKW.flatten(2).any(-1).flatten()
            bias_Hd = (self._split(self.value_bias[NEIGHBOUR])[:, None] @ feature_Hdd)[:, 0]
            sum_NHd = sum_NHd + has_edge_N[:, None, None] * bias_Hd
        return sum_NHd.reshape(batch, tokens, -1)

    def _intra_window(self, x_UWD: Tensor, slot_UW: Tensor) -> Tensor:
        """Adjacent slots of a window, both ways, with itself where there are self-loops.

        At most three edges lead to a slot, so each is a product of shifted tensors, not a matrix product.
        """
        offsets = (-1, 0, 1) if self.options.self_loops else (-1, 1)
        query_UWHd = self._query(x_UWD, NEIGHBOUR, INTRA, NEIGHBOUR)
        key_UWHd, value_UWHd = self._key(x_UWD, NEIGHBOUR), self._value(x_UWD, NEIGHBOUR, INTRA)
        scores_UWHO = torch.stack([(query_UWHd * _shifted(key_UWHd, o)).sum(-1) for o in offsets], dim=-1)
        edge_UWO = torch.stack([_shifted(slot_UW, o) for o in offsets], dim=-1)
        weights_UWHO = masked_softmax(scores_UWHO, edge_UWO[:, :, None])
        sums = [weights_UWHO[..., n, None] * _shifted(value_UWHd, o) for n, o in enumerate(offsets)]
        return torch.stack(sums).sum(0).flatten(-2)

    def _edge_bias(self, graph: Graph) -> Tensor:
        """What the default adds to inter scores, [B, T, H, K, W]: a bias per slot and a weight on similarity."""
        batch, tokens, neighbours = graph.rows_BTK.shape
        shape = (batch, tokens, self.options.heads, neighbours, self.options.window)
        if not self.options.edge_bias:
            return graph.similarity_BTK.new_zeros(()).expand(shape)
        similarity_BTHK = graph.similarity_BTK[:, :, None] / self.options.similarity_unit * self.similarity_H[:, None]
        return similarity_BTHK[..., None] + self.slot_bias_HW[:, None]

    def _query(self, x: Tensor, source: int, edge: int, target: int) -> Tensor:
        """Queries with W_ATT, mu and the scale folded in, [..., H, d]: score = key . query."""
        options = self.options
        scale = math.sqrt(options.width if options.scale == "width" else options.head_width)
        mu = self.mu[source, edge, target] if options.mu == "type" else self.mu[edge][:, None, None]
        return self._folded(x, "query", target, self.attention_EHdd[edge] * (mu / scale))

    def _key(self, x: Tensor, kind: int) -> Tensor:
        return self._split(self._project(x, "key", kind))

    def _value(self, x: Tensor, kind: int, edge: int) -> Tensor:
        """Values with W_FEA folded in, [..., H, d]."""
        return self._folded(x, "value", kind, self.feature_EHdd[edge].mT)

    def _folded(self, x: Tensor, name: str, kind: int, relation_Hdd: Tensor) -> Tensor:
        """relation (W x + bias) per head, with one matrix product over x."""
        matrix_HdD = relation_Hdd @ self._split_rows(getattr(self, name)[kind])
        bias_D = None
        if self.options.bias:
            bias_D = (relation_Hdd @ self._split(getattr(self, f"{name}_bias")[kind])[..., None]).flatten()
        return self._split(F.linear(x, matrix_HdD.flatten(0, 1), bias_D))

    def _add(self, states: Tensor, sums: Tensor, kind: int) -> Tensor:
        """Output projection, residual and, after it, the norm where there is one."""
        states = states + self.dropout(self._project(sums, "output", kind))
        return self.norms[kind](states) if self.options.norm == "post" else states

    def _pre_norm(self, states: Tensor) -> Tensor:
        """Without weights: every use is followed by a matrix that can hold them."""
        return F.layer_norm(states, states.shape[-1:]) if self.options.norm == "pre" else states

    def _project(self, states: Tensor, name: str, kind: int) -> Tensor:
        bias = getattr(self, f"{name}_bias")[kind] if self.options.bias else None
        return F.linear(states, getattr(self, name)[kind], bias)

    def _split(self, states: Tensor) -> Tensor:
        return states.view(*states.shape[:-1], self.options.heads, self.options.head_width)

    def _split_rows(self, matrix: Tensor) -> Tensor:
        return matrix.view(self.options.heads, self.options.head_width, -1)


def _per_type(*shape: int) -> nn.ParameterList:
    """One zero parameter for each node type."""
    return nn.ParameterList(nn.Parameter(torch.zeros(shape)) for _ in (CONTEXT, NEIGHBOUR))


def _shifted(values_UW: Tensor, offset: int) -> Tensor:
    """What stands `offset` slots further right in the window; zero, or False, past its ends.

    >>> _shifted(torch.tensor([[1, 2, 3]]), 1), _shifted(torch.tensor([[1, 2, 3]]), -1)
    (tensor([[2, 3, 0]]), tensor([[0, 1, 2]]))
    """
    if offset == 0:
        return values_UW
    out = torch.zeros_like(values_UW)
    if offset > 0:
        out[:, :-offset] = values_UW[:, offset:]
    else:
        out[:, -offset:] = values_UW[:, :offset]
    return out
