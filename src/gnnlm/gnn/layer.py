"""One layer of the graph network: the paper's equations, computed exactly but with less work.

An edge of type e leads from a source node s to a target node n. For each head, with Q(n) = W_q h_n, K(s) = W_k h_s and
V(s) = W_v h_s (the matrices belong to the type of the node):

    score(s, n) = K(s) W_ATT[e] Q(n) * mu / scale
    message(s)  = V(s) W_FEA[e]
    h_n        <- h_n + W_o sum over types e ( sum over s ( softmax over s (score(s, n)) * message(s) ) )

Example: width 1, one head, every matrix, mu and scale 1. Token n has h_n = 1 and no earlier token; its sources on inter
edges have the states 0 and log 3.
    intra: the token itself is the only source, so the sum of messages is 1
    inter: scores 0 and log 3, softmax 1/4 and 3/4, the sum of messages is 3/4 log 3 = 0.824
    h_n <- 1 + (1 + 0.824) = 2.824

What is rearranged:
- W_ATT, mu and the scale are multiplied into W_q, and W_FEA into W_v, once per pass (`FoldedWeights`).
- There are far more inter edges than nodes. So the query is mapped into the space of the sources (q' = W_k^T q), raw
  source states are scored and averaged (`attend.py`), and only the average is projected.
- A key bias adds the same number to all scores of a softmax, so it cancels. A value bias is added once.
- No edge leads from a context node to a neighbour node, so the states of a window depend on its row alone. They are
  updated once per distinct row (`model.py`), or read from a cache. The last layer needs no update of neighbours.
- A node with a single incoming edge takes its message with weight one: it needs no query and no key.

What the preset `default` adds: scores of inter edges get a bias per slot and a weight on similarity (`_edge_bias`);
sources are also described by the embedding of their token; and with `copying` the messages are gated (`forward`), with
initial values for which an open gate adds the embeddings of the neighbours' tokens.

Shapes: B blocks, T tokens, M carried tokens, N = B T, K neighbours, U rows, W window slots, S sources of a token (K x
the slots that inter edges lead from), R lines of a table, H heads, D width, d = D / H, E width of token embeddings,
C width of a source: D, or D + E with token features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnlm.gnn.attend import GatherTable, attend, attend_projected, gathered, masked_softmax
from gnnlm.gnn.layer_weights import CONTEXT, INTER, NEIGHBOUR, FoldedWeights, LayerWeights, Weights
from gnnlm.graph.batch import Graph
from gnnlm.matmul import product

GATE_UNIT = 10.0  # multiplies `gate_H`: with it, steps of the size of the learning rate move the gate fast enough

KeysValues = tuple[Tensor, Tensor]  # of context tokens on intra edges, [B, S, D] each


@dataclass(frozen=True)
class Sources:
    """What the inter edges of a layer read: tables, the line of each source in them, and which sources are real.

    There is one table of states and, with token features, one of token embeddings, both after the layer's norm. If
    `projected`, there is one table with the layer's keys and values side by side.
    """

    tables: tuple[Tensor | GatherTable, ...]
    lines_NS: tuple[Tensor, ...]
    mask_NS: Tensor
    projected: bool = False


class GnnLayer(LayerWeights):
    """Updates context states, and neighbour states if a later layer needs them."""

    # -- context nodes -------------------------------------------------------------------------------------

    def forward(
        self, context_BTD: Tensor, past: KeysValues, band_BTS: Tensor, sources: Sources, graph: Graph
    ) -> tuple[Tensor, KeysValues]:
        """Return new context states, and the keys and values of the earlier tokens (`past`) and of these tokens."""
        folded = self.folded()
        x_BTD = self.pre_norm(context_BTD)
        key_BSD = torch.cat([past[0], product(x_BTD, *folded.intra_key)], dim=1)
        value_BSD = torch.cat([past[1], product(x_BTD, *folded.intra_value)], dim=1)
        inter_BTD = self._inter(x_BTD, sources, graph, folded)
        if self.options.copying:
            inter_BTD = self._scale_heads(inter_BTD, self._nearness(graph))
        sum_BTD = self._intra(product(x_BTD, *folded.intra_query), key_BSD, value_BSD, band_BTS) + inter_BTD
        if self.options.copying:
            sum_BTD = self._scale_heads(sum_BTD, GATE_UNIT * self.gate_H)
        if self.options.combine == "mean":
            sum_BTD = sum_BTD / 2
        added_BTD = self.dropout(product(sum_BTD, *folded.output))
        return self._post_norm(context_BTD + added_BTD, CONTEXT), (key_BSD, value_BSD)

    def _intra(self, query_BTD: Tensor, key_BSD: Tensor, value_BSD: Tensor, band_BTS: Tensor) -> Tensor:
        query_BHTd, key_BHSd, value_BHSd = (self._split(x).transpose(1, 2) for x in (query_BTD, key_BSD, value_BSD))
        mean_BHTd = F.scaled_dot_product_attention(
            query_BHTd, key_BHSd, value_BHSd, band_BTS[:, None], self._attention_dropout, scale=1.0
        )
        return mean_BHTd.transpose(1, 2).flatten(-2)

    def _inter(self, x_BTD: Tensor, sources: Sources, graph: Graph, folded: FoldedWeights) -> Tensor:
        query_NHd = self._split(product(x_BTD, *folded.inter_query).flatten(0, 1))
        bias_NHS = self._edge_bias(graph)
        if sources.projected:
            (table,), (lines_NS,) = sources.tables, sources.lines_NS
            return attend_projected(query_NHd, bias_NHS, sources.mask_NS, table, lines_NS).view_as(x_BTD)
        query_NHC = torch.einsum("nhd,hdc->nhc", query_NHd, folded.inter_key_HdC)
        dropout = self._attention_dropout
        mean_NHC = attend(query_NHC, bias_NHS, sources.mask_NS, sources.tables, sources.lines_NS, dropout)
        sum_NHd = torch.einsum("nhc,hdc->nhd", mean_NHC, folded.inter_value_HdC)
        if folded.inter_value_bias_Hd is not None:  # dropout leaves it whole: the weights sum to one on average
            sum_NHd = sum_NHd + sources.mask_NS.any(-1)[:, None, None] * folded.inter_value_bias_Hd
        return sum_NHd.reshape(x_BTD.shape)

    def _edge_bias(self, graph: Graph) -> Tensor:
        """Return what is added to the scores of inter edges, [N, H, S]: a bias per slot and a weight on similarity."""
        options, slots = self.options, self.options.inter_slots
        similarity_NK = graph.similarity_BTK.flatten(0, 1)
        if not options.edge_bias:
            sources = similarity_NK.shape[1] * (slots.stop - slots.start)
            return similarity_NK.new_zeros(()).expand(len(similarity_NK), options.heads, sources)
        similarity_NHK = similarity_NK[:, None] / options.similarity_unit * self.similarity_H[:, None]
        return (similarity_NHK[..., None] + self.slot_bias_HW[:, None, slots]).flatten(2)

    def _nearness(self, graph: Graph) -> Tensor:
        """Return each head's gate on inter messages, [B, T, H]: a sigmoid of the nearest neighbour's similarity."""
        off_BT = (graph.nearest_BT - self.options.similarity_best) / self.options.similarity_unit
        off_BT = off_BT.masked_fill(torch.isneginf(off_BT), 0.0)  # no neighbour, and so no message to gate
        return torch.sigmoid(self.near_H + self.near_slope_H * off_BT[..., None])

    # -- the attention itself, for people to read ----------------------------------------------------------

    def inter_attention(self, context_BTD: Tensor, sources: Sources, graph: Graph) -> Tensor:
        """Return each token's attention over its inter edges, [B, T, H, S]; zeros for a token without any."""
        folded = self.folded()
        query_NHd = self._split(product(self.pre_norm(context_BTD), *folded.inter_query).flatten(0, 1))
        found = [gathered(table, lines) for table, lines in zip(sources.tables, sources.lines_NS, strict=True)]
        if sources.projected:
            keys_NSHd = found[0][..., : self.options.width].unflatten(-1, query_NHd.shape[1:])
            scores_NHS = torch.einsum("nhd,nshd->nhs", query_NHd, keys_NSHd)
        else:
            query_NHC = torch.einsum("nhd,hdc->nhc", query_NHd, folded.inter_key_HdC)
            scores_NHS = torch.einsum("nhc,nsc->nhs", query_NHC, torch.cat(found, dim=-1))
        weights_NHS = masked_softmax(scores_NHS + self._edge_bias(graph), sources.mask_NS[:, None])
        return weights_NHS.view(*context_BTD.shape[:2], *weights_NHS.shape[1:])

    def intra_attention(self, context_BTD: Tensor, past: KeysValues, band_BTS: Tensor) -> Tensor:
        """Return each token's attention over its intra edges, [B, T, H, S]."""
        folded, x_BTD = self.folded(), self.pre_norm(context_BTD)
        key_BSD = torch.cat([past[0], product(x_BTD, *folded.intra_key)], dim=1)
        query_BTHd, key_BSHd = self._split(product(x_BTD, *folded.intra_query)), self._split(key_BSD)
        return masked_softmax(torch.einsum("bthd,bshd->bths", query_BTHd, key_BSHd), band_BTS[:, :, None])

    # -- neighbour nodes -----------------------------------------------------------------------------------

    def project(self, x_RD: Tensor, features_RE: Tensor | None) -> Tensor:
        """Return the keys and values that inter edges read, side by side, of states after the norm, [R, 2 D]."""
        key_RD = F.linear(x_RD, self.key[NEIGHBOUR])  # a key bias would cancel
        value_RD = product(x_RD, *self._value_weights(NEIGHBOUR, INTER))
        if features_RE is not None:
            feature_Hdd = self.feature_EHdd[INTER].mT
            token_value_DE = (feature_Hdd @ self._split_rows(self.token_value_DE)).flatten(0, 1)
            key_RD = key_RD + F.linear(features_RE, self.token_key_DE)
            value_RD = value_RD + F.linear(features_RE, token_value_DE)
        return torch.cat([key_RD, value_RD], dim=-1)

    def update_windows(
        self,
        states_RD: Tensor,
        place_UW: Tensor,
        slot_UW: Tensor,
        weights: tuple[Weights, Weights, Weights],
        targets: range,
    ) -> Tensor:
        """Return new states of the target slots of windows, [U, targets, D].

        `place_UW` holds the line of each slot in `states_RD`, and `slot_UW` which slots are real. Edges join adjacent
        slots, both ways, and each slot with itself if there are self-loops.
        """
        slots = range(place_UW.shape[1])
        sources = {
            w: [s for s in (w - 1, w, w + 1) if s in slots and (s != w or self.options.self_loops)] for w in targets
        }
        scored = [w for w in targets if len(sources[w]) > 1]  # a single source has weight one: no query, no key
        key_slots = sorted({s for w in scored for s in sources[w]})
        value_slots = sorted({s for w in targets for s in sources[w]} | {targets[0]})
        x_RD = self.pre_norm(states_RD)
        query, key, value = (
            dict(zip(some, self._split(_product_at(x_RD, place_UW[:, some], own)).unbind(1), strict=True))
            for some, own in zip((scored, key_slots, value_slots), weights, strict=True)
        )
        # targets with the same single source get the same message: the first of them stands for all
        first = {w: w if w in scored else next(v for v in targets if sources[v] == sources[w]) for w in targets}
        messages = {}
        for w in sorted(set(first.values())):
            if w in scored:
                scores_UHn = torch.stack([(query[w] * key[s]).sum(-1) for s in sources[w]], dim=-1)
                weights_UHn = self.attention_dropout(masked_softmax(scores_UHn, slot_UW[:, None, sources[w]]))
                parts = [weights_UHn[..., n, None] * value[s] for n, s in enumerate(sources[w])]
                messages[w] = sum(parts[1:], start=parts[0])
            elif sources[w]:
                messages[w] = self._only_message(value[sources[w][0]], slot_UW[:, sources[w][0]])
            else:
                messages[w] = torch.zeros_like(value[targets[0]])
        sums_UmD = product(torch.stack(list(messages.values()), dim=1).flatten(-2), *self._weights("output", NEIGHBOUR))
        added_UtD = self.neighbour_dropout(sums_UmD[:, [list(messages).index(first[w]) for w in targets]])
        return self._post_norm(states_RD[place_UW[:, list(targets)]] + added_UtD, NEIGHBOUR)

    def _only_message(self, value_UHd: Tensor, real_U: Tensor) -> Tensor:
        """Return the message of a slot's only edge; zeros if its source is not real."""
        weight_UH1: Tensor = real_U[:, None, None].to(value_UHd).expand(*value_UHd.shape[:2], 1)
        return value_UHd * F.dropout(weight_UH1, self._attention_dropout)

    # -- norms and heads -----------------------------------------------------------------------------------

    def pre_norm(self, states: Tensor) -> Tensor:
        """Apply the norm of `norm: pre`. It has no weights: a matrix follows every use, and can absorb them."""
        return F.layer_norm(states, states.shape[-1:]) if self.options.norm == "pre" else states

    def _post_norm(self, states: Tensor, node_type: int) -> Tensor:
        normed: Tensor = self.norms[node_type](states) if self.options.norm == "post" else states
        return normed

    @property
    def _attention_dropout(self) -> float:
        return self.options.attention_dropout if self.training else 0.0

    def _scale_heads(self, states: Tensor, factors: Tensor) -> Tensor:
        """Multiply each head's part of states [..., D] by its factor [..., H]."""
        return (self._split(states) * factors[..., None]).flatten(-2)


def _product_at(x_RD: Tensor, lines_US: Tensor, weights: Weights) -> Tensor:
    """Return the projection of some lines, [U, S, D], computed per line or per use, whichever is less work."""
    if lines_US.numel() < len(x_RD):
        return product(x_RD[lines_US], *weights)
    return product(x_RD, *weights)[lines_US]
