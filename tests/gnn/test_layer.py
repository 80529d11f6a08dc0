"""The network against the edge-list oracle, for every preset, forward and gradients."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gnnlm.gnn.model as model_module
from gnnlm.config import GnnConfig
from gnnlm.errors import ConfigError
from gnnlm.gnn.gnn_options import resolve_options
from gnnlm.gnn.layer import GnnLayer, Sources
from gnnlm.gnn.model import GnnModel
from gnnlm.graph.batch import Context, Windows, build_graph
from tests.gnn.graphs import random_graph
from tests.reference.layer import run_model

CASES = {
    "paper": GnnConfig(preset="paper", heads=2, context=4, dropout=0),
    "paper, one head": GnnConfig(preset="paper", heads=1, layers=2, context=3, dropout=0),
    "released": GnnConfig(preset="released", heads=2, context=4, dropout=0),
    "default": GnnConfig(heads=2, context=4, dropout=0),
    "default with neighbour updates": GnnConfig(heads=2, context=4, neighbour_updates=True, dropout=0),
    "own width": GnnConfig(preset="released", heads=3, width=6, context=4, dropout=0),
    "default, own width": GnnConfig(heads=3, width=6, context=4, dropout=0),
    "wide window": GnnConfig(preset="paper", heads=2, left=2, right=2, context=4, dropout=0),
    "no copying": GnnConfig(heads=2, context=4, copying=False, dropout=0),
    "updates, no copying": GnnConfig(heads=2, context=4, copying=False, neighbour_updates=True, dropout=0),
    "centre of the default": GnnConfig(heads=2, inter="centre", context=4, dropout=0),
}


@dataclasses.dataclass
class Embeddings:
    """The part of a softmax that the network uses, in any precision."""

    embeddings_VD: torch.Tensor

    @property
    def width(self) -> int:
        return self.embeddings_VD.shape[1]


EMBEDDINGS = torch.randn(11, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
HEAD = Embeddings(EMBEDDINGS)


def make_model(config: GnnConfig, width: int = 8, seed: int = 0) -> GnnModel:
    """A model with every parameter moved away from its start, so that nothing is hidden by a zero."""
    torch.manual_seed(seed)
    model = GnnModel(resolve_options(config, width), HEAD).double()
    for parameter in model.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


@pytest.mark.parametrize("name", CASES)
def test_matches_edge_lists(name: str) -> None:
    config = CASES[name]
    model = make_model(config)
    graph = random_graph(window=config.left + 1 + config.right)
    got, _ = model(graph)
    torch.testing.assert_close(got, run_model(model, graph, EMBEDDINGS), rtol=1e-10, atol=1e-10)


PRESETS = ["paper", "released", "default", "default with neighbour updates", "no copying"]


@pytest.mark.parametrize("chunk", [2048, 3])
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_gradients_match_edge_lists(name: str, checkpoint: bool, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "CHUNK_SLOTS", chunk)  # three slots: a window at a time
    model = make_model(CASES[name])
    model.checkpoint = checkpoint
    graph = random_graph()
    ours = gradients(model, model(graph)[0])
    theirs = gradients(model, run_model(model, graph, EMBEDDINGS))
    for parameter, gradient in ours.items():
        largest = float(theirs[parameter].abs().max())
        torch.testing.assert_close(gradient, theirs[parameter], rtol=1e-10, atol=1e-10 * max(1.0, largest))


def gradients(model: GnnModel, out: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a fixed sum of the result, by trained parameter."""
    weights = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(out.dtype)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad((out * weights).sum(), list(trained.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(trained.items(), found, strict=True)}


@pytest.mark.parametrize("name", PRESETS)
def test_single_precision(name: str) -> None:
    """Results against the largest result, gradients against the largest gradient."""
    model, graph = make_model(CASES[name]), random_graph()
    exact = run_model(model, graph, EMBEDDINGS)
    want = gradients(model, exact)
    single = dataclasses.replace(
        graph,
        context_BTD=graph.context_BTD.float(),
        similarity_BTK=graph.similarity_BTK.float(),
        windows=dataclasses.replace(graph.windows, states_PD=graph.windows.states_PD.float()),
    )
    got, _ = model.float()(single)
    assert (got - exact).abs().max() <= 1e-5 * exact.abs().max()
    largest = max(gradient.abs().max() for gradient in want.values())
    for parameter, gradient in gradients(model, got).items():
        assert (gradient - want[parameter]).abs().max() <= 1e-5 * largest, parameter


def test_a_copier_starts_closed_and_copies_when_opened() -> None:
    """At the start nothing is added; one open gate adds the token features of the neighbours, and nothing else."""
    torch.manual_seed(0)
    config = GnnConfig(heads=2, layers=1, context=4, copying=True, inter="centre", dropout=0)
    model, graph = GnnModel(resolve_options(config, 8), HEAD).double(), random_graph(k=1)
    torch.testing.assert_close(model(graph)[0], graph.context_BTD, rtol=0, atol=0)
    layer = model.layer(0)
    layer.gate_H.data.fill_(0.03)
    added = model(graph)[0] - graph.context_BTD
    centre = graph.windows.place_UW[graph.rows_BTK[..., 0], 1]
    token = torch.where(graph.edge_BTK[..., 0], graph.windows.tokens_P[centre], -1)
    copied = torch.nn.functional.layer_norm(EMBEDDINGS, (8,))[token.clamp(min=0)] * (token >= 0)[..., None]
    openness = torch.sigmoid(2 + 0.3 * (graph.similarity_BTK[..., 0] - 1) / 0.01)
    torch.testing.assert_close(added, 0.3 * openness[..., None] * copied)


def test_copying_needs_tokens_and_the_same_width() -> None:
    assert not resolve_options(GnnConfig(width=16, heads=2), 8).copying
    for wrong in (GnnConfig(copying=True, width=16, heads=2), GnnConfig(copying=True, token_features=False, heads=2)):
        with pytest.raises(ConfigError, match=r"gnn\.copying needs"):
            resolve_options(wrong, 8)


def test_unused_weights_are_frozen() -> None:
    model = make_model(CASES["paper"])
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen == ["layers.2.query.1", "layers.2.output.1"]
    loss = model(random_graph())[0].sum()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_parameter_count_of_the_paper() -> None:
    with torch.device("meta"):
        model = GnnModel(resolve_options(GnnConfig(preset="paper", heads=16), 1024), HEAD)
        released = GnnModel(resolve_options(GnnConfig(preset="released", heads=8), 1024), HEAD)
        enwik8 = GnnModel(resolve_options(GnnConfig(preset="paper", heads=8), 512), HEAD)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == 26  # 247M + 26M = 273M
    assert round(sum(p.numel() for p in released.parameters()) / 1e6, 1) == 26.8  # 274M
    assert round(sum(p.numel() for p in enwik8.parameters()) / 1e6) == 7  # 41M + 7M = 48M


def test_starts_as_the_base_model() -> None:
    torch.manual_seed(1)
    model = GnnModel(resolve_options(GnnConfig(heads=2), 8), HEAD).double().eval()
    graph = random_graph()
    torch.testing.assert_close(model(graph)[0], graph.context_BTD, rtol=0, atol=0)


def test_released_starts_as_the_public_code() -> None:
    """Relations with the fans of their whole tensor, linear layers as PyTorch makes them: close to LayerNorm(h)."""
    torch.manual_seed(0)
    model = GnnModel(resolve_options(GnnConfig(preset="released", heads=4), 256), HEAD)
    layer, linear = model.layer(0), torch.nn.Linear(256, 256)
    for relation in (layer.attention_EHdd, layer.feature_EHdd):
        assert relation.std().item() == pytest.approx(0.009, abs=2e-4)
    for name in ("query", "key", "value", "output"):
        for kind in (0, 1):
            assert getattr(layer, name)[kind].std().item() == pytest.approx(linear.weight.std().item(), rel=0.02)
            bias = getattr(layer, f"{name}_bias")[kind]
            assert bias.std().item() == pytest.approx(linear.bias.std().item(), rel=0.2)
    graph = random_graph(tokens=64, width=256)
    normed = torch.nn.functional.layer_norm(graph.context_BTD, (256,))
    away = (model.double().eval()(graph)[0] - normed).norm() / normed.norm()
    assert 0.02 < away < 0.08


@pytest.mark.parametrize("name", ["dropout", "attention_dropout", "neighbour_dropout"])
def test_dropout_is_for_training_only(name: str) -> None:
    """Each kind of dropout moves the result, and on average changes little; a frozen network has none."""
    others = dict.fromkeys({"dropout", "attention_dropout", "neighbour_dropout"} - {name}, 0.0)
    model, graph = make_model(GnnConfig(preset="released", heads=2, context=4, **others, **{name: 0.1})), random_graph()
    still = model(graph)[0]
    torch.testing.assert_close(model(graph)[0], still, rtol=0, atol=0)
    model.train()
    many = torch.stack([model(graph)[0] for _ in range(100)])
    assert (many.std(0) > 0).float().mean() > 0.9
    assert (many.mean(0) - still).abs().mean() < 0.35 * many.std(0).mean()
    model.checkpoint = True
    torch.manual_seed(0)
    whole = gradients(model, model(graph)[0])
    model.checkpoint = False
    torch.manual_seed(0)
    for parameter, gradient in gradients(model, model(graph)[0]).items():
        torch.testing.assert_close(gradient, whole[parameter])


@given(seed=st.integers(0, 1000))
def test_windows_do_not_depend_on_who_shares_them(seed: int) -> None:
    """A block alone and a block beside another that shares its rows give the same states."""
    model = make_model(CASES["paper"])
    graph = random_graph(seed=seed)
    both, _ = model(graph)
    parts = {
        name: getattr(graph, name)[1:]
        for name in ("context_BTD", "position_BT", "document_BT", "rows_BTK", "edge_BTK", "similarity_BTK")
    }
    alone, _ = model(dataclasses.replace(graph, **parts))
    torch.testing.assert_close(both[1:], alone, rtol=1e-12, atol=1e-12)


def test_the_worked_example_of_the_module() -> None:
    """The numbers that the docstring of gnn/layer.py works out by hand."""
    config = GnnConfig(preset="paper", layers=1, left=0, right=0)
    layer = GnnLayer(resolve_options(config, 1), last=True)
    for parameter in layer.parameters():
        torch.nn.init.ones_(parameter)
    one = torch.ones(1, 1, 1)
    context = Context(one, torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long))
    states = torch.tensor([[0.0], [math.log(3)]])
    lines, real = torch.tensor([[0, 1]]), torch.ones(1, 2, dtype=torch.bool)
    windows = Windows(torch.tensor([4, 9]), lines.T, real.T, states, torch.tensor([5, 6]))
    graph = build_graph(context, torch.tensor([[[4, 9]]]), torch.ones(1, 1, 2), lambda _: windows)
    past = (one[:, :0], one[:, :0])
    got, _ = layer.eval()(one, past, torch.ones(1, 1, 1, dtype=torch.bool), Sources((states,), (lines,), real), graph)
    assert got.item() == pytest.approx(1 + 1 + 0.75 * math.log(3))
