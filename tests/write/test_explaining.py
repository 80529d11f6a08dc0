"""What a document does for a text, and where the network looks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gnnlm.book import Book
from gnnlm.gnn.attend import gathered
from gnnlm.gnn.layer import GnnLayer, Sources
from gnnlm.gnn.layer_weights import FoldedWeights
from gnnlm.graph.batch import Graph
from tests.conftest import TINY, merge
from tests.write.test_writing import FP32, PROMPT, built


@pytest.fixture(scope="module", params=["states", "projected"])
def book(
    request: pytest.FixtureRequest, tiny_lm_dir: Path, text_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Book:
    values = merge(TINY, {"lm": {"model": str(tiny_lm_dir)}, "corpus": {"source": str(text_dir)}})
    values = merge(merge(values, FP32), {"cache": {"form": request.param}, "gnn": {"copying": False}})
    return built(values, tmp_path_factory.mktemp("explain") / "run")


def test_influence_is_what_leaving_a_document_out_costs(book: Book) -> None:
    name = book.documents[1].name
    text = ("ban dor ", "kisha luto.")
    got = book.influence(text, [name], predictor="gnn_knn")
    whole = book.score(text, predictors=["gnn_knn"]).gnn_knn
    without = book.score(text, predictors=["gnn_knn"], exclude=name).gnn_knn
    np.testing.assert_allclose(got[name], whole - without)
    assert np.abs(got[name]).max() > 0
    assert set(book.influence(text, predictor="base", most=3)) <= {document.name for document in book.documents}
    assert not np.any(list(book.influence(text, predictor="base", most=2).values()))


def test_attention_is_over_the_neighbours_in_the_graph(book: Book) -> None:
    seen = book.attention(PROMPT)
    assert len(seen.neighbours) == book.model.predictor.graph_k
    layers = book.model.predictor.gnn
    assert layers is not None
    assert seen.weights.shape[:2] == (layers.options.layers, layers.options.heads)
    np.testing.assert_allclose(seen.weights.sum((2, 3)), 1.0, atol=1e-5)
    np.testing.assert_allclose(seen.by_neighbour().sum(1), 1.0, atol=1e-5)
    nearest = book.neighbors(PROMPT + "x", k=3)[-1]
    assert [n.position for n in seen.neighbours[:3]] == [n.position for n in nearest]


def test_attention_is_that_of_the_forward_pass(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sources averaged under the reported attention are what each layer averages."""
    own, checked = GnnLayer._inter, []

    def compared(self: GnnLayer, x_BTD: Tensor, sources: Sources, graph: Graph, folded: FoldedWeights) -> Tensor:
        out_BTD = own(self, x_BTD, sources, graph, folded)
        weights_NHS = self.inter_attention(x_BTD, sources, graph).flatten(0, 1)  # the default preset norms before it
        if sources.projected:
            (table,), (lines_NS,) = sources.tables, sources.lines_NS
            assert isinstance(table, Tensor)
            values_NSHd = table[lines_NS].float()[..., x_BTD.shape[-1] :].unflatten(-1, (self.options.heads, -1))
            want_NHd = torch.einsum("nhs,nshd->nhd", weights_NHS, values_NSHd)
        else:
            found = [gathered(table, lines) for table, lines in zip(sources.tables, sources.lines_NS, strict=True)]
            mean_NHC = torch.einsum("nhs,nsc->nhc", weights_NHS, torch.cat(found, dim=-1))
            want_NHd = torch.einsum("nhc,hdc->nhd", mean_NHC, folded.inter_value_HdC)
        torch.testing.assert_close(out_BTD, want_NHd.reshape(out_BTD.shape), rtol=1e-3, atol=1e-4)
        checked.append(len(weights_NHS))
        return out_BTD

    monkeypatch.setattr(GnnLayer, "_inter", compared)
    book.attention(PROMPT)
    assert len(checked) >= 3


def test_attention_over_the_context(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sums to one over the tokens that the band leaves, and the values under it are what each layer averages."""
    own, outs = GnnLayer._intra, []

    def kept(self: GnnLayer, query_BTD: Tensor, key_BSD: Tensor, value_BSD: Tensor, band_BTS: Tensor) -> Tensor:
        outs.append((own(self, query_BTD, key_BSD, value_BSD, band_BTS)[0, -1], value_BSD[0]))
        return own(self, query_BTD, key_BSD, value_BSD, band_BTS)

    monkeypatch.setattr(GnnLayer, "_intra", kept)
    gnn = book.model.predictor.gnn
    assert gnn is not None
    for prompt in (PROMPT, PROMPT * 5, ""):
        outs.clear()
        seen = book.attention(prompt)
        ids = [book.model.lm.start_token, *book.model.lm.tokenize(prompt)[0]]
        assert seen.context_ids == ids[-gnn.options.context :]
        assert seen.context.shape == (gnn.options.layers, gnn.options.heads, len(seen.context_ids))
        np.testing.assert_allclose(seen.by_context().sum(1), 1.0, atol=1e-5)
        for weights_HS, (out_D, value_SD) in zip(seen.context, outs[-gnn.options.layers :], strict=True):
            value_SHd = value_SD[-weights_HS.shape[1] :].unflatten(-1, (gnn.options.heads, -1))
            want_D = torch.einsum("hs,shd->hd", torch.from_numpy(weights_HS), value_SHd).flatten()
            torch.testing.assert_close(out_D, want_D, rtol=1e-3, atol=1e-4)


def test_attention_does_not_depend_on_the_cache(book: Book) -> None:
    """The same network without its cache computes the neighbours' states anew."""
    bare = Book(replace(book.model, predictor=replace(book.model.predictor, cache=None)))
    np.testing.assert_allclose(book.attention(PROMPT).weights, bare.attention(PROMPT).weights, atol=1e-4)
