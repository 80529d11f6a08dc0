"""A few seconds of measuring: the rates of this machine, with the models of a run, on made-up text and neighbours.

The pieces measured are the ones that the stages run: the base model's `encode`, the index's `search`, the graph
network's step. So the rates hold what formulas miss: small matrices, memory, the overhead of every call.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gnnlm.artifact import Draft
from gnnlm.config import SCRATCH, Config
from gnnlm.errors import ConfigError, GnnlmError
from gnnlm.gnn.gnn_options import resolve_options
from gnnlm.gnn.model import GnnModel
from gnnlm.graph.batch import Context, Graph, Windows, build_graph
from gnnlm.lm.head import Head, SoftmaxHead
from gnnlm.retrieval.timing import time_exact, time_inverted, timed
from gnnlm.run.plan import index_shape
from gnnlm.run.rates import DISTINCT, Rates, rates_by_size
from gnnlm.run.sizes import Description, amounts
from gnnlm.run.speed import Speed
from gnnlm.train.train_gnn import make_optimizer
from gnnlm.train.train_lm import LossFunction, hf_losses, native_losses

if TYPE_CHECKING:
    from gnnlm.run.run import Run

A_TRIAL = 1.0  # seconds that one call may take, by the estimate from sizes; work that would take longer is cut short
LEAST = 16  # tokens of a call
TOO_LONG = 5.0  # seconds: where the least work would take longer, the estimate from sizes stands
PLAIN = 1e-2  # seconds of `_plain_python` where the plan's fixed costs were measured
LARGEST = 4e8  # parameters of an untrained model that is built only to be measured


def measured_rates(run: Run, about: Description, speed: Speed, learning: bool = True) -> Rates:
    """The rates of this machine for a run; of training the base model only if it is still to be trained."""
    config, rates = run.config, rates_by_size(run.config, about, speed)
    rates = replace(rates, stage=_stage_seconds(), pace=timed(_plain_python) / PLAIN)
    lm = _model(run, about)
    if lm is not None:
        rates = replace(rates, read=_read_seconds(lm, config, rates))
        if config.lm.is_trained and learning:
            rates = _learning(lm, config, rates)
    shape = index_shape(config.index, _rows(run), about.width)
    if shape is None:
        exact = time_exact(about.width, config.search.k, run.parts.device)
        rates = replace(rates, compare=exact.row, neighbour=exact.neighbour)
    else:  # keys are compared with clusters in large products, whose speed is known
        lists = time_inverted(shape.width, config.search.k, shape.timed)
        rates = replace(rates, scan=lists.row, neighbour=lists.neighbour)
    return _network(run, about, rates, getattr(lm, "head", None)) if config.gnn.layers else rates


def _rows(run: Run) -> int:
    """The rows of the store; very many while the amount of text is not known."""
    try:
        return amounts(run)["train"].tokens
    except ConfigError:
        return 10**9


def _plain_python() -> int:
    return sum(n * n for n in range(100_000))


def _stage_seconds() -> float:
    """Seconds of a small artifact: written, checked and moved into place."""

    def build() -> None:
        with tempfile.TemporaryDirectory() as folder, Draft(Path(folder) / "artifact", "plan", {}) as draft:
            draft.write_text("facts.json", json.dumps(list(range(1000))))
            draft.commit()
            draft.finish({})

    return timed(build, 0.05)


def _model(run: Run, about: Description) -> Any:
    """The base model of a run, or an untrained one of its shape; None if it is not at hand, or very large."""
    from gnnlm.lm.architecture import build_model
    from gnnlm.lm.load_lm import usable_device
    from gnnlm.lm.native_lm import NativeLM

    if run.config.lm.model == SCRATCH:
        if about.parameters > LARGEST:
            return None
        model = build_model(run.config.lm.architecture, about.vocabulary)
        return NativeLM(model.to(usable_device(run.config.lm.device)))
    with suppress(GnnlmError):
        return run.parts.source_lm
    return None


def _text(vocabulary: int, tokens: int, window: int, a_token: float) -> Tensor:
    """Made-up tokens in windows, [B, T]; fewer where they would take too long."""
    tokens = int(min(tokens, max(LEAST, A_TRIAL / a_token)))
    window = min(window, tokens)
    return torch.randint(vocabulary, (max(1, tokens // window), window))


def _read_seconds(lm: Any, config: Config, rates: Rates) -> float:
    if LEAST * rates.read > TOO_LONG:
        return rates.read
    text_BT = _text(lm.vocab_size, config.lm.batch_tokens, config.lm.window, rates.read)
    return timed(lambda: lm.encode(text_BT).cpu().numpy()) / text_BT.numel()


def _learning(lm: Any, config: Config, rates: Rates) -> Rates:
    """With the seconds of a token that the base model learns from, and of an update of its weights."""
    fit = config.lm.train if config.lm.model == SCRATCH else config.lm.finetune
    losses: LossFunction = native_losses if config.lm.model == SCRATCH else hf_losses
    model: torch.nn.Module = lm.model
    if LEAST * rates.learn > TOO_LONG:
        return rates
    trained = [p for p in model.parameters() if p.is_floating_point()]
    text_BT = _text(lm.vocab_size, fit.batch_tokens, fit.block, rates.learn).to(trained[0].device)

    def learn() -> None:
        with torch.autocast(text_BT.device.type, torch.bfloat16, enabled=fit.precision == "bf16"):
            losses(model, text_BT, text_BT, None)[0].mean().backward()
        model.zero_grad(set_to_none=True)

    model.train().requires_grad_(True)
    seconds = timed(learn) / text_BT.numel()
    model.eval().requires_grad_(False)
    values = 0 if config.lm.finetune.kind == "lora" else sum(p.numel() for p in trained)
    return replace(rates, learn=seconds, update=_update_seconds(values))


def _update_seconds(values: int) -> float:
    """Seconds of Adam's update of so many values, from an update of some."""
    weight = torch.nn.Parameter(torch.zeros(min(max(values, 1), 2_000_000)))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight])
    return timed(lambda: optimizer.step()) * values / weight.numel()


def _network(run: Run, about: Description, rates: Rates, head: Head | None) -> Rates:
    """With the seconds of the graph network: its training at every k, and its scoring."""
    config, device = run.config, torch.device(run.parts.device)
    options, train = resolve_options(config.gnn, about.width), config.train
    softmax = (SoftmaxHead(torch.randn(about.vocabulary, about.width)) if head is None else head).on(device)
    model = GnnModel(options, softmax).to(device)
    model.checkpoint = train.checkpoint
    optimizer = make_optimizer(model, train)

    def losses(graph: Graph) -> Tensor:
        targets_N = torch.zeros(graph.document_BT.numel(), dtype=torch.long, device=device)
        states_BTD, _ = model(graph)
        return -softmax.target_log_probs(states_BTD.flatten(0, 1).float(), targets_N)

    def step(graph: Graph) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=train.precision == "bf16"):
            losses(graph).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def a_token(work: Any, tokens: int, block: int, k: int, guess: float) -> float:
        if LEAST * guess > TOO_LONG:
            return guess
        tokens = int(min(tokens, max(LEAST, A_TRIAL / guess)))
        block = min(block, tokens)

        def once() -> None:
            work(made_up_graph(tokens // block, block, k, about.width, options.window).to(device))

        return timed(once) / (tokens // block * block)

    model.train()
    trained = {
        k: a_token(step, train.block * train.batch_blocks, train.block, k, guess) for k, guess in rates.train.items()
    }
    model.eval()
    block, k = config.eval.block, config.eval.graph_k or config.search.graph_k
    with torch.inference_mode():
        score = a_token(losses, block, block, k, rates.score)
        rates = replace(rates, train=trained, score=score)
        if 64 * LEAST * rates.row > TOO_LONG:
            return rates
        rows = made_up_graph(1, 64, LEAST, about.width, options.window).to(device)
        row = timed(lambda: list(model.sources(rows))) / len(rows.windows.rows_U)
    return replace(rates, row=row)


def made_up_graph(batch: int, block: int, k: int, width: int, window: int) -> Graph:
    """Blocks of random states whose neighbours are as often shared as those of a text."""
    rows = max(2, int(batch * block * k / 0.76))  # so many rows, drawn at random, leave the usual share distinct
    assert 0.6 < DISTINCT < 0.8
    table_PD = torch.randn(min(rows, 4096), width).half()
    context = Context(
        torch.randn(batch, block, width),
        torch.arange(block).expand(batch, block),
        torch.zeros(batch, block, dtype=torch.long),
    )

    def windows(rows_U: Tensor) -> Windows:
        place_UW = torch.arange(len(rows_U) * window).view(len(rows_U), window)
        read = torch.randint(len(table_PD), (place_UW.numel(),))  # gathered, as from a store
        return Windows(rows_U, place_UW, torch.ones_like(place_UW, dtype=torch.bool), table_PD[read].float(), read * 0)

    return build_graph(context, torch.randint(rows, (batch, block, k)), torch.rand(batch, block, k), windows)
