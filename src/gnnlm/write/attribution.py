"""Where written words come from.

The mixture p(y) = sum over rows r of lambda w_r [token_r = y] + (1 - lambda) p_model(y) is a sum, so the share of a row
in the token that was written is exact, and all shares with the model's own add up to one. They are shares of the
predictor's distribution, before temperature and filters. What the graph network took from a document is not among
them: see `Book.influence`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from gnnlm.datastore.store import Store
from gnnlm.predict.open_book import OpenBook
from gnnlm.predict.own_past import with_text
from gnnlm.write.text_state import TextState, WrittenToken
from gnnlm.write.written_text import Source, Span, Token, WrittenText

CONTEXT = 8  # tokens shown on either side of a source
LEAST_SHARE = 0.05  # a row with less supports no span


def written_text(model: OpenBook, text: TextState, sources: int) -> WrittenText:
    """Return a text as it is now, with at most so many sources of each token."""
    text.detokenizer.finish()
    (tokens,) = described_tokens(model, [(text, range(text.shown))], sources)
    return WrittenText(
        text.detokenizer.text,
        text.finish_reason or "interrupted",
        tokens,
        copied_spans(model, text, len(tokens)),
        text.steps,
        text.drafted,
        text.accepted,
        text.searches,
        text.seconds,
    )


@torch.inference_mode()
def described_tokens(model: OpenBook, parts: Sequence[tuple[TextState, range]], sources: int) -> list[list[Token]]:
    """Return some tokens of each text, with their sources and with what the base model alone thinks of them."""
    tokens = [text.tokens[place] for text, places in parts for place in places]
    base: list[float] = []
    if tokens:  # one pass of the softmax for all texts
        states = torch.stack([token.base_state for token in tokens])
        ids = torch.tensor([token.id for token in tokens], device=states.device)
        base = model.lm.head.target_log_probs(states, ids).tolist()
    base_log_probs = iter(base)
    found = []
    for text, places in parts:
        store = cited_store(model, text)
        line = []
        for place in places:
            token = text.tokens[place]
            book = min(1.0, float(token.voters.share.double().sum()))
            largest = sources_of(token, store, sources)
            piece = text.detokenizer.piece(place)
            line.append(Token(piece, token.id, token.log_prob, next(base_log_probs), book, largest))
        found.append(line)
    return found


def cited_store(model: OpenBook, text: TextState) -> Store:
    """Return the store that a text's sources are in, with the text itself behind it if that is looked up."""
    if not text.settings.options.own_past:
        return model.store
    return with_text(model.store, model.lm, [*text.prompt, *text.ids])


def sources_of(token: WrittenToken, store: Store, count: int) -> list[Source]:
    """Return the rows with the largest shares, largest first."""
    voters = token.voters
    order = voters.share.argsort(descending=True, stable=True)[:count]
    order = order[voters.share[order] > 0]
    positions = voters.positions[order].tolist()
    similarities = voters.similarity[order].tolist()
    shares = voters.share[order].tolist()
    found = []
    for position, similarity, share in zip(positions, similarities, shares, strict=True):
        passage = store.passage(position, CONTEXT, CONTEXT)
        start, end = store.characters(position)
        words = (passage.before, passage.token, passage.after)
        found.append(Source(passage.document, start, end, *words, similarity, share, position))
    return found


def copied_spans(model: OpenBook, text: TextState, count: int) -> list[Span]:
    """Return the passages that the first `count` tokens of a text follow.

    They are the longest runs of tokens whose rows follow one another in a document; no token is in two.
    """
    store = cited_store(model, text)
    runs = sorted(_runs(text.tokens[:count]), key=lambda run: (-run[1], -run[3], run[0]))
    taken = np.zeros(count, dtype=bool)
    spans = []
    for first, length, position, share in runs:
        if length < 2 or taken[first : first + length].any():
            continue
        taken[first : first + length] = True
        start = store.characters(position)[0]
        end = store.characters(position + length - 1)[1]
        document = store.passage(position, 0, 0).document
        words = "".join(text.detokenizer.piece(place) for place in range(first, first + length))
        spans.append(Span(words, first, first + length - 1, document, start, end, share / length))
    return sorted(spans, key=lambda span: span.first)


def _runs(tokens: Sequence[WrittenToken]) -> Iterator[tuple[int, int, int, float]]:
    """Yield maximal runs: their first token, length, first position in the store, and summed share."""
    open_runs: dict[int, tuple[int, int, float]] = {}  # by the position that would go on: first token, length, share
    for place, token in enumerate(tokens):
        strong = token.voters.share >= LEAST_SHARE
        rows = zip(token.voters.positions[strong].tolist(), token.voters.share[strong].tolist(), strict=True)
        going_on: dict[int, tuple[int, int, float]] = {}
        for position, share in rows:
            first, length, total = open_runs.pop(position, (place, 0, 0.0))
            going_on[position + 1] = first, length + 1, total + share
        yield from _closed(open_runs)
        open_runs = going_on
    yield from _closed(open_runs)


def _closed(runs: dict[int, tuple[int, int, float]]) -> Iterator[tuple[int, int, int, float]]:
    for following, (first, length, share) in runs.items():
        yield first, length, following - length, share
