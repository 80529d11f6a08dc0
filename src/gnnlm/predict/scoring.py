"""Texts to score: their token ids, the pieces and offsets of tokens, batches of similar length, and scores."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gnnlm.corpus.sources import check_text
from gnnlm.errors import CorpusError
from gnnlm.predict.open_book import OpenBook
from gnnlm.retrieval.index import Allowed

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Part = str | Sequence[int]
Text = str | tuple[Part, Part]  # a text, or (context, continuation), each as text or as token ids
BATCH_TOKENS = 1024  # tokens of several texts that are scored at once, padding included


@dataclass(frozen=True)
class TokenizedText:
    """A text to score: all its token ids, and pieces and offsets of the tokens from `first` on."""

    ids: list[int]
    first: int
    pieces: list[str]
    offsets: list[tuple[int, int]]

    @classmethod
    def of(cls, model: OpenBook, text: Text) -> TokenizedText:
        if isinstance(text, tuple):
            if len(text) != 2:
                raise CorpusError(f"expected a pair (context, continuation), got {len(text)} texts")
            (before, _, _), (after, offsets, last) = (_tokenized_part(model, part) for part in text)
            ids = [*before, *after]
            first = len(before)
        else:
            ids, offsets = tokenized(model, text)
            first = 0
            last = text
        if len(ids) == first:
            raise CorpusError("nothing to score: the text has no tokens")
        later = dict(itertools.pairwise([*sorted(set(offsets)), len(last)]))  # tokens of one character share its end
        ends = [later[start] for start in offsets]
        shared = [starts == after for starts, after in zip(offsets, [*offsets[1:], -1], strict=True)]
        pieces = [
            model.lm.piece(token) if shared[i] or (i and shared[i - 1]) else last[start:end]
            for i, (token, start, end) in enumerate(zip(ids[first:], offsets, ends, strict=True))
        ]
        return cls(ids, first, pieces, list(zip(offsets, ends, strict=True)))


def _tokenized_part(model: OpenBook, part: Part) -> tuple[list[int], list[int], str]:
    """Return token ids, the character at which each starts, and the text; for ids, their pieces joined."""
    if isinstance(part, str):
        return (*tokenized(model, part), part)
    if not isinstance(part, (list, tuple)) or not all(type(token) is int for token in part):
        raise CorpusError(f"expected a string or a list of token ids, got {str(part)[:80]}")
    ids: list[int] = list(part)
    model.check_tokens([ids])
    pieces = [model.lm.piece(token) for token in ids]
    starts = [0, *itertools.accumulate(map(len, pieces))]
    return ids, starts[:-1], "".join(pieces)


def tokenized(model: OpenBook, text: str) -> tuple[list[int], list[int]]:
    """Return token ids and the character at which each starts; refuse what is not text."""
    if not isinstance(text, str):
        raise CorpusError(f"expected a string, got {type(text).__name__}")
    check_text(text, "the text")
    return model.lm.tokenize(text)


class TextScores(NamedTuple):
    """The log-probability of each token of a text and whether it was the likeliest, by predictor."""

    log_probs: dict[str, Floats]
    top1: dict[str, Bools]


@torch.inference_mode()
def score_texts(
    model: OpenBook,
    texts: Sequence[TokenizedText],
    wanted: Sequence[str],
    allowed: Allowed | None,
    own_past: bool = False,
) -> list[TextScores]:
    """Score texts in batches of similar length."""
    rest = sorted(range(len(texts)), key=lambda number: -len(texts[number].ids))
    scores: dict[int, TextScores] = {}
    while rest:
        count = max(1, BATCH_TOKENS // len(texts[rest[0]].ids))
        batch = [texts[number] for number in rest[:count]]
        scores.update(zip(rest, _score_batch(model, batch, wanted, allowed, own_past), strict=False))
        rest = rest[count:]
    return [scores[number] for number in range(len(texts))]


def _score_batch(
    model: OpenBook, texts: Sequence[TokenizedText], wanted: Sequence[str], allowed: Allowed | None, own_past: bool
) -> list[TextScores]:
    log_probs: list[dict[str, list[Tensor]]] = [{name: [] for name in wanted} for _ in texts]
    top1: list[dict[str, list[Tensor]]] = [{name: [] for name in wanted} for _ in texts]
    ids = [torch.tensor(text.ids, device=model.predictor.head.device) for text in texts]
    read = [text.ids[:-1] for text in texts]  # nothing is predicted after the last token
    for prediction, _ in model.read_blocks(read, None, wanted, allowed, own_past=own_past):
        for line, text in enumerate(texts):
            places = torch.nonzero(prediction.real[line] & (prediction.read[line] >= text.first))[:, 0]
            if not len(places):
                continue
            targets = ids[line][prediction.read[line, places]]
            for name, full_NV in prediction[line, places].log_probs(wanted).items():
                log_probs[line][name].append(full_NV.gather(1, targets[:, None])[:, 0].cpu())
                top1[line][name].append((full_NV.argmax(1) == targets).cpu())
    return [
        TextScores(
            {name: torch.cat(values).numpy() for name, values in log_probs[line].items()},
            {name: torch.cat(values).numpy() for name, values in top1[line].items()},
        )
        for line in range(len(texts))
    ]
