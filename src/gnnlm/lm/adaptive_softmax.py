"""Adaptive input embeddings and adaptive softmax: rare words get narrow vectors.

The vocabulary, sorted by frequency, is cut into bands. A token of band b has a vector of its band's width, which is
projected to the model's width. The softmax uses the same matrices in the other direction:

    p(w)  =  p(w | head)                  w in band 0; the head also holds one class per other band
    p(w)  =  p(class b | head) p(w | b)   w in band b

If weights are tied, both modules share their parameters.

Shapes: N states, D width, b bands, V_b words of a band, d_b width of a band.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from gnnlm.artifact import writing
from gnnlm.lm.head import Head, SoftmaxHead, chunked_values


def band_widths(width: int, factor: float, bands: int) -> list[int]:
    """
    >>> band_widths(1024, 4, 3)
    [1024, 256, 64]
    """
    return [int(width // factor**band) for band in range(bands)]


class AdaptiveInput(nn.Module):
    """Turns token ids into vectors of the model's width."""

    def __init__(self, cutoffs: Sequence[int], widths: Sequence[int], width: int, projected: bool = True) -> None:
        """`cutoffs` are the ends of the bands; the last one is the vocabulary's size.

        Without `projected`, there is one band as wide as the model, and its vectors are not projected.
        """
        super().__init__()
        assert projected or list(widths) == [width]
        self.cutoffs, self.width = tuple(cutoffs), width
        sizes = [end - start for start, end in zip((0, *cutoffs[:-1]), cutoffs, strict=True)]
        self.words = nn.ParameterList(torch.empty(size, narrow) for size, narrow in zip(sizes, widths, strict=True))
        self.projections = nn.ParameterList(torch.empty(width, narrow) for narrow in widths if projected)
        for words in self.words:
            nn.init.normal_(words, std=words.shape[1] ** -0.5)
        for projection in self.projections:
            nn.init.xavier_uniform_(projection)

    def forward(self, tokens: Tensor) -> Tensor:
        if len(self.cutoffs) == 1:
            return self._band(tokens, 0)
        nan = float("nan")  # stays for ids outside the vocabulary
        out: Tensor = self.words[0].new_full((*tokens.shape, self.width), nan)
        start = 0
        for band, end in enumerate(self.cutoffs):
            here = (tokens >= start) & (tokens < end)
            out[here] = self._band(tokens[here] - start, band).to(out.dtype)
            start = end
        return out

    def _band(self, words: Tensor, band: int) -> Tensor:
        vectors: Tensor = F.embedding(words, self.words[band])
        if not len(self.projections):
            return vectors
        projected: Tensor = F.linear(vectors, self.projections[band])
        return projected


class AdaptiveHead(Head):
    """The softmax over bands. It may share its parameters with an AdaptiveInput."""

    def __init__(
        self,
        words: Sequence[Tensor],
        projections: Sequence[Tensor],
        classes: Tensor,
        head_projection: Tensor | None = None,
        biases: Sequence[Tensor] = (),
        dropout: float = 0.0,
    ) -> None:
        """Make a head of `words` [V_b, d_b] of each band, `projections` [D, d_b] of all but the first, and `classes`.

        `classes` is [bands - 1, D]. `head_projection` [D, d_0] is needed if band 0 is narrower than the model. `biases`
        are those of each band's words, then those of the classes.
        """
        super().__init__()
        self.words, self.projections = nn.ParameterList(words), nn.ParameterList(projections)
        self.classes = _parameter(classes)
        self.head_projection = None if head_projection is None else _parameter(head_projection)
        self.biases = nn.ParameterList(biases)
        self.dropout = nn.Dropout(dropout)
        self.cutoffs = list(itertools.accumulate(len(band) for band in words))

    @classmethod
    def beside(cls, inputs: AdaptiveInput, tie_words: bool, tie_projections: bool, dropout: float) -> AdaptiveHead:
        """Return a head with the bands of an input, which shares its vectors, its projections, or neither."""

        def own(tensor: Tensor) -> nn.Parameter:
            return nn.Parameter(nn.init.xavier_uniform_(torch.empty_like(tensor)))

        words = list(inputs.words) if tie_words else [own(words) for words in inputs.words]
        tails = list(inputs.projections[1:])
        narrow = words[0].shape[1] != inputs.width
        return cls(
            words,
            tails if tie_projections else [own(projection) for projection in tails],
            nn.init.normal_(torch.empty(len(tails), inputs.width), std=inputs.width**-0.5),
            own(inputs.projections[0]) if narrow else None,
            dropout=dropout,
        )

    @property
    def vocab_size(self) -> int:
        return self.cutoffs[-1]

    @property
    def width(self) -> int:
        return self.classes.shape[1]

    @property
    def embeddings_VD(self) -> Tensor:
        first = self.words[0] if self.head_projection is None else self.words[0] @ self.head_projection.T
        tails = zip(self.words[1:], self.projections, strict=True)
        return torch.cat([first, *(words @ projection.T for words, projection in tails)]).detach()

    def log_probs(self, states_ND: Tensor) -> Tensor:
        head = self._head(states_ND)
        shortlist, classes = head.split([self.cutoffs[0], len(self.projections)], dim=-1)
        tails = [self._tail(states_ND, band) + classes[..., band, None] for band in range(len(self.projections))]
        return torch.cat([shortlist, *tails], dim=-1)

    def target_log_probs(self, states_ND: Tensor, targets_N: Tensor) -> Tensor:
        if any(p.requires_grad for p in self.parameters()):
            return self._values(states_ND, targets_N)
        return chunked_values(states_ND, targets_N, self._chunk_values, self.cutoffs[0] + len(self.projections))

    def _chunk_values(self, states: Tensor, targets: Tensor, wanted: bool) -> tuple[Tensor, Tensor | None]:
        with torch.set_grad_enabled(wanted):
            states = states.detach().requires_grad_(wanted)
            value = self._values(states, targets)
            gradient = torch.autograd.grad(value.sum(), states)[0] if wanted else None
        return value.detach(), gradient

    def _values(self, states_ND: Tensor, targets_N: Tensor) -> Tensor:
        states_ND = self.dropout(states_ND)
        head = self._head(states_ND)
        column = targets_N.clamp(max=self.cutoffs[0] - 1)
        tails = []
        for band, (start, end) in enumerate(zip(self.cutoffs[:-1], self.cutoffs[1:], strict=True)):
            lines = torch.nonzero((targets_N >= start) & (targets_N < end))[:, 0]
            column = column.index_fill(0, lines, self.cutoffs[0] + band)
            if len(lines):
                inside = self._tail(states_ND[lines], band).gather(1, (targets_N[lines] - start)[:, None])[:, 0]
                tails.append((lines, inside))
        values = head.gather(1, column[:, None])[:, 0]
        for lines, inside in tails:
            values = values.index_add(0, lines, inside)
        return values

    def _head(self, states: Tensor) -> Tensor:
        """Return log-probabilities of the first band's words and of the other bands, [..., V_0 + bands - 1]."""
        inner = states if self.head_projection is None else states @ self.head_projection
        word_bias, class_bias = (self.biases[0], self.biases[-1]) if len(self.biases) else (None, None)
        words = F.linear(inner, self.words[0], word_bias)
        return torch.cat([words, F.linear(states, self.classes, class_bias)], dim=-1).float().log_softmax(-1)

    def _tail(self, states: Tensor, band: int) -> Tensor:
        """Return log-probabilities of a band's words, given the band."""
        inner = self.dropout(states @ self.projections[band])
        bias = self.biases[band + 1] if len(self.biases) else None
        return F.linear(inner, self.words[band + 1], bias).float().log_softmax(-1)

    def on(self, device: torch.device | str) -> AdaptiveHead:
        return copy.deepcopy(self).requires_grad_(False).eval().to(device)

    def save(self, path: Path) -> None:
        with writing(path):
            save_file({name: tensor.detach().cpu().clone() for name, tensor in self.state_dict().items()}, path)

    @classmethod
    def load(cls, tensors: dict[str, Tensor]) -> AdaptiveHead:
        """Make a head from the tensors that `save` wrote."""

        def listed(name: str) -> list[Tensor]:
            count = sum(key.startswith(f"{name}.") for key in tensors)
            return [tensors[f"{name}.{number}"] for number in range(count)]

        head = cls(
            listed("words"),
            listed("projections"),
            tensors["classes"],
            tensors.get("head_projection"),
            listed("biases"),
        )
        return head.requires_grad_(False).eval()


def _parameter(tensor: Tensor) -> nn.Parameter:
    """Return a tensor as a parameter. A parameter is returned itself, so that it stays tied."""
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)


def load_head(path: Path) -> Head:
    """Load a head of either kind from the file that `save` wrote."""
    tensors = load_file(path)
    return AdaptiveHead.load(tensors) if "classes" in tensors else SoftmaxHead.load(tensors)
