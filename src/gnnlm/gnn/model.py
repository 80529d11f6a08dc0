"""The graph network between a frozen language model and its frozen softmax.

A token attends to the last `context` tokens of its document. Blocks of a longer text are scored one after
another with the keys and values that the layers carry, so that the result does not depend on where the blocks are cut.

Neighbour states depend on their row alone. They are computed here, once per distinct row of the batch, a chunk of rows
at a time through all layers; or, for a trained network, they are read from a cache.

Shapes: B blocks, T tokens, M carried tokens, U rows, W window slots, P positions, N = B T, S sources of a token,
D base width, E = D width of token embeddings, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gnnlm.artifact import writing
from gnnlm.errors import ArtifactError
from gnnlm.gnn.gnn_options import GnnOptions
from gnnlm.gnn.layer import CONTEXT, NEIGHBOUR, GnnLayer, KeysValues, Sources
from gnnlm.graph.batch import Graph, band_mask

CHUNK_SLOTS = 2048  # window slots that go through all layers at once: they stay in a CPU's cache


class LayerAttention(NamedTuple):
    """A layer's attention: over the edges from neighbours, and over those from the carried and the new tokens.

    Each is [B, T, H, S], with as many sources S as there are of its kind.
    """

    inter_BTHS: Tensor
    intra_BTHS: Tensor


@dataclass(frozen=True)
class Carry:
    """What one block passes on to the next: each layer's keys and values, and their positions.

    A carry is immutable: reading on from it, cropping, selecting and joining leave it unchanged.
    """

    layers: tuple[KeysValues, ...]
    position_BM: Tensor
    document_BM: Tensor

    def select(self, rows: Tensor) -> Carry:
        """Some texts of the batch, in this order; a text may be taken more than once."""
        return self._each(lambda tensor: tensor[rows])

    def join(self, others: Sequence[Carry]) -> Carry:
        """The texts of all, one after the other; shorter ones get padding in front."""
        carries = [self, *others]
        slots = max(carry.document_BM.shape[1] for carry in carries)

        def joined(tensors: Sequence[Tensor], value: int = 0) -> Tensor:
            padding = [(0, 0) * (tensor.dim() - 2) + (slots - tensor.shape[1], 0) for tensor in tensors]
            return torch.cat([F.pad(tensor, pad, value=value) for tensor, pad in zip(tensors, padding, strict=True)])

        layers = tuple(
            (joined([key for key, _ in same]), joined([value for _, value in same]))
            for same in zip(*(carry.layers for carry in carries), strict=True)
        )
        positions = joined([carry.position_BM for carry in carries])
        return Carry(layers, positions, joined([carry.document_BM for carry in carries], -1))

    def dropping(self, drop_B: Tensor) -> Carry:
        """A carry without the last tokens of each text: they become padding, which no token attends to."""
        slots = self.document_BM.shape[1]
        most = int(drop_B.min()) if len(drop_B) else 0  # tokens dropped from every text are cut off
        carry = self._each(lambda tensor: tensor[:, : slots - most]) if most else self
        rest_B1 = (drop_B - most)[:, None].to(carry.document_BM.device)
        # padding is never last here, so the last slots of a text are its last tokens
        gone_BM = torch.arange(slots - most, device=rest_B1.device) >= slots - most - rest_B1
        return replace(carry, document_BM=carry.document_BM.masked_fill(gone_BM, -1))._compact()

    def kept(self, tokens: int) -> Carry:
        """The last `tokens` slots, padding moved to the front."""
        carry = self._compact()
        drop = max(0, carry.document_BM.shape[1] - tokens)
        return carry._each(lambda tensor: tensor[:, drop:]) if drop else carry

    def _compact(self) -> Carry:
        """Move padding in front of each text's tokens, and drop columns that are padding in every text."""
        pad_BM = self.document_BM < 0
        if not bool(pad_BM.any()):
            return self
        order_BM = pad_BM.int().argsort(dim=1, descending=True, stable=True)
        lines_B1 = torch.arange(len(order_BM), device=order_BM.device)[:, None]
        first = int(pad_BM.sum(1).min())
        return self._each(lambda tensor: tensor[lines_B1, order_BM][:, first:])

    def _each(self, change: Callable[[Tensor], Tensor]) -> Carry:
        layers = tuple((change(key), change(value)) for key, value in self.layers)
        return Carry(layers, change(self.position_BM), change(self.document_BM))


class SourceCache(Protocol):
    """Neighbour states of a trained network, by row and layer."""

    def sources(self, graph: Graph) -> Iterator[Sources]:
        """What the inter edges of each layer read."""
        ...


class TokenEmbeddings(Protocol):
    """The part of the frozen softmax that the network uses."""

    @property
    def width(self) -> int: ...

    @property
    def embeddings_VD(self) -> Tensor: ...


class GnnModel(nn.Module):
    """Turns context and neighbour states into context states for the frozen softmax."""

    features_VE: Tensor

    def __init__(self, options: GnnOptions, head: TokenEmbeddings) -> None:
        super().__init__()
        self.options = options
        self.checkpoint = False  # recompute window states in the backward pass instead of keeping them
        if options.token_features:
            self.register_buffer("features_VE", token_features(head.embeddings_VD), persistent=False)
        self.layers = nn.ModuleList(
            GnnLayer(options, last=number == options.layers - 1) for number in range(options.layers)
        )
        if options.width != options.base_width:
            # one for all nodes, which are states of the same model, unless there is one for each type
            self.narrow = nn.Linear(options.base_width, options.width)
            if options.typed_input:
                self.narrow_neighbour = nn.Linear(options.base_width, options.width)
            self.widen = nn.Linear(options.width, options.base_width)
            if options.zero_start:
                nn.init.zeros_(self.widen.weight)
                nn.init.zeros_(self.widen.bias)

    def forward(
        self,
        graph: Graph,
        carry: Carry | None = None,
        cache: SourceCache | None = None,
        rollback: int = 0,
        watch: list[LayerAttention] | None = None,
    ) -> tuple[Tensor, Carry]:
        """Updated states [B, T, D], and what the next block of the same texts needs.

        The last `rollback` tokens can later be dropped from the carry. Each layer's attention is added to `watch`.
        """
        options = self.options
        batch, tokens = graph.document_BT.shape
        context_BTD = self.enter(graph.context_BTD)
        if carry is None:
            nothing = context_BTD.new_zeros(batch, 0, options.width)
            none_BM = graph.document_BT[:, :0]
            carry = Carry(((nothing, nothing),) * options.layers, none_BM, none_BM)
        position_BS = torch.cat([carry.position_BM, graph.position_BT], dim=1)
        document_BS = torch.cat([carry.document_BM, graph.document_BT], dim=1)
        band_BTS = band_mask(position_BS, document_BS, tokens, options.context)
        layers = []
        per_layer = cache.sources(graph) if cache else self.sources(graph)
        for number, (past, sources) in enumerate(zip(carry.layers, per_layer, strict=True)):
            layer = self.layer(number)
            if watch is not None:
                inter_BTHS = layer.attention(context_BTD, sources, graph)
                watch.append(LayerAttention(inter_BTHS, layer.context_attention(context_BTD, past, band_BTS)))
            context_BTD, (key_BSD, value_BSD) = layer(context_BTD, past, band_BTS, sources, graph)
            layers.append((key_BSD.detach(), value_BSD.detach()))
        after = Carry(tuple(layers), position_BS, document_BS).kept(options.context - 1 + rollback)
        return self._leave(graph.context_BTD, context_BTD), after

    def freeze(self) -> GnnModel:
        """Prepare for prediction only: no dropout, and weights folded once."""
        self.eval()
        for number in range(self.options.layers):
            self.layer(number).freeze()
        return self

    def train(self, mode: bool = True) -> GnnModel:
        self._thaw()
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> GnnModel:
        self._thaw()  # moved or converted: the folded weights would be out of date
        super()._apply(fn, recurse)
        return self

    def _thaw(self) -> None:
        for number in range(len(self.layers)):
            self.layer(number).thaw()

    # -- neighbour states ----------------------------------------------------------------------------------

    def sources(self, graph: Graph) -> Iterator[Sources]:
        """What the inter edges of each layer read, computed from the windows' states."""
        windows, slots = graph.windows, self.options.inter_slots
        states_PD = self.enter(windows.states_PD, NEIGHBOUR)
        static_PD = self.layer(0).pre_norm(states_PD)
        static_NS = edge_lines(graph, windows.place_UW[:, slots])
        mask_NS = edge_mask(graph, slots)
        extra_tables: tuple[Tensor, ...] = ()
        extra_lines: tuple[Tensor, ...] = ()
        if self.options.token_features:
            extra_tables, extra_lines = (self.features_VE,), (self.features(windows.tokens_P)[static_NS],)
        updated = self.window_states(states_PD, windows.place_UW, windows.slot_UW)
        for number in range(self.options.layers):
            if number == 0 or not self.options.neighbour_updates:
                table, lines_NS = static_PD, static_NS
            else:
                window_USD = next(updated)
                table = self.layer(number).pre_norm(window_USD).flatten(0, 1)
                lines_NS = edge_lines(graph, torch.arange(len(table), device=table.device).view(window_USD.shape[:2]))
            yield Sources((table, *extra_tables), (lines_NS, *extra_lines), mask_NS)

    def window_states(self, states_PD: Tensor, place_UW: Tensor, slot_UW: Tensor) -> Iterator[Tensor]:
        """Window states after each layer that updates them, of the slots that inter edges lead from, [U, slots, D]."""
        layers = [layer for layer in map(self.layer, range(self.options.layers)) if layer.updates_neighbours]
        if not layers:
            return iter(())
        weights = [layer.window_weights() for layer in layers]
        read = range(self.options.window)[self.options.inter_slots]

        def through(place_uW: Tensor, slot_uW: Tensor) -> tuple[Tensor, ...]:
            lines_p, place_uW = torch.unique(place_uW, return_inverse=True)
            states, out = states_PD[lines_p], []
            for layer, own in zip(layers, weights, strict=True):
                if layer is layers[-1]:  # no later layer reads the others
                    out.append(layer.update_windows(states, place_uW, slot_uW, own, read))
                else:
                    window_uWD = layer.update_windows(states, place_uW, slot_uW, own, range(slot_uW.shape[1]))
                    out.append(window_uWD[:, self.options.inter_slots])
                    states = window_uWD.flatten(0, 1)
                    place_uW = torch.arange(len(states), device=states.device).view_as(slot_uW)
            return tuple(out)

        chunk = max(1, CHUNK_SLOTS // place_UW.shape[1])
        parts = []
        for place_uW, slot_uW in zip(place_UW.split(chunk), slot_UW.split(chunk), strict=True):
            if self.checkpoint and torch.is_grad_enabled():
                parts.append(checkpoint(through, place_uW, slot_uW, use_reentrant=False))
            else:
                parts.append(through(place_uW, slot_uW))
        return (torch.cat(layer_parts) for layer_parts in zip(*parts, strict=True))

    def features(self, tokens: Tensor) -> Tensor:
        """The lines of tokens in the table of token features."""
        return torch.where(tokens < 0, len(self.features_VE) - 1, tokens)

    def layer(self, number: int) -> GnnLayer:
        layer = self.layers[number]
        assert isinstance(layer, GnnLayer)
        return layer

    # -- in, out, on disk ----------------------------------------------------------------------------------

    def enter(self, states: Tensor, kind: int = CONTEXT) -> Tensor:
        """The base model's states as nodes of a type, input of the first layer."""
        if self.options.width == self.options.base_width:
            return states
        narrow = self.narrow_neighbour if self.options.typed_input and kind == NEIGHBOUR else self.narrow
        narrowed: Tensor = F.gelu(narrow(states))
        return narrowed

    def _leave(self, base_BTD: Tensor, context_BTD: Tensor) -> Tensor:
        if self.options.width == self.options.base_width:
            return context_BTD
        widened: Tensor = self.widen(context_BTD)
        return base_BTD + widened if self.options.zero_start else widened

    def save(self, path: Path) -> None:
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        with writing(path):
            save_file(tensors, path, metadata={"options": json.dumps(self.options.as_dict())})

    @classmethod
    def load(cls, path: Path, head: TokenEmbeddings) -> GnnModel:
        with safe_open(path, framework="pt") as file:
            options = GnnOptions(**json.loads(file.metadata()["options"]))
        if options.base_width != head.width:
            raise ArtifactError(
                f"{path} was trained on states of width {options.base_width}, the store has {head.width}"
            )
        model = cls(options, head)
        model.load_state_dict(load_file(path))
        return model


def token_features(embeddings_VD: Tensor) -> Tensor:
    """Frozen embeddings at unit scale, and a last line of zeros for the position past a document's end."""
    scaled_VD = F.layer_norm(embeddings_VD, embeddings_VD.shape[-1:])
    return torch.cat([scaled_VD, torch.zeros_like(scaled_VD[:1])])


def edge_lines(graph: Graph, lines_US: Tensor) -> Tensor:
    """The line of every inter edge's source, [N, S], from the lines of the slots they lead from."""
    return lines_US[graph.rows_BTK.flatten(0, 1)].flatten(1)


def edge_mask(graph: Graph, slots: slice) -> Tensor:
    """Which inter edges are real, [N, S]."""
    mask_BTKS = graph.edge_BTK[..., None] & graph.windows.slot_UW[:, slots][graph.rows_BTK]
    return mask_BTKS.flatten(0, 1).flatten(1)
