"""Own past with loops: which rows each prediction may find, and one step over the whole text.

The text is attached as a document, so that its rows have the numbers that own rows have: behind the store's last.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from gnnlm.corpus.document import TokenizedDocument
from gnnlm.corpus.windows import plan_windows
from gnnlm.graph.batch import Context
from gnnlm.predict.attach import attached
from gnnlm.predict.open_book import OpenBook
from gnnlm.predict.predictor import Prediction
from gnnlm.retrieval.neighbours import Neighbours


def findable(offset: int, tokens: int, window: int, context: int, right: int) -> list[int]:
    """The offsets of a text that the prediction at one may find."""
    (reads,) = [w for w in plan_windows(tokens, window, context) if w.first <= offset <= w.stop]
    return [j for j in range(offset) if j < reads.start and all(j + step < offset for step in range(right + 1))]


def read_with_own_past(model: OpenBook, text: Sequence[int], k: int, wanted: Collection[str]) -> Prediction:
    """What is predicted at every offset of a text, [T + 1]."""
    reading, size = model.reading, len(model.store)
    whole = attached(model, [TokenizedDocument("text", "", list(text), [0] * len(text))])
    states_1TD = model.rounded(model.reader.read([text])[0].states_BTD)
    keys_TD = states_1TD[0] / states_1TD[0].norm(dim=1, keepdim=True)  # cosine
    stored_R = model.store.token_positions()
    positions, similarities = [], []
    for offset, key_D in enumerate(keys_TD):
        near = model.index.similarity(states_1TD[0, offset][None], stored_R[None])[0]
        found = list(zip((-near).tolist(), stored_R.tolist(), strict=True))
        for j in findable(offset, len(text), reading.window, reading.context, model.predictor.graphs.right):
            found.append((-float(key_D @ keys_TD[j]), size + j))
        best = sorted(found)[:k]
        positions.append([position for _, position in best])
        similarities.append([-similarity for similarity, _ in best])
    neighbours = Neighbours(torch.tensor(positions)[None], torch.tensor(similarities)[None])
    count = len(text) + 1
    context = Context(states_1TD, torch.arange(count)[None], torch.zeros(1, count, dtype=torch.long))
    return whole.predictor.step(context, neighbours, wanted)[0][0]
