"""The adaptive-input Transformer (Baevski & Auli, 2019): the paper's base model for WikiText-103 and One Billion Word.

A pre-norm decoder with sinusoidal positions between adaptive input embeddings and an adaptive softmax that share
their weights. The state is the output of the last layer, after a norm only if `final_norm` is set.

Shapes: B batch, T tokens, P tokens before, D width, H heads, d = D / H.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnnlm.lm.adaptive_softmax import AdaptiveHead, AdaptiveInput, band_widths
from gnnlm.lm.kv_cache import KeyValues


@dataclass(frozen=True)
class AdaptiveOptions:
    """The options of a model; the defaults are the paper's for WikiText-103."""

    vocab_size: int
    width: int = 1024
    layers: int = 16
    heads: int = 16
    ffn: int = 4096
    cutoffs: tuple[int, ...] = (20_000, 60_000)
    factor: float = 4.0
    widths: tuple[int, ...] | None = None  # of the bands; by default the model's width, divided by powers of the factor
    tie_words: bool = True
    tie_projections: bool = True
    final_norm: bool = False
    first_position: int = 2  # fairseq counts positions from the one after its padding index
    dropout: float = 0.3
    attention_dropout: float = 0.1
    activation_dropout: float = 0.1
    softmax_dropout: float = 0.2

    @property
    def bands(self) -> tuple[int, ...]:
        """The ends of the vocabulary's bands."""
        return (*(cut for cut in self.cutoffs if cut < self.vocab_size), self.vocab_size)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class NativeOutput(NamedTuple):
    """States and the last feed-forward layer's input, both [B, T, D], and what later tokens need of these tokens."""

    states: Tensor
    ffn_input: Tensor
    past: Any


class AdaptiveTransformer(nn.Module):
    """Turns token ids into states; `head` turns states into log-probabilities."""

    kind = "adaptive"

    def __init__(self, options: AdaptiveOptions) -> None:
        super().__init__()
        self.options = options
        widths = options.widths or band_widths(options.width, options.factor, len(options.bands))
        self.inputs = AdaptiveInput(options.bands, widths, options.width)
        self.head = AdaptiveHead.beside(
            self.inputs, options.tie_words, options.tie_projections, options.softmax_dropout
        )
        self.layers = nn.ModuleList(AdaptiveLayer(options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.width) if options.final_norm else None
        self.dropout = nn.Dropout(options.dropout)

    @property
    def receptive_field(self) -> int | None:
        """The number of tokens that a state depends on; None for all that were read."""
        return None

    def forward(self, tokens_BT: Tensor, past: list[tuple[Tensor, Tensor]] | None = None) -> NativeOutput:
        """Read tokens; `past` holds each layer's keys and values of the tokens before, [B, H, P, d]."""
        width, before = self.options.width, 0 if past is None else past[0][0].shape[2]
        first = self.options.first_position + before
        x_BTD = self.inputs(tokens_BT) * math.sqrt(width)
        x_BTD = x_BTD + sinusoids(first, tokens_BT.shape[1], width, x_BTD.device).to(x_BTD.dtype)
        x_BTD = self.dropout(x_BTD)
        read, seen = x_BTD, []
        for number, layer in enumerate(self.layers):
            x_BTD, read, keys_values = layer(x_BTD, None if past is None else past[number])
            seen.append(keys_values)
        return NativeOutput(x_BTD if self.norm is None else self.norm(x_BTD), read, seen)

    def stream(self, tokens_BT: Tensor, past: KeyValues | None = None) -> NativeOutput:
        """Read tokens that follow those of `past`, or a text from its first token."""
        out: NativeOutput = self(tokens_BT, None if past is None else past.dense())
        counts = [out.past[0][0].shape[2]] * len(tokens_BT)
        return out._replace(past=KeyValues.of(tuple(out.past), counts))


class AdaptiveLayer(nn.Module):
    def __init__(self, options: AdaptiveOptions) -> None:
        super().__init__()
        width = options.width
        self.heads, self.attention_dropout = options.heads, options.attention_dropout
        self.attention_norm, self.ffn_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)  # queries, keys and values
        self.output = nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, options.ffn), nn.Linear(options.ffn, width)
        self.dropout, self.activation_dropout = nn.Dropout(options.dropout), nn.Dropout(options.activation_dropout)
        for linear in (self.output, self.widen, self.narrow):
            nn.init.xavier_uniform_(linear.weight)
        for part in self.attention.weight.chunk(3):
            nn.init.xavier_uniform_(part, gain=2**-0.5)
        for linear in (self.attention, self.output, self.widen, self.narrow):
            nn.init.zeros_(linear.bias)

    def forward(
        self, x_BTD: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        batch, tokens, _ = x_BTD.shape
        projected = self.attention(self.attention_norm(x_BTD)).view(batch, tokens, 3, self.heads, -1)
        query_BHTd, key_BHSd, value_BHSd = projected.permute(2, 0, 3, 1, 4)
        mask_TS = None
        if past is not None:
            key_BHSd, value_BHSd = torch.cat([past[0], key_BHSd], 2), torch.cat([past[1], value_BHSd], 2)
            before = key_BHSd.shape[2] - tokens
            mask_TS = torch.ones(tokens, before + tokens, dtype=torch.bool, device=x_BTD.device).tril(before)
        mean_BHTd = F.scaled_dot_product_attention(
            query_BHTd,
            key_BHSd,
            value_BHSd,
            attn_mask=mask_TS,
            is_causal=mask_TS is None,
            dropout_p=self.attention_dropout if self.training else 0.0,
        )
        x_BTD = x_BTD + self.dropout(self.output(mean_BHTd.transpose(1, 2).flatten(2)))
        read_BTD = self.ffn_norm(x_BTD)
        inner = self.activation_dropout(F.relu(self.widen(read_BTD)))
        return x_BTD + self.dropout(self.narrow(inner)), read_BTD, (key_BHSd, value_BHSd)


def sinusoids(first: int, count: int, width: int, device: torch.device) -> Tensor:
    """Return `count` positions from `first` on as sines, then cosines, [count, width].

    The wavelengths go from 2 pi to 10,000 times 2 pi.
    """
    half = width // 2
    rates = torch.exp(torch.arange(half, device=device) * (-math.log(10_000) / max(1, half - 1)))
    angles = torch.arange(first, first + count, device=device)[:, None] * rates
    return F.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, width % 2))
