"""How long a unit of work takes on this machine, measured with a run's own models on random text and neighbours.

The pieces measured are the ones that the stages run: the base model's `encode`, the index's `search`, the graph
network's step. So the rates include small matrices, memory, and the overhead of every call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from gnnlm.config import SCRATCH, Config
from gnnlm.gnn.gnn_options import GnnOptions, resolve_options
from gnnlm.gnn.model import GnnModel
from gnnlm.graph.batch import Context, Graph, Windows, build_graph
from gnnlm.lm.head import Head, SoftmaxHead
from gnnlm.lm.load_lm import usable_device
from gnnlm.plan.sizes import ModelSizes
from gnnlm.retrieval.search_costs import exact_costs, index_shape, inverted_costs, timed
from gnnlm.train.train_gnn import make_optimizer
from gnnlm.train.train_lm import hf_losses, native_losses

LEAST = 16  # tokens of the first call that is timed
ENOUGH = 0.3  # seconds of a call: one with more tokens would cost a token about as much
SLOW = 2.0  # bfloat16 that takes this many times longer than fp32 is reported, and not tried
DISTINCT = 0.7  # the share of the rows retrieved for a batch that are distinct
PLAIN = 1e-2  # seconds of `_plain_python` where the plan's fixed costs were measured


@dataclass(frozen=True)
class Rates:
    """Seconds of each unit of work."""

    read: float  # the base model reads a token
    learn: float  # the base model learns from a token
    compare: float  # a key is compared with another
    scan: float  # a row in a cluster is compared with a query
    neighbour: float  # a neighbour is kept among the best k
    train: Mapping[int, float]  # the graph network learns from a token with k neighbours
    score: float  # the graph network scores a token with the k of prediction, the softmax included
    row: float  # the states of a row are computed for the cache
    pace: float = 1.0  # how many times longer plain Python takes than where the plan's fixed costs were measured

    def on(self, cores: float) -> Rates:
        """Return the rates with so many times the cores, if all work is spread evenly over them."""
        values = {name: value / cores for name, value in vars(self).items() if name not in ("train", "pace")}
        return replace(self, **values, train={k: value / cores for k, value in self.train.items()})

    def train_at(self, k: int) -> float:
        return self.train[min(self.train, key=lambda known: abs(known - k))]

    def as_dict(self) -> dict[str, float | dict[str, float]]:
        """Return the rates as JSON values."""
        return {**vars(self), "train": {str(k): seconds for k, seconds in self.train.items()}}


NO_TIME = Rates(0, 0, 0, 0, 0, {1: 0}, 0, 0)  # where only sizes matter


# -- operations of the graph network: what times are scaled by -----------------------------------------------------


def row_operations(options: GnnOptions) -> float:
    """Return the operations that compute the states of a neighbour's window."""
    if not options.neighbour_updates:
        return 0.0
    return 14.0 * max(0, options.layers - 1) * options.window * options.width**2


def token_operations(config: Config, sizes: ModelSizes, k: int, cached: bool = False) -> float:
    """Return the operations of the graph network and the softmax for a token with k neighbours."""
    options = resolve_options(config.gnn, sizes.width)
    width = options.width + (options.base_width if options.token_features else 0)
    edge = 4.0 * options.layers * options.window * options.heads * width  # scored and averaged in the sources' space
    updates = 0.0 if cached else DISTINCT * row_operations(options)
    return 2.0 * (sizes.gnn_parameters + sizes.head_parameters) + k * (edge + updates)


def prediction_k(config: Config) -> int:
    return config.eval.graph_k or config.search.graph_k


def rates_of_fork(rates: Rates, config: Config, sizes: ModelSizes, fork: Config, other: ModelSizes) -> Rates:
    """Return the rates of a run whose graph network differs, scaled by operations from those that were measured."""

    def grown(k: int, before: int) -> float:
        return token_operations(fork, other, k) / token_operations(config, sizes, before)

    return replace(
        rates,
        train={p.k: rates.train_at(p.k) * grown(p.k, p.k) for p in fork.train.curriculum},
        score=rates.score * grown(prediction_k(fork), prediction_k(config)),
        row=rates.row * other.gnn_parameters / sizes.gnn_parameters,
    )


# -- measuring -----------------------------------------------------------------------------------------------------


def bf16_slowdown(device: str) -> float:
    """Measure how many times longer a matrix product takes in bfloat16: 100 times without instructions for it."""
    matrix = torch.randn(256, 256, device=usable_device(device))
    half = matrix.bfloat16()
    return timed(lambda: (half @ half)[0, 0].item(), 0.05) / timed(lambda: (matrix @ matrix)[0, 0].item(), 0.05)


def slow_settings(config: Config, slowdown: float, stages: Collection[str]) -> list[str]:
    """Name the settings of these stages that ask for bfloat16 where fp32 is much faster."""
    lm = "lm.train" if config.lm.model == SCRATCH else "lm.finetune"
    precisions = {
        "lm": (f"{lm}.precision", (config.lm.train if lm == "lm.train" else config.lm.finetune).precision),
        "encode": ("lm.dtype", config.lm.dtype),
        "train": ("train.precision", config.train.precision),
    }
    return [
        f"{name}=bf16 is about {slowdown:.0f} times slower than fp32 on this machine: --set {name}=fp32"
        for stage, (name, value) in precisions.items()
        if slowdown > SLOW and stage in stages and value == "bf16"
    ]


def measured_rates(
    config: Config, sizes: ModelSizes, rows: int, lm: Any = None, learning: bool = False, slowdown: float = 1.0
) -> Rates:
    """Measure the rates for a store of so many rows.

    `lm` is the base model if it is to be measured, `learning` too if it is still to be trained. Training in bfloat16
    is measured in fp32 where it is slow, and multiplied by the `slowdown`.
    """
    rates = replace(NO_TIME, pace=timed(_plain_python) / PLAIN)
    device = torch.device(usable_device(config.train.device))
    shape = index_shape(config.index, rows, sizes.width)
    if shape is None:
        costs = exact_costs(sizes.width, config.search.k, str(device))
        rates = replace(rates, compare=costs.row, neighbour=costs.neighbour)
    else:  # keys are compared with clusters in large products
        keys_ND = torch.randn(2048, sizes.width)
        compare = 2 * timed(lambda: keys_ND @ keys_ND.T) / len(keys_ND) ** 2
        costs = inverted_costs(shape.width, config.search.k, shape.code)
        rates = replace(rates, compare=compare, scan=costs.row, neighbour=costs.neighbour)
    if lm is not None:
        rates = replace(rates, read=_read_seconds(lm, config))
        if learning:
            rates = replace(rates, learn=_learn_seconds(lm, config, slowdown))
    else:  # from the number of operations, at the speed of comparing keys
        read = 2.0 * sizes.parameters * rates.compare / sizes.width
        rates = replace(rates, read=read, learn=3.0 * read)
    if config.gnn.layers:
        rows_of_head = max(1, sizes.head_parameters // sizes.width)
        head = SoftmaxHead(torch.randn(rows_of_head, sizes.width)) if lm is None else lm.head
        rates = _network_rates(config, sizes, rates, head.on(device), slowdown)
    return rates


def _plain_python() -> int:
    return sum(n * n for n in range(100_000))


def _token_seconds(work: Callable[[int, int], object], tokens: int, line: int) -> float:
    """Measure the seconds of a token when `work` is done on lines of tokens, on fewer if so many take long."""
    work(1, 1)  # what is compiled or allocated once does not count
    count = min(LEAST, tokens)
    while True:
        length = min(line, count)
        lines = count // length
        seconds = timed(partial(work, lines, length), ENOUGH / 2)
        if seconds > ENOUGH or count == tokens:
            return seconds / (lines * length)
        count = min(tokens, max(4 * count, int(count * ENOUGH / seconds)))


def _read_seconds(lm: Any, config: Config) -> float:
    def read(lines: int, length: int) -> None:
        lm.encode(torch.randint(lm.vocab_size, (lines, length))).cpu().numpy()

    return _token_seconds(read, config.lm.batch_tokens, config.lm.window)


def _learn_seconds(lm: Any, config: Config, slowdown: float) -> float:
    """Measure the base model's loss and gradients on a token; the update of the weights is little beside them."""
    fit = config.lm.train if config.lm.model == SCRATCH else config.lm.finetune
    losses = native_losses if config.lm.model == SCRATCH else hf_losses
    model: torch.nn.Module = lm.model
    device = next(model.parameters()).device
    half = fit.precision == "bf16"

    def learn(lines: int, length: int) -> None:
        text_BT = torch.randint(lm.vocab_size, (lines, length), device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=half and slowdown <= SLOW):
            losses(model, text_BT, text_BT, None)[0].mean().backward()
        model.zero_grad(set_to_none=True)

    model.train().requires_grad_(True)
    seconds = _token_seconds(learn, fit.batch_tokens, fit.block)
    model.eval().requires_grad_(False)
    return seconds * (slowdown if half and slowdown > SLOW else 1.0)


def _network_rates(config: Config, sizes: ModelSizes, rates: Rates, head: Head, slowdown: float) -> Rates:
    """Measure the graph network: its training at every k, its scoring, and the states of its cache."""
    options, train, width, device = resolve_options(config.gnn, sizes.width), config.train, sizes.width, head.device
    network = GnnModel(options, head).to(device)
    network.checkpoint = train.checkpoint
    optimizer = make_optimizer(network, train)
    half = train.precision == "bf16"

    def losses(lines: int, length: int, k: int) -> torch.Tensor:
        states_BTD, _ = network(random_graph(lines, length, k, width, options.window).to(device))
        targets_N = torch.zeros(lines * length, dtype=torch.long, device=device)
        return -head.target_log_probs(states_BTD.flatten(0, 1).float(), targets_N)

    def learn(lines: int, length: int, k: int) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=half and slowdown <= SLOW):
            losses(lines, length, k).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    network.train()
    tokens = train.block * train.batch_blocks
    factor = slowdown if half and slowdown > SLOW else 1.0
    learned = {
        k: factor * _token_seconds(partial(learn, k=k), tokens, train.block) for k in {p.k for p in train.curriculum}
    }
    network.eval()
    with torch.inference_mode():
        block = config.eval.block
        score = _token_seconds(partial(losses, k=prediction_k(config)), block, block)
        rows = random_graph(1, 64, LEAST, width, options.window).to(device)
        row = timed(lambda: list(network.sources(rows))) / len(rows.windows.rows_U)
    return replace(rates, train=learned, score=score, row=row)


def random_graph(lines: int, length: int, k: int, width: int, window: int) -> Graph:
    """Build blocks of random states whose neighbours are as often shared as those of a text."""
    rows = max(2, int(lines * length * k / 0.76))  # drawn at random, the share DISTINCT of them is distinct
    table_PD = torch.randn(min(rows, 4096), width).half()
    context = Context(
        torch.randn(lines, length, width),
        torch.arange(length).expand(lines, length),
        torch.zeros(lines, length, dtype=torch.long),
    )

    def windows(rows_U: torch.Tensor) -> Windows:
        place_UW = torch.arange(len(rows_U) * window).view(len(rows_U), window)
        read = torch.randint(len(table_PD), (place_UW.numel(),))  # gathered, as from a store
        return Windows(rows_U, place_UW, torch.ones_like(place_UW, dtype=torch.bool), table_PD[read].float(), read * 0)

    return build_graph(context, torch.randint(rows, (lines, length, k)), torch.rand(lines, length, k), windows)
