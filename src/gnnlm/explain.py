"""What documents and nodes have to do with a prediction: leaving documents out, and the network's attention."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from gnnlm.gnn.model import LayerAttention
from gnnlm.predict.open_book import BLOCK, OpenBook, Past
from gnnlm.predict.scoring import Job, Text
from gnnlm.retrieval.index import Allowed
from gnnlm.retrieval.neighbours import Neighbours

if TYPE_CHECKING:
    from gnnlm.answers import Floats
    from gnnlm.book import Book


def influence(book: Book, text: Text, documents: Iterable[str] | None, name: str, most: int) -> dict[str, Floats]:
    """See `Book.influence`."""
    names = looked_up(book.model, text, most) if documents is None else list(documents)
    whole = book.score(text, predictors=[name]).log_probs[name]
    return {
        document: whole - book.score(text, predictors=[name], exclude=[document]).log_probs[name] for document in names
    }


@torch.inference_mode()
def looked_up(model: OpenBook, text: Text, most: int) -> list[str]:
    """The documents with the most neighbours of the tokens that are scored."""
    job, predictor = Job.make(model, text, 0), model.predictor
    counts = torch.zeros(len(model.store.names))
    past: Past | None = None
    for start in range(0, len(job.ids), BLOCK):
        part = job.ids[start : min(start + BLOCK, len(job.ids) - 1)]
        first = 0 if past is None else start + 1
        k = predictor.graph_k if predictor.gnn is not None else predictor.mixes["base"].k
        prediction, past = model.read([part], past, ("base",), None, k)
        found = prediction.neighbours[0, max(0, job.first - first) :].positions
        numbers = model.store.document_of(found[found >= 0])
        counts.index_add_(0, numbers, torch.ones(len(numbers)))
    order = counts.argsort(descending=True, stable=True)[:most].tolist()
    return [model.store.names[number] for number in order if counts[number] > 0]


@torch.inference_mode()
def watched(
    model: OpenBook, ids: Sequence[int], allowed: Allowed | None
) -> tuple[Neighbours, Floats, list[int], Floats]:
    """The neighbours after some tokens, the network's attention on them, its last context nodes, and that on those."""
    past: Past | None = None
    for start in range(0, max(0, len(ids) - 1), BLOCK):
        _, past = model.read([ids[start : min(start + BLOCK, len(ids) - 1)]], past, ("gnn",), allowed)
    seen: list[LayerAttention] = []
    prediction, _ = model.read([ids[-1:]], past, ("gnn",), allowed, watch=seen)
    neighbours = prediction.neighbours[0, -1].nearest(model.predictor.graph_k)
    weights = [layer.inter_BTHS[0, -1].unflatten(-1, (neighbours.k, -1)) for layer in seen]
    assert model.predictor.gnn is not None
    nodes = [model.lm.start_token, *ids][-model.predictor.gnn.options.context :]
    context = [layer.intra_BTHS[0, -1, :, -len(nodes) :] for layer in seen]
    return neighbours, torch.stack(weights).cpu().numpy(), nodes, torch.stack(context).cpu().numpy()
