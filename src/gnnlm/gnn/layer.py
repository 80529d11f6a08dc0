"""One layer of the graph network: the paper's equations, folded and absorbed.

The equations, for an edge of type e from a node s to a node n, per head:

    score   = K(s) W_ATT[e] Q(n) * mu[e] / scale     softmax over the edges of one type into n
    message = V(s) W_FEA[e]                          V(s) = W_v h_s, K(s) = W_k h_s, Q(n) = W_q h_n
    h_n     = h_n + W_o sum_over_types(sum_over_edges(softmax * message))

How they are computed, without approximation:
- W_ATT, mu and the scale are folded into W_q, W_FEA into W_v: products of weights, made once per pass.
- On inter edges, of which there are far more than nodes, the query is mapped into the space of the sources
  (q' = W_k^T q), raw sources are scored and averaged, and the average is projected once.
- A key bias adds the same to all scores of a softmax and cancels; a value bias is added once.
- No edge leads from context to neighbour, so a window's states depend on its row alone: they are updated once
  per distinct row (`model.py`), or once and for all (a cache). The last layer needs no neighbour update.
- A slot with a single incoming edge takes its message with weight one: no query, no key.

With `copying`, the sum of messages is multiplied per head by a gate that starts at zero, inter messages by a sigmoid of
the nearest neighbour's similarity, and the matrices start so that an open gate adds the neighbours' token embeddings.

Shapes: B blocks, T tokens, M carried tokens, N = B T, K neighbours, U rows, W window slots, S = K x the slots that
inter edges lead from, R lines of a table, H heads, D width, d = D / H, E width of token embeddings, C = D, or D + E
with token features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnnlm.gnn.attend import CodedTable, attend, attend_projected, gathered, masked_softmax
from gnnlm.gnn.gnn_options import GnnOptions
from gnnlm.graph.batch import Graph
from gnnlm.matmul import product

CONTEXT, NEIGHBOUR = 0, 1  # node types
INTRA, INTER = 0, 1  # edge types

OTHER_SLOTS = -4.0  # a copier's initial attention bias on slots that do not hold the token to copy
NEAR_START = (2.0, 0.3)  # its gate on similarity: nearly open at an exact match, half open 7 units away
GATE_UNIT = 10.0  # a gate moves by the learning rate per step; this factor makes it move fast enough

Weights = tuple[Tensor, Tensor | None]  # a matrix and perhaps a bias
KeysValues = tuple[Tensor, Tensor]  # of context tokens on intra edges, [B, S, D] each


@dataclass(frozen=True)
class FoldedWeights:
    """The matrices that a forward pass multiplies with: products of parameters, made once for a frozen network."""

    intra_query: Weights
    intra_key: Weights
    intra_value: Weights
    inter_query: Weights
    inter_key_HdC: Tensor
    inter_value_HdC: Tensor
    inter_value_bias_Hd: Tensor | None
    output: Weights


@dataclass(frozen=True)
class Sources:
    """What the inter edges of a layer read: tables, the line of each source in them, and which sources are real.

    One table of states and optionally one of token features, both after the layer's norm; or, when
    `projected`, one table with the layer's keys and values side by side.
    """

    tables: tuple[Tensor | CodedTable, ...]
    lines_NS: tuple[Tensor, ...]
    mask_NS: Tensor
    projected: bool = False


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
        if options.copying:
            self.gate_H = nn.Parameter(torch.zeros(heads))
            self.near_H, self.near_slope_H = (nn.Parameter(torch.full((heads,), start)) for start in NEAR_START)
        self.dropout, self.neighbour_dropout = nn.Dropout(options.dropout), nn.Dropout(options.neighbour_dropout)
        self.attention_dropout = nn.Dropout(options.attention_dropout)
        self._frozen: FoldedWeights | None = None
        self._reset()

    def _reset(self) -> None:
        options = self.options
        if options.zero_start:
            for matrix in (*self.query, *self.key, *self.value, *self.output):
                nn.init.xavier_uniform_(matrix)
            for relation in (self.attention_EHdd, self.feature_EHdd):
                for matrix in relation.flatten(0, 1):
                    nn.init.eye_(matrix)
            nn.init.zeros_(self.output[CONTEXT])
        else:
            self._reset_as_released()
        if options.token_features:
            nn.init.zeros_(self.token_key_DE)
            nn.init.xavier_uniform_(self.token_value_DE)
        if (
            options.copying
        ):  # once its gate opens, a layer adds the embeddings of its neighbours' tokens and nothing else
            nn.init.eye_(self.token_value_DE)
            nn.init.eye_(self.output[CONTEXT])
            for matrix in self.value:
                nn.init.zeros_(matrix)
            nn.init.ones_(self.similarity_H)
            nn.init.constant_(self.slot_bias_HW, OTHER_SLOTS)
            nn.init.zeros_(self.slot_bias_HW[:, options.left])
        if not self.updates_neighbours:  # the equations list these, but no output depends on them: kept, not trained
            unused = [self.query[NEIGHBOUR], self.output[NEIGHBOUR]]
            if options.bias:
                unused += [self.query_bias[NEIGHBOUR], self.key_bias[NEIGHBOUR], self.output_bias[NEIGHBOUR]]
            if options.norm == "post":
                unused += self.norms[NEIGHBOUR].parameters()
            for parameter in unused:
                parameter.requires_grad_(False)

    def _reset_as_released(self) -> None:
        """The public code's start: linear layers as PyTorch makes them, relations very small.

        It takes the fans of xavier from the whole tensor of relations, not from one matrix of it.
        """
        bound = 1 / math.sqrt(self.options.width)
        biases = (self.query_bias, self.key_bias, self.value_bias, self.output_bias) if self.options.bias else ()
        for kind in (self.query, self.key, self.value, self.output, *biases):
            for parameter in kind:
                nn.init.uniform_(parameter, -bound, bound)
        for relation in (self.attention_EHdd, self.feature_EHdd):
            nn.init.xavier_uniform_(relation)

    def forward(
        self, context_BTD: Tensor, past: KeysValues, band_BTS: Tensor, sources: Sources, graph: Graph
    ) -> tuple[Tensor, KeysValues]:
        """New context states, and the keys and values of the earlier tokens (`past`) and of these."""
        folded = self.folded()
        x_BTD = self.pre_norm(context_BTD)
        key_BSD = torch.cat([past[0], _linear(x_BTD, folded.intra_key)], dim=1)
        value_BSD = torch.cat([past[1], _linear(x_BTD, folded.intra_value)], dim=1)
        inter_BTD = self._inter(x_BTD, sources, graph, folded)
        if self.options.copying:
            inter_BTD = (self._split(inter_BTD) * self._nearness(graph)[..., None]).flatten(-2)
        sum_BTD = self._intra_context(_linear(x_BTD, folded.intra_query), key_BSD, value_BSD, band_BTS) + inter_BTD
        if self.options.copying:
            sum_BTD = (self._split(sum_BTD) * (GATE_UNIT * self.gate_H)[:, None]).flatten(-2)
        if self.options.combine == "mean":
            sum_BTD = sum_BTD / 2
        added_BTD = self.dropout(_linear(sum_BTD, folded.output))
        return self._post_norm(context_BTD + added_BTD, CONTEXT), (key_BSD, value_BSD)

    # -- folded weights ------------------------------------------------------------------------------------

    def folded(self) -> FoldedWeights:
        return self._frozen or self._fold()

    def freeze(self) -> None:
        """Keep the folded weights until the layer is trained or moved."""
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
        bias_Hd = None
        if self.options.bias:
            bias_Hd = (self._split(self.value_bias[NEIGHBOUR])[:, None] @ feature_Hdd)[:, 0]
        return FoldedWeights(
            self._query_weights(CONTEXT, INTRA, CONTEXT),
            self._weights("key", CONTEXT),
            self._value_weights(CONTEXT, INTRA),
            self._query_weights(NEIGHBOUR, INTER, CONTEXT),
            key_HdC,
            feature_Hdd.mT @ value_HdC,
            bias_Hd,
            self._weights("output", CONTEXT),
        )

    def pre_norm(self, states: Tensor) -> Tensor:
        """A norm without weights: every use is followed by a matrix that can absorb them."""
        return F.layer_norm(states, states.shape[-1:]) if self.options.norm == "pre" else states

    @property
    def _attention_dropout(self) -> float:
        return self.options.attention_dropout if self.training else 0.0

    def _intra_context(self, query_BTD: Tensor, key_BSD: Tensor, value_BSD: Tensor, band_BTS: Tensor) -> Tensor:
        query_BHTd, key_BHSd, value_BHSd = (self._split(x).transpose(1, 2) for x in (query_BTD, key_BSD, value_BSD))
        mean_BHTd = F.scaled_dot_product_attention(
            query_BHTd, key_BHSd, value_BHSd, band_BTS[:, None], self._attention_dropout, scale=1.0
        )
        return mean_BHTd.transpose(1, 2).flatten(-2)

    def _inter(self, x_BTD: Tensor, sources: Sources, graph: Graph, folded: FoldedWeights) -> Tensor:
        query_NHd = self._split(_linear(x_BTD, folded.inter_query).flatten(0, 1))
        bias_NHS = self._edge_bias(graph)
        if sources.projected:
            (table,), (lines_NS,) = sources.tables, sources.lines_NS
            return attend_projected(query_NHd, bias_NHS, sources.mask_NS, table, lines_NS).view_as(x_BTD)
        query_NHC = torch.einsum("nhd,hdc->nhc", query_NHd, folded.inter_key_HdC)
        dropout = self._attention_dropout
        mean_NHC = attend(query_NHC, bias_NHS, sources.mask_NS, sources.tables, sources.lines_NS, dropout)
        sum_NHd = torch.einsum("nhc,hdc->nhd", mean_NHC, folded.inter_value_HdC)
        if folded.inter_value_bias_Hd is not None:  # dropout leaves it whole: its weights sum to one on average
            sum_NHd = sum_NHd + sources.mask_NS.any(-1)[:, None, None] * folded.inter_value_bias_Hd
        return sum_NHd.reshape(x_BTD.shape)

    def attention(self, context_BTD: Tensor, sources: Sources, graph: Graph) -> Tensor:
        """The attention of each token over its inter edges, [B, T, H, S]; rows of zeros where there are none."""
        folded = self.folded()
        query_NHd = self._split(_linear(self.pre_norm(context_BTD), folded.inter_query).flatten(0, 1))
        if sources.projected:
            (table,), (lines_NS,) = sources.tables, sources.lines_NS
            found_NSC = gathered(table, lines_NS)
            keys_NSHd = found_NSC[..., : self.options.width].unflatten(-1, query_NHd.shape[1:])
            scores_NHS = torch.einsum("nhd,nshd->nhs", query_NHd, keys_NSHd)
        else:
            query_NHC = torch.einsum("nhd,hdc->nhc", query_NHd, folded.inter_key_HdC)
            found = [gathered(table, lines) for table, lines in zip(sources.tables, sources.lines_NS, strict=True)]
            scores_NHS = torch.einsum("nhc,nsc->nhs", query_NHC, torch.cat(found, dim=-1))
        weights_NHS = masked_softmax(scores_NHS + self._edge_bias(graph), sources.mask_NS[:, None])
        return weights_NHS.view(*context_BTD.shape[:2], *weights_NHS.shape[1:])

    def context_attention(self, context_BTD: Tensor, past: KeysValues, band_BTS: Tensor) -> Tensor:
        """The attention of each token over its intra edges, [B, T, H, S]."""
        folded, x_BTD = self.folded(), self.pre_norm(context_BTD)
        key_BSD = torch.cat([past[0], _linear(x_BTD, folded.intra_key)], dim=1)
        query_BTHd, key_BSHd = self._split(_linear(x_BTD, folded.intra_query)), self._split(key_BSD)
        return masked_softmax(torch.einsum("bthd,bshd->bths", query_BTHd, key_BSHd), band_BTS[:, :, None])

    def project(self, x_RD: Tensor, features_RE: Tensor | None) -> Tensor:
        """Keys and values that inter edges read, side by side, of normed sources, [R, 2 D]."""
        key_RD = F.linear(x_RD, self.key[NEIGHBOUR])  # a bias would cancel
        value_RD = _linear(x_RD, self._value_weights(NEIGHBOUR, INTER))
        if features_RE is not None:
            feature_Hdd = self.feature_EHdd[INTER].mT
            token_value_DE = (feature_Hdd @ self._split_rows(self.token_value_DE)).flatten(0, 1)
            key_RD = key_RD + F.linear(features_RE, self.token_key_DE)
            value_RD = value_RD + F.linear(features_RE, token_value_DE)
        return torch.cat([key_RD, value_RD], dim=-1)

    def window_weights(self) -> tuple[Weights, Weights, Weights]:
        """Folded query, key and value weights of the edges within windows, for `update_windows`."""
        query = self._query_weights(NEIGHBOUR, INTRA, NEIGHBOUR)
        return query, self._weights("key", NEIGHBOUR), self._value_weights(NEIGHBOUR, INTRA)

    def update_windows(
        self,
        states_RD: Tensor,
        place_UW: Tensor,
        slot_UW: Tensor,
        weights: tuple[Weights, Weights, Weights],
        targets: range,
    ) -> Tensor:
        """New states of the target slots of windows whose slots are lines of a table, [U, targets, D].

        Edges join adjacent slots, both ways, and a slot with itself where there are self-loops.
        """
        slots = range(place_UW.shape[1])
        near = {
            w: [s for s in (w - 1, w, w + 1) if s in slots and (s != w or self.options.self_loops)] for w in targets
        }
        asking = [w for w in targets if len(near[w]) > 1]
        asked = sorted({s for w in asking for s in near[w]})
        heard = sorted({s for w in targets for s in near[w]} | {targets[0]})
        x_RD = self.pre_norm(states_RD)
        query, key, value = (
            dict(zip(some, self._split(_linear_at(x_RD, place_UW[:, some], own)).unbind(1), strict=True))
            for some, own in zip((asking, asked, heard), weights, strict=True)
        )
        # slots with a single edge from the same neighbour get the same message
        alike = [w if w in asking else next(v for v in targets if near[v] == near[w]) for w in targets]
        messages = {}
        for w in sorted(set(alike)):
            if w in asking:
                scores_UHn = torch.stack([(query[w] * key[s]).sum(-1) for s in near[w]], dim=-1)
                weights_UHn = self.attention_dropout(masked_softmax(scores_UHn, slot_UW[:, None, near[w]]))
                parts = [weights_UHn[..., n, None] * value[s] for n, s in enumerate(near[w])]
            else:
                parts = [self._sole(value[s], slot_UW[:, s]) for s in near[w]] or [torch.zeros_like(value[targets[0]])]
            messages[w] = sum(parts[1:], start=parts[0])
        sums_UmD = _linear(torch.stack(list(messages.values()), dim=1).flatten(-2), self._weights("output", NEIGHBOUR))
        added_UtD = self.neighbour_dropout(sums_UmD[:, [list(messages).index(w) for w in alike]])
        return self._post_norm(states_RD[place_UW[:, list(targets)]] + added_UtD, NEIGHBOUR)

    def _sole(self, value_UHd: Tensor, real_U: Tensor) -> Tensor:
        """The message of a slot's only edge: its weight is one, or zero where there is no such node."""
        weight_UH1: Tensor = real_U[:, None, None].to(value_UHd).expand(*value_UHd.shape[:2], 1)
        return value_UHd * F.dropout(weight_UH1, self._attention_dropout)

    def _edge_bias(self, graph: Graph) -> Tensor:
        """What the preset `default` adds to inter scores, [N, H, S]: a bias per slot and a weight on similarity."""
        options, slots = self.options, self.options.inter_slots
        similarity_NK = graph.similarity_BTK.flatten(0, 1)
        if not options.edge_bias:
            sources = similarity_NK.shape[1] * (slots.stop - slots.start)
            return similarity_NK.new_zeros(()).expand(len(similarity_NK), options.heads, sources)
        similarity_NHK = similarity_NK[:, None] / options.similarity_unit * self.similarity_H[:, None]
        return (similarity_NHK[..., None] + self.slot_bias_HW[:, None, slots]).flatten(2)

    def _nearness(self, graph: Graph) -> Tensor:
        """Each head's gate on inter messages, [B, T, H]: a sigmoid of the nearest neighbour's similarity."""
        off_BT = (graph.nearest_BT - self.options.similarity_best) / self.options.similarity_unit
        off_BT = off_BT.masked_fill(torch.isneginf(off_BT), 0.0)  # there are no messages to gate
        return torch.sigmoid(self.near_H + self.near_slope_H * off_BT[..., None])

    def _query_weights(self, source: int, edge: int, target: int) -> Weights:
        """W_q with W_ATT, mu and the scale folded in: score = key . query."""
        options = self.options
        scale = math.sqrt(options.width if options.scale == "width" else options.head_width)
        mu = self.mu[source, edge, target] if options.mu == "type" else self.mu[edge][:, None, None]
        return self._weights("query", target, self.attention_EHdd[edge] * (mu / scale))

    def _value_weights(self, kind: int, edge: int) -> Weights:
        """W_v with W_FEA folded in."""
        return self._weights("value", kind, self.feature_EHdd[edge].mT)

    def _weights(self, name: str, kind: int, relation_Hdd: Tensor | None = None) -> Weights:
        """A projection of a node type, with a relation of its heads folded in."""
        matrix_DD: Tensor = getattr(self, name)[kind]
        bias_D: Tensor | None = getattr(self, f"{name}_bias")[kind] if self.options.bias else None
        if relation_Hdd is None:
            return matrix_DD, bias_D
        folded_DD = (relation_Hdd @ self._split_rows(matrix_DD)).flatten(0, 1)
        return folded_DD, None if bias_D is None else (relation_Hdd @ self._split(bias_D)[..., None]).flatten()

    def _post_norm(self, states: Tensor, kind: int) -> Tensor:
        normed: Tensor = self.norms[kind](states) if self.options.norm == "post" else states
        return normed

    def _split(self, states: Tensor) -> Tensor:
        return states.view(*states.shape[:-1], self.options.heads, self.options.head_width)

    def _split_rows(self, matrix: Tensor) -> Tensor:
        return matrix.view(self.options.heads, self.options.head_width, -1)


def _per_type(*shape: int) -> nn.ParameterList:
    """One zero parameter for each node type."""
    return nn.ParameterList(nn.Parameter(torch.zeros(shape)) for _ in (CONTEXT, NEIGHBOUR))


def _linear(x: Tensor, weights: Weights) -> Tensor:
    return product(x, *weights)


def _linear_at(x_RD: Tensor, lines_US: Tensor, weights: Weights) -> Tensor:
    """The projection of some lines, [U, S, D], computed once per line or once per use, whichever is less work."""
    if lines_US.numel() < len(x_RD):
        return _linear(x_RD[lines_US], weights)
    return _linear(x_RD, weights)[lines_US]
