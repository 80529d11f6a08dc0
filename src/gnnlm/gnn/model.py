"""The graph network: layers over context and neighbour states, in front of the frozen softmax.

A token attends to the last `context` tokens of its document. Blocks of a longer text are scored one after
another with what the layers carry, so that the result does not depend on where the blocks are cut.

Shapes: B blocks, T tokens, M carried tokens, U distinct rows, W window slots, D base width, V vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from gnnlm.errors import ArtifactError
from gnnlm.gnn.layer import CONTEXT, NEIGHBOUR, GnnLayer
from gnnlm.gnn.options import GnnOptions
from gnnlm.graph.batch import Graph, band_mask


@dataclass(frozen=True)
class Carry:
    """What scoring takes from one block to the next: each layer's inputs, and the documents they belong to."""

    inputs: tuple[Tensor, ...]
    document_BM: Tensor


class GnnModel(nn.Module):
    """context and neighbour states in, context states for the frozen softmax out."""

    embeddings_VD: Tensor

    def __init__(self, options: GnnOptions, embeddings_VD: Tensor) -> None:
        super().__init__()
        self.options = options
        self.register_buffer("embeddings_VD", embeddings_VD, persistent=False)
        self.layers = nn.ModuleList(
            GnnLayer(options, last=number == options.layers - 1) for number in range(options.layers)
        )
        if options.width != options.base_width:
            self.narrow = nn.ModuleList(nn.Linear(options.base_width, options.width) for _ in range(2))
            self.widen = nn.Linear(options.width, options.base_width)
            if options.zero_start:
                nn.init.zeros_(self.widen.weight)
                nn.init.zeros_(self.widen.bias)

    def forward(self, graph: Graph, carry: Carry | None = None) -> tuple[Tensor, Carry]:
        """Updated states [B, T, D], and what the next block of the same texts needs."""
        options = self.options
        batch, tokens = graph.document_BT.shape
        context_BTD = self._enter(graph.context_BTD, CONTEXT)
        window_UWD = self._enter(graph.windows.states_UWD, NEIGHBOUR)
        if carry is None:
            nothing = context_BTD.new_zeros(batch, 0, options.width)
            carry = Carry((nothing,) * options.layers, graph.document_BT[:, :0])
        document_BS = torch.cat([carry.document_BM, graph.document_BT], dim=1)
        band_BTS = band_mask(document_BS, tokens, options.context)
        window_tokens = self._token_features(graph) if options.token_features else None
        seen = document_BS.shape[1]
        drop = seen - min(seen, options.context - 1)
        inputs = []
        sources_UWC: Tensor | None = None  # the same for all layers while windows do not change
        for layer, past_BMD in zip(self.layers, carry.inputs, strict=True):
            inputs.append(torch.cat([past_BMD, context_BTD], dim=1)[:, drop:].detach())
            assert isinstance(layer, GnnLayer)
            if sources_UWC is None:
                sources_UWC = layer.sources(window_UWD, window_tokens)
            context_BTD, window_UWD = layer(context_BTD, past_BMD, band_BTS, window_UWD, sources_UWC, graph)
            if layer.updates_neighbours:
                sources_UWC = None
        return self._leave(graph.context_BTD, context_BTD), Carry(tuple(inputs), document_BS[:, drop:])

    def _enter(self, states: Tensor, kind: int) -> Tensor:
        if self.options.width == self.options.base_width:
            return states
        narrowed: Tensor = F.gelu(self.narrow[kind](states))
        return narrowed

    def _leave(self, base_BTD: Tensor, context_BTD: Tensor) -> Tensor:
        if self.options.width == self.options.base_width:
            return context_BTD
        widened: Tensor = self.widen(context_BTD)
        return base_BTD + widened if self.options.zero_start else widened

    def _token_features(self, graph: Graph) -> Tensor:
        """The frozen embedding of each window node's own token, at unit scale; zero past a document's last token."""
        tokens_UW = graph.windows.tokens_UW
        embedded_UWD = self.embeddings_VD[tokens_UW.clamp(min=0)]
        return F.layer_norm(embedded_UWD, embedded_UWD.shape[-1:]) * (tokens_UW >= 0)[..., None]

    def save(self, path: Path) -> None:
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        save_file(tensors, path, metadata={"options": json.dumps(self.options.as_dict())})

    @classmethod
    def load(cls, path: Path, embeddings_VD: Tensor) -> GnnModel:
        with safe_open(path, framework="pt") as file:
            options = GnnOptions(**json.loads(file.metadata()["options"]))
        if options.base_width != embeddings_VD.shape[1]:
            raise ArtifactError(
                f"{path} was trained on states of width {options.base_width}, the store has {embeddings_VD.shape[1]}"
            )
        model = cls(options, embeddings_VD)
        model.load_state_dict(load_file(path))
        return model
