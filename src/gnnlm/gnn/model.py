"""The graph network between a frozen language model and its frozen softmax.

A token attends to the last `context` tokens of its document. Blocks of a longer text are scored one after another with
the keys and values that the layers carry, so the result does not depend on where the blocks are cut.

Neighbour states depend on their row alone. They are computed here once per distinct row of the batch, a chunk of rows
at a time through all layers, or read from the cache of a trained network.

Shapes: B blocks, T tokens, M carried tokens, U rows, W window slots, P positions, N = B T, S sources of a token,
D base width, E = D width of token embeddings, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
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
from gnnlm.gnn.carry import Carry
from gnnlm.gnn.gnn_options import GnnOptions
from gnnlm.gnn.layer import GnnLayer, Sources
from gnnlm.gnn.layer_weights import CONTEXT, NEIGHBOUR
from gnnlm.graph.batch import Graph, band_mask

CHUNK_SLOTS = 2048  # window slots that go through all layers at once; they fit into a CPU's cache


class LayerAttention(NamedTuple):
    """A layer's attention over neighbours, and over carried and new tokens; S counts the sources of each kind."""

    inter_BTHS: Tensor
    intra_BTHS: Tensor


class SourceCache(Protocol):
    """Neighbour states of a trained network, stored by row and layer."""

    def sources(self, graph: Graph) -> Iterator[Sources]:
        """Yield the sources of the inter edges of each layer."""
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
        """Return updated states [B, T, D], and what the next block of the same texts needs.

        The carry is long enough to drop up to `rollback` tokens from it later. If `watch` is given, each layer's
        attention is appended to it.
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
                inter_BTHS = layer.inter_attention(context_BTD, sources, graph)
                watch.append(LayerAttention(inter_BTHS, layer.intra_attention(context_BTD, past, band_BTS)))
            context_BTD, (key_BSD, value_BSD) = layer(context_BTD, past, band_BTS, sources, graph)
            layers.append((key_BSD.detach(), value_BSD.detach()))
        after = Carry(tuple(layers), position_BS, document_BS).kept(options.context - 1 + rollback)
        return self._leave(graph.context_BTD, context_BTD), after

    def freeze(self) -> GnnModel:
        """Prepare for prediction: turn dropout off and fold the weights once."""
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
        """Yield what the inter edges of each layer read, computed from the states of the windows."""
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
        """Yield window states after each layer that updates them, [U, slots, D].

        The slots are those that inter edges lead from.
        """
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
        """Return the lines of tokens in the table of token features; -1, past a document's end, has the last line."""
        return torch.where(tokens < 0, len(self.features_VE) - 1, tokens)

    def layer(self, number: int) -> GnnLayer:
        layer = self.layers[number]
        assert isinstance(layer, GnnLayer)
        return layer

    # -- in, out, on disk ----------------------------------------------------------------------------------

    def enter(self, states: Tensor, kind: int = CONTEXT) -> Tensor:
        """Return the base model's states as input of the first layer, for nodes of a type."""
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
    """Return the embeddings after a layer norm, and a last line of zeros for the position past a document's end."""
    scaled_VD = F.layer_norm(embeddings_VD, embeddings_VD.shape[-1:])
    return torch.cat([scaled_VD, torch.zeros_like(scaled_VD[:1])])


def edge_lines(graph: Graph, lines_US: Tensor) -> Tensor:
    """Return the line of every inter edge's source, [N, S], given the lines of window slots."""
    return lines_US[graph.rows_BTK.flatten(0, 1)].flatten(1)


def edge_mask(graph: Graph, slots: slice) -> Tensor:
    """Return which inter edges are real, [N, S]."""
    mask_BTKS = graph.edge_BTK[..., None] & graph.windows.slot_UW[:, slots][graph.rows_BTK]
    return mask_BTKS.flatten(0, 1).flatten(1)
