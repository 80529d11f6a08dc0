"""The form of the cache that `auto` chooses: the fastest on some tokens, of those that stay within the limit."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from gnnlm.artifact import human_bytes
from gnnlm.config import CacheConfig
from gnnlm.gnn.model import GnnModel
from gnnlm.graph.batch import Context, Graph
from gnnlm.predict.graphs import GraphBuilder
from gnnlm.predict.window_cache import WindowCache, cache_bytes, make_tables, table_shapes
from gnnlm.progress import say
from gnnlm.retrieval.neighbours import Neighbours

TRIAL_TOKENS = 128  # tokens on which `auto` times each form,
TRIAL_SECONDS = 1.0  # for at least this many seconds in all,
TRIAL_ROUNDS = 20  # or for this many rounds
NOISE = 0.1  # forms whose times differ by less than this share count as equally fast


@dataclass(frozen=True)
class Trial:
    """Tokens with their neighbours, on which the forms of a cache are timed."""

    context: Context
    neighbours: Neighbours


@dataclass(frozen=True)
class FormTrial:
    """The size of the tables of a form, and the seconds that the trial's tokens took with them."""

    form: str
    bytes: int
    seconds: float


@torch.inference_mode()
def choose_form(
    model: GnnModel, graphs: GraphBuilder, trial: Trial, config: CacheConfig, device: str
) -> tuple[str, list[FormTrial]]:
    """Return the configured form; for `auto`, the fastest form on the trial's tokens that stays within the limit.

    Of forms that are about as fast as the fastest, the smallest is chosen.
    """
    if config.form != "auto":
        return config.form, []
    place = torch.device(device)
    tokens = trial.context.document_BT.numel()

    def made(states: bool) -> Graph:
        return graphs(trial.context, trial.neighbours, states).to(place)

    graph = made(True)
    windows = graph.windows  # tables that hold only these windows, in their order
    own = replace(graph, windows=replace(windows, rows_U=torch.arange(len(windows.rows_U), device=place)))
    sizes: dict[str, int] = {"none": 0}
    work: dict[str, Callable[[], object]] = {"none": lambda: model(made(True))}
    for form in ("states",) if config.dtype == "pq" else ("states", "projected"):
        sizes[form] = cache_bytes(table_shapes(model.options, form == "projected", len(graphs.store)), config)
        tables = [table.flatten(0, -2) for table in make_tables(model, windows, form == "projected")]
        if config.dtype == "fp16":
            tables = [table.half() for table in tables]
        cache = WindowCache(model, graphs.store, form == "projected", tables)

        def score(cache: WindowCache = cache) -> None:
            made(False)
            model(own, cache=cache)

        work[form] = score
    seconds = _seconds(work)
    trials = [FormTrial(form, sizes[form], seconds[form]) for form in work]
    for tried in trials:
        speed = tokens / tried.seconds
        say(f"cache: tried {tried.form} ({human_bytes(tried.bytes)}): {speed:,.0f} tokens/s")
    fitting = [tried for tried in trials if tried.bytes <= config.limit_gb * 1e9]
    slowest = (1 + NOISE) * min(tried.seconds for tried in fitting)
    chosen = min((tried for tried in fitting if tried.seconds <= slowest), key=lambda tried: tried.bytes)
    return chosen.form, trials


def _seconds(work: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median time of each piece of work; they take turns, so that a slow moment affects all equally."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for number in range(1 + TRIAL_ROUNDS):
        for name, job in work.items():
            began = time.perf_counter()
            job()
            if number:  # the first round warms up
                times[name].append(time.perf_counter() - began)
        if number >= 3 and all(sum(each) >= TRIAL_SECONDS for each in times.values()):
            break
    return {name: statistics.median(each) for name, each in times.items()}
