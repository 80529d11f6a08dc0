"""Transformer-XL (Dai et al., 2019): the paper's base model for enwik8.

A text is read a segment at a time. Each layer also attends to its own inputs of the `memory` tokens before the segment.
Positions are relative: the score of a key at distance r is

    (q + u) . k  +  (q + v) . W_r R[r]

where R[r] is a sinusoid of the distance, and u and v are learned. A state depends on the memory of every layer below
it, that is, on `receptive_field` tokens: the paper's T x L and at most a segment more.

Shapes: B batch, T tokens, M tokens in memory, S = M + T, D width, H heads, d head width.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnnlm.lm.adaptive_softmax import AdaptiveHead, AdaptiveInput, band_widths
from gnnlm.lm.adaptive_transformer import NativeOutput


@dataclass(frozen=True)
class TransformerXLOptions:
    """The options of a model; the defaults are the paper's for enwik8."""

    vocab_size: int
    width: int = 512
    layers: int = 12
    heads: int = 8
    ffn: int = 2048
    head_width: int | None = None
    cutoffs: tuple[int, ...] = ()
    factor: float = 1.0
    widths: tuple[int, ...] | None = None  # of the bands; by default the model's width, divided by powers of the factor
    segment: int = 512  # tokens read at once
    memory: int = 512  # tokens before them that each layer attends to
    same_length: bool = False  # every token attends to exactly `memory` tokens, not to those of its segment as well
    clamp: int | None = None  # distances beyond this count as this
    shared_biases: bool = True  # all layers share u and v
    pre_norm: bool = False
    tie_projections: bool = True
    dropout: float = 0.1
    attention_dropout: float = 0.0

    @property
    def bands(self) -> tuple[int, ...]:
        return (*(cut for cut in self.cutoffs if cut < self.vocab_size), self.vocab_size)

    @property
    def head_size(self) -> int:
        return self.head_width or self.width // self.heads

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class TransformerXL(nn.Module):
    """Turns token ids into states; `head` turns states into log-probabilities."""

    kind = "transformer-xl"

    def __init__(self, options: TransformerXLOptions) -> None:
        super().__init__()
        self.options = options
        widths = options.widths or band_widths(options.width, options.factor, len(options.bands))
        projected = options.factor != 1 or tuple(widths) != (options.width,)
        self.inputs = AdaptiveInput(options.bands, widths, options.width, projected)
        self.head = self._tied_head()
        self.layers = nn.ModuleList(TransformerXLLayer(options) for _ in range(options.layers))
        self.biases = nn.ParameterList(  # u and v
            nn.init.normal_(torch.empty(2, options.heads, options.head_size), std=0.02)
            for _ in range(1 if options.shared_biases else options.layers)
        )
        self.dropout = nn.Dropout(options.dropout)

    def _tied_head(self) -> AdaptiveHead:
        options, words = self.options, list(self.inputs.words)
        projections = list(self.inputs.projections)
        if not options.tie_projections:
            projections = [nn.Parameter(nn.init.xavier_uniform_(torch.empty_like(p))) for p in projections]
        classes = nn.init.normal_(torch.empty(len(words) - 1, options.width), std=0.02)
        biases = [torch.zeros(len(band)) for band in words] + [torch.zeros(len(words) - 1)]
        first = projections[0] if len(self.inputs.projections) else None
        return AdaptiveHead(words, projections[1:], classes, first, biases)

    @property
    def receptive_field(self) -> int:
        """The number of tokens that a state depends on: each layer reaches back to the start of its memory."""
        segment, memory = self.options.segment, self.options.memory
        return self.options.layers * -(-memory // segment) * segment + segment

    def forward(self, tokens_BT: Tensor, past: list[Tensor] | None = None, keep: int | None = None) -> NativeOutput:
        """Read one segment. `past` is the memory: each layer's inputs of the tokens before, [B, M, D].

        `keep` is how many inputs the new memory has; by default `options.memory`.
        """
        options = self.options
        keep = options.memory if keep is None else keep
        batch, tokens = tokens_BT.shape
        x_BTD = self.inputs(tokens_BT) * math.sqrt(options.width)
        if past is None:
            past = [x_BTD.new_empty(batch, 0, options.width)] * options.layers
        sources = past[0].shape[1] + tokens
        distance_S = torch.arange(sources - 1, -1, -1, device=x_BTD.device)
        if options.clamp is not None:
            distance_S = distance_S.clamp(max=options.clamp)
        position_SD = self.dropout(distance_sinusoids(distance_S, options.width).to(x_BTD.dtype))
        visible_TS = self._visible(tokens, sources, x_BTD.device)
        x_BTD = self.dropout(x_BTD)
        read, memory = x_BTD, []
        for number, layer in enumerate(self.layers):
            seen_BSD = torch.cat([past[number], x_BTD], dim=1)
            memory.append(seen_BSD[:, seen_BSD.shape[1] - min(sources, keep) :].detach())
            bias_u, bias_v = self.biases[0 if options.shared_biases else number]
            x_BTD, read = layer(x_BTD, seen_BSD, position_SD, visible_TS, bias_u, bias_v)
        return NativeOutput(self.dropout(x_BTD), read, memory)

    def _visible(self, tokens: int, sources: int, device: torch.device) -> Tensor:
        """Return which of S sources each of the last T tokens attends to, [T, S]."""
        at_S = torch.arange(sources, device=device)
        behind_TS = at_S[sources - tokens :, None] - at_S
        visible_TS = behind_TS >= 0
        return visible_TS & (behind_TS < self.options.memory) if self.options.same_length else visible_TS

    def stream(self, tokens_BT: Tensor, past: SegmentMemory | None = None) -> NativeOutput:
        """Read tokens that follow those of `past`, in the segments that the whole text is cut into."""
        length = self.options.segment
        seen, done = (None, 0) if past is None else (past.seen, past.done)
        parts = tokens_BT.split([len(part) for part in segments(tokens_BT.shape[1], length, done)], dim=1)
        states, read = [], []
        for part in parts:
            done = (done + part.shape[1]) % length
            out: NativeOutput = self(part, seen, self.options.memory + done)
            states.append(out.states)
            read.append(out.ffn_input)
            seen = out.past
        assert seen is not None
        return NativeOutput(torch.cat(states, dim=1), torch.cat(read, dim=1), SegmentMemory(seen, done))


@dataclass(frozen=True, eq=False)
class SegmentMemory:
    """Each layer's inputs of the tokens in memory and of an unfinished segment, [B, M, D]."""

    seen: list[Tensor]
    done: int  # tokens read of the unfinished segment

    def select(self, rows: Sequence[int]) -> SegmentMemory:
        return SegmentMemory([inputs[torch.tensor(rows, device=inputs.device)] for inputs in self.seen], self.done)

    def crop(self, counts: Sequence[int]) -> SegmentMemory | None:
        """Return the memory without the last tokens; None if that reaches an earlier segment, whose memory is gone."""
        (count,) = set(counts)
        if count > self.done:
            return None
        return SegmentMemory([inputs[:, : inputs.shape[1] - count] for inputs in self.seen], self.done - count)

    def join(self, others: Sequence[SegmentMemory]) -> SegmentMemory:
        return SegmentMemory(
            [torch.cat(parts) for parts in zip(self.seen, *(o.seen for o in others), strict=True)], self.done
        )


class TransformerXLLayer(nn.Module):
    def __init__(self, options: TransformerXLOptions) -> None:
        super().__init__()
        width, inner = options.width, options.heads * options.head_size
        self.heads, self.pre_norm = options.heads, options.pre_norm
        self.attention_dropout = options.attention_dropout
        self.query, self.key_value, self.position, self.output = (
            nn.Linear(width, inner, bias=False),
            nn.Linear(width, 2 * inner, bias=False),
            nn.Linear(width, inner, bias=False),
            nn.Linear(inner, width, bias=False),
        )
        self.widen, self.narrow = nn.Linear(width, options.ffn), nn.Linear(options.ffn, width)
        self.attention_norm, self.ffn_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(options.dropout)
        for linear in (self.query, self.key_value, self.position, self.output, self.widen, self.narrow):
            nn.init.normal_(linear.weight, std=0.02)
        for linear in (self.widen, self.narrow):
            nn.init.zeros_(linear.bias)

    def forward(
        self, x_BTD: Tensor, seen_BSD: Tensor, position_SD: Tensor, visible_TS: Tensor, bias_u: Tensor, bias_v: Tensor
    ) -> tuple[Tensor, Tensor]:
        if self.pre_norm:
            seen_BSD = self.attention_norm(seen_BSD)
        query_BTHd = self._split(self.query(seen_BSD[:, -x_BTD.shape[1] :]))
        key_BSHd, value_BSHd = (self._split(part) for part in self.key_value(seen_BSD).chunk(2, dim=-1))
        position_SHd = self._split(self.position(position_SD))
        by_distance_BHTS = torch.einsum("bthd,shd->bhts", query_BTHd + bias_v, position_SHd)
        bias_BHTS = shift(by_distance_BHTS) / math.sqrt(query_BTHd.shape[-1])
        mean_BHTd = F.scaled_dot_product_attention(
            (query_BTHd + bias_u).transpose(1, 2),
            key_BSHd.transpose(1, 2),
            value_BSHd.transpose(1, 2),
            attn_mask=bias_BHTS.masked_fill(~visible_TS, float("-inf")),
            dropout_p=self.attention_dropout if self.training else 0.0,
        )
        x_BTD = x_BTD + self.dropout(self.output(mean_BHTd.transpose(1, 2).flatten(2)))
        if not self.pre_norm:
            x_BTD = self.attention_norm(x_BTD)
        read_BTD = self.ffn_norm(x_BTD) if self.pre_norm else x_BTD
        x_BTD = x_BTD + self.dropout(self.narrow(self.dropout(F.relu(self.widen(read_BTD)))))
        return (x_BTD if self.pre_norm else self.ffn_norm(x_BTD)), read_BTD

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.heads, -1)


def segments(tokens: int, length: int, done: int) -> list[range]:
    """Cut tokens into segments; `done` tokens of the first segment were read before.

    >>> segments(6, 4, 3)
    [range(0, 1), range(1, 5), range(5, 6)]
    """
    cuts = [0, *range(length - done, tokens, length), tokens]
    return [range(begin, end) for begin, end in itertools.pairwise(cuts)]


def shift(by_distance: Tensor) -> Tensor:
    """Turn scores by distance (columns S - 1 .. 0) into scores by source, for each of the last T of S tokens.

    Token t stands at S - T + t, so its source s is S - T + t - s away: each line moves left by T - 1 - t. The values
    that come in from the next line belong to sources in the future, which the caller masks.

    >>> shift(torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]]))[1]
    tensor([2., 1., 0.])
    >>> shift(torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]]))[0, :2]
    tensor([1., 0.])
    """
    *front, tokens, sources = by_distance.shape
    padded = F.pad(by_distance, (1, 0)).view(*front, sources + 1, tokens)
    return padded[..., 1:, :].reshape(*front, tokens, sources)


def distance_sinusoids(distance_S: Tensor, width: int) -> Tensor:
    rates = 10_000 ** -(torch.arange(0, width, 2, device=distance_S.device) / width)
    angles = distance_S[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)
