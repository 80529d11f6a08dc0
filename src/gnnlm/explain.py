"""What documents and nodes have to do with a prediction: leaving documents out, and the network's attention."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from gnnlm.gnn.model import LayerAttention
from gnnlm.predict.open_book import OpenBook
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
    k = predictor.graph_k if predictor.gnn is not None else predictor.mixes["base"].k
    for prediction, _ in model.read_blocks([job.ids[:-1]], None, ("base",), None, k):
        found = prediction.neighbours.positions[prediction.read.cpu() >= job.first]
        numbers = model.store.document_of(found[found >= 0])
        counts.index_add_(0, numbers, torch.ones(len(numbers)))
    order = counts.argsort(descending=True, stable=True)[:most].tolist()
    return [model.store.names[number] for number in order if counts[number] > 0]


@torch.inference_mode()
def watched(
    model: OpenBook, ids: Sequence[int], allowed: Allowed | None
) -> tuple[Neighbours, Floats, list[int], Floats]:
    """The neighbours after some tokens, the network's attention on them, its last context nodes, and that on those."""
    past = model.read_to_end([ids[:-1]], None, ("gnn",), allowed)[1] if len(ids) > 1 else None
    seen: list[LayerAttention] = []
    prediction, _ = model.read([ids[-1:]], past, ("gnn",), allowed, watch=seen)
    neighbours = prediction.neighbours[0, -1].nearest(model.predictor.graph_k)
    weights = [layer.inter_BTHS[0, -1].unflatten(-1, (neighbours.k, -1)) for layer in seen]
    assert model.predictor.gnn is not None
    nodes = [model.lm.start_token, *ids][-model.predictor.gnn.options.context :]
    context = [layer.intra_BTHS[0, -1, :, -len(nodes) :] for layer in seen]
    return neighbours, torch.stack(weights).cpu().numpy(), nodes, torch.stack(context).cpu().numpy()
