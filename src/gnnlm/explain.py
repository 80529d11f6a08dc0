"""Which documents and nodes a prediction looks at: the most retrieved documents, and the network's attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gnnlm.answers import Attention, Neighbour
from gnnlm.gnn.model import LayerAttention
from gnnlm.predict.open_book import OpenBook
from gnnlm.predict.scoring import Text, TokenizedText
from gnnlm.retrieval.index import Allowed

CONTEXT = 8  # tokens shown on either side of a neighbour


@torch.inference_mode()
def looked_up_documents(model: OpenBook, text: Text, most: int) -> list[str]:
    """Return the documents with the most neighbours of the tokens that are scored."""
    tokenized_text = TokenizedText.of(model, text)
    predictor = model.predictor
    counts = torch.zeros(len(model.store.names))
    k = predictor.graph_k if predictor.gnn is not None else predictor.mixes["base"].k
    for prediction, _ in model.read_blocks([tokenized_text.ids[:-1]], None, ("base",), None, k):
        found = prediction.neighbours.positions[prediction.read.cpu() >= tokenized_text.first]
        numbers = model.store.document_of(found[found >= 0])
        counts.index_add_(0, numbers, torch.ones(len(numbers)))
    order = counts.argsort(descending=True, stable=True)[:most].tolist()
    return [model.store.names[number] for number in order if counts[number] > 0]


@torch.inference_mode()
def attention_after(model: OpenBook, ids: Sequence[int], allowed: Allowed | None) -> Attention:
    """Return the graph network's attention when it predicts the token after a text."""
    past = model.read_to_end([ids[:-1]], None, ("gnn",), allowed)[1] if len(ids) > 1 else None
    layers: list[LayerAttention] = []
    prediction, _ = model.read([ids[-1:]], past, ("gnn",), allowed, watch=layers)
    neighbours = prediction.neighbours[0, -1].nearest(model.predictor.graph_k)
    weights = [layer.inter_BTHS[0, -1].unflatten(-1, (neighbours.k, -1)) for layer in layers]
    assert model.predictor.gnn is not None
    context_ids = [model.lm.start_token, *ids][-model.predictor.gnn.options.context :]
    context = [layer.intra_BTHS[0, -1, :, -len(context_ids) :] for layer in layers]
    (found,) = neighbours[None].listed()
    return Attention(
        [Neighbour.at(model.store, row, similarity, CONTEXT, CONTEXT) for row, similarity in found],
        torch.stack(weights).cpu().numpy(),
        context_ids,
        torch.stack(context).cpu().numpy(),
    )
