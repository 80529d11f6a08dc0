"""How long the units of work take that a run is made of: from the sizes of its models; `calibrate.py` measures it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gnnlm.config import SCRATCH, Config
from gnnlm.run.speed import EFFICIENCY, Speed

if TYPE_CHECKING:
    from gnnlm.run.sizes import Description

SLOW = 2.0  # so many times slower is worth a word
DISTINCT = 0.7  # share of the retrieved rows of a batch that are distinct


@dataclass(frozen=True)
class Rates:
    """Seconds of each unit of work."""

    read: float  # the base model reads a token
    learn: float  # the base model learns from a token
    update: float  # a step's update of the base model's weights
    compare: float  # a key is compared with another
    scan: float  # a row in a cluster is compared with a query
    neighbour: float  # a neighbour is found: its place among the best k
    train: Mapping[int, float]  # the graph network learns from a token with k neighbours
    score: float  # it scores a token with the k of prediction, the softmax included
    row: float  # a row's states are computed for the cache
    stage: float = 0.0  # every stage: opening and checking what it reads, writing small files
    pace: float = 1.0  # how many times longer plain Python takes than where the fixed costs were measured

    def on(self, cores: float) -> Rates:
        """With so many times the cores, if all work is spread evenly over them."""
        values = {name: value / cores for name, value in vars(self).items() if name not in ("train", "stage", "pace")}
        return replace(self, **values, train={k: value / cores for k, value in self.train.items()})

    def train_at(self, k: int) -> float:
        return self.train[min(self.train, key=lambda known: abs(known - k))]


NO_TIME = Rates(0, 0, 0, 0, 0, 0, {1: 0}, 0, 0)  # where only sizes matter


@dataclass(frozen=True)
class NetworkCost:
    """Multiplications and additions of a graph network for one token: for itself, and for each of its neighbours."""

    token: float
    edge: float
    updates: float  # for each neighbour, while its window's states are not cached
    row: float

    @classmethod
    def of(cls, config: Config, about: Description) -> NetworkCost:
        from gnnlm.gnn.gnn_options import resolve_options

        options = resolve_options(config.gnn, about.width)
        width = options.width + (options.base_width if options.token_features else 0)
        edge = (
            4.0 * options.layers * options.window * options.heads * width
        )  # scored and averaged in the sources' space
        updates = 14.0 * (options.layers - 1) * options.window * options.width**2 if options.neighbour_updates else 0.0
        token = 2.0 * about.gnn_parameters + 2.0 * about.head_parameters
        return cls(token, edge, updates, about.gnn_parameters + updates)

    def at(self, k: int, cached: bool = False) -> float:
        return self.token + k * (self.edge + (0.0 if cached else DISTINCT * self.updates))


def slow_settings(config: Config, speed: Speed, stages: Collection[str]) -> list[str]:
    """Settings of these stages that ask for bfloat16 where fp32 is much faster, each with that value."""
    training = "lm.train.precision" if config.lm.model == SCRATCH else "lm.finetune.precision"
    lm = config.lm.train if config.lm.model == SCRATCH else config.lm.finetune
    asked = {"lm": (training, lm.precision), "encode": ("lm.dtype", config.lm.dtype)}
    asked["train"] = ("train.precision", config.train.precision)
    ratio = speed.fp32 / speed.bf16
    return [
        f"{name}=bf16 is about {ratio:.0f} times slower than fp32 on this machine: --set {name}=fp32"
        for stage, (name, value) in asked.items()
        if stage in stages and value == "bf16" and ratio > SLOW
    ]


def rates_by_size(config: Config, about: Description, speed: Speed) -> Rates:
    """Times from the numbers of multiplications, at the speed of large matrix products."""
    cost, device = NetworkCost.of(config, about), speed.of("fp32")
    k = config.eval.graph_k or config.search.graph_k
    precision = config.lm.train.precision if config.lm.model == SCRATCH else config.lm.finetune.precision
    compare = 2.0 * about.width / (EFFICIENCY * speed.processor)
    return Rates(
        read=2.0 * about.parameters / speed.of(config.lm.dtype),
        learn=6.0 * about.parameters / speed.of(precision),
        update=0.0,
        compare=compare,
        scan=compare,
        neighbour=0.0,
        train={p.k: 3.0 * cost.at(p.k) / speed.of(config.train.precision) for p in config.train.curriculum},
        score=cost.at(k) / device,
        row=cost.row / device,
    )
