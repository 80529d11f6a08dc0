"""Cached forms against the network that computes its neighbour states, and against the edge-list oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnlm.artifact import Artifact, Draft
from gnnlm.config import CacheConfig, GnnConfig
from gnnlm.datastore.quantize import CodedTable
from gnnlm.datastore.store import Segment, Store
from gnnlm.datastore.tables import JoinedTable
from gnnlm.errors import ArtifactError, ConfigError
from gnnlm.gnn.model import GnnModel
from gnnlm.graph.batch import Context, Graph
from gnnlm.predict import cache_form
from gnnlm.predict import window_cache as module
from gnnlm.predict.cache_build import build_cache
from gnnlm.predict.cache_form import Trial
from gnnlm.predict.graphs import GraphBuilder
from gnnlm.predict.window_cache import WindowCache, open_cache, table_shapes
from gnnlm.retrieval.neighbours import Neighbours
from tests.gnn.test_layer import CASES, EMBEDDINGS, make_model
from tests.reference.layer import run_model

ROWS = 40


@dataclass(frozen=True)
class Source:
    """A store of small documents, and tokens with shared, doubled and missing neighbours in it."""

    graphs: GraphBuilder
    trial: Trial

    def graph(self, states: bool = True) -> Graph:
        return self.graphs(self.trial.context, self.trial.neighbours, states)

    def coded(self, table: CodedTable) -> Source:
        (segment,) = self.graphs.store.segments
        return replace(self, graphs=replace(self.graphs, store=Store([segment.coded(table)])))


def source(k: int = 5, rows: int = ROWS, width: int = 8, seed: int = 0) -> Source:
    g = torch.Generator().manual_seed(seed)
    starts = torch.tensor([0, 7, 8, 20, rows])
    states, tokens = torch.randn(rows, width, generator=g).half(), torch.randint(-1, 11, (rows,), generator=g)
    queries = torch.randn(12, width, generator=g)
    torch.randint(0, 11, (12,))
    document = torch.tensor([0] * 5 + [1] * 7)
    ids = torch.randint(0, rows, (12, k), generator=g)
    ids[:, 1] = ids[:, 0]
    ids[3], ids[4, 2:] = -1, -1
    similarity = 0.9 + 0.1 * torch.rand(12, k, generator=g)
    context = Context(queries[None], torch.arange(12)[None], document[None])
    graphs = GraphBuilder(Store([Segment(states, tokens, starts)]), left=1, right=1)
    return Source(graphs, Trial(context, Neighbours(ids[None], similarity[None])))


def scored(model: GnnModel, data: Source, cache: WindowCache | None) -> Tensor:
    with torch.inference_mode():
        return model(data.graph(states=cache is None), cache=cache)[0]


def build(draft: Draft, model: GnnModel, data: Source, config: CacheConfig) -> Artifact:
    made_from = [{"segment": number} for number in range(len(data.graphs.store.segments))]
    return build_cache(draft, model, data.graphs, data.trial, config, 0, "cpu", made_from)


def built(tmp_path: Path, model: GnnModel, data: Source, **config: Any) -> WindowCache | None:
    with Draft(tmp_path / "cache", "cache", {}) as draft:
        artifact = build(draft, model, data, CacheConfig(**config))
    return open_cache(artifact, model, data.graphs.store, "cpu")


NAMES = (
    "paper",
    "released",
    "default",
    "default with neighbour updates",
    "own width",
    "centre of the default",
    "no copying",
)


@pytest.mark.parametrize("form", ["states", "projected"])
@pytest.mark.parametrize("name", NAMES)
def test_single_precision_forms(tmp_path: Path, name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARD", 16)  # shards that cut documents
    model, data = make_model(CASES[name]).float(), source()
    cache = built(tmp_path, model, data, form=form, dtype="fp32")
    assert cache is not None
    got = scored(model, data, cache)
    computed = scored(model, data, None)
    largest = max(1.0, float(computed.abs().max()))
    torch.testing.assert_close(got, computed, rtol=1e-5, atol=5e-6 * largest)
    graph = data.graph()
    want = run_model(model, graph, EMBEDDINGS.float())
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5 * largest)


@pytest.mark.parametrize("form", ["states", "projected"])
def test_half_precision_rounds_the_tables_and_nothing_else(tmp_path: Path, form: str) -> None:
    model, data = make_model(CASES["paper"]).float(), source()
    exact = built(tmp_path / "a", model, data, form=form, dtype="fp32")
    half = built(tmp_path / "b", model, data, form=form, dtype="fp16")
    assert exact is not None
    assert half is not None
    rounded = WindowCache(
        model, exact.store, exact.projected, [t.half().float() for t in exact.tables if isinstance(t, Tensor)]
    )
    torch.testing.assert_close(scored(model, data, half), scored(model, data, rounded), rtol=1e-6, atol=1e-6)


def test_codes_are_read_as_the_states_they_stand_for(tmp_path: Path) -> None:
    model, data = make_model(CASES["paper"]).float(), source(rows=400)
    cache = built(tmp_path, model, data, form="states", dtype="pq", bytes=4)
    assert cache is not None
    decoded = [t.decode(torch.arange(len(t))) for t in cache.tables if isinstance(t, CodedTable)]
    assert len(decoded) == 3
    plain = WindowCache(model, data.graphs.store, False, decoded)
    torch.testing.assert_close(scored(model, data, cache), scored(model, data, plain), rtol=1e-4, atol=1e-4)


def test_a_quantized_store_is_read_as_its_decoded_states(tmp_path: Path) -> None:
    """The whole way: oracle, network and cache over the states that the codes stand for."""
    from gnnlm.datastore.quantize import train_quantizer

    model, data = make_model(CASES["paper"]).float(), source(rows=400)
    states = data.graphs.store.states(torch.arange(400)).numpy()
    quantizer = train_quantizer(states, 4, seed=0)
    table = CodedTable(torch.from_numpy(quantizer.encode(states)), quantizer)
    coded = data.coded(table)
    graph = coded.graph()
    torch.testing.assert_close(
        graph.windows.states_PD[graph.windows.place_UW[:, 1]], table.decode(graph.windows.rows_U), rtol=1e-5, atol=1e-5
    )
    want = run_model(model, graph, EMBEDDINGS.float())
    torch.testing.assert_close(scored(model, coded, None), want, rtol=1e-4, atol=1e-4)
    cache = built(tmp_path, model, coded, form="projected", dtype="fp32")
    torch.testing.assert_close(scored(model, coded, cache), want, rtol=1e-4, atol=1e-4)


def test_resumed_tables_are_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARD", 16)
    model, data = make_model(CASES["paper"]).float(), source()
    config = CacheConfig(form="projected")

    def made_in(folder: Path) -> Any:
        with Draft(folder / "cache", "cache", {}) as draft:
            return build(draft, model, data, config)

    whole = made_in(tmp_path / "whole")
    made, calls = module.lines_of, 0

    def interrupted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return made(*args)

    monkeypatch.setattr(module, "lines_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made_in(tmp_path / "twice")
    monkeypatch.setattr(module, "lines_of", made)
    resumed = made_in(tmp_path / "twice")
    assert resumed.fingerprint == whole.fingerprint  # of every byte of its parts


@pytest.mark.parametrize(
    "config",
    [{"form": "states"}, {"form": "projected", "dtype": "fp32"}, {"form": "states", "dtype": "pq", "bytes": 4}],
)
@pytest.mark.parametrize("name", ["paper", "default"])
def test_segments_are_read_as_one(tmp_path: Path, name: str, config: dict[str, Any]) -> None:
    model, data = make_model(CASES[name]).float(), source(rows=400)
    (whole,), ends = data.graphs.store.segments, (0, 8, 20, 400)
    cut = [
        Segment(whole.states_PD[low:high], whole.tokens_P[low:high], starts)  # type: ignore[index]
        for low, high, starts in zip(ends, ends[1:], map(torch.tensor, ([0, 7, 8], [0, 12], [0, 380])), strict=False)
    ]
    several = replace(data, graphs=replace(data.graphs, store=Store(cut)))
    caches = [built(tmp_path / str(n), model, each, **config) for n, each in enumerate((data, several))]
    one, three = (scored(model, each, cache) for each, cache in zip((data, several), caches, strict=True))
    torch.testing.assert_close(one, three, rtol=1e-5, atol=1e-5)
    assert caches[1] is not None
    assert all(isinstance(table, JoinedTable) for table in caches[1].tables)


def test_only_what_is_read_is_kept() -> None:
    paper, released, default = (make_model(CASES[name]).options for name in ("paper", "released", "default"))
    assert table_shapes(paper, False, 9) == [(9, 8), (9, 3, 8), (9, 3, 8)]
    assert table_shapes(released, False, 9) == [(9, 8), (9, 1, 8), (9, 1, 8)]  # the centre alone
    assert table_shapes(default, False, 9) == [(9, 8)]  # windows never change: one table serves all layers
    assert table_shapes(default, True, 9) == [(9, 16)] * 3


def test_auto_stays_within_its_limit(tmp_path: Path) -> None:
    model, data = make_model(CASES["paper"]).float(), source()
    assert built(tmp_path / "none", model, data, form="auto", limit_gb=0) is None
    with Draft(tmp_path / "auto", "cache", {}) as draft:
        facts = build(draft, model, data, CacheConfig()).facts
    assert [trial["form"] for trial in facts["trials"]] == ["none", "states", "projected"]
    fastest = min(trial["seconds"] for trial in facts["trials"])
    near = [trial for trial in facts["trials"] if trial["seconds"] <= 1.1 * fastest]
    assert facts["form"] == min(near, key=lambda trial: trial["bytes"])["form"]


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"none": 1.0, "states": 0.95, "projected": 0.93}, "none"),  # not worth a table
        ({"none": 1.0, "states": 0.5, "projected": 0.47}, "states"),  # not worth a larger one
        ({"none": 1.0, "states": 0.5, "projected": 0.3}, "projected"),
    ],
)
def test_auto_takes_the_smallest_of_the_fast(
    seconds: dict[str, float], chosen: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cache_form, "_seconds", lambda work: {name: seconds[name] for name in work})
    model, data = make_model(CASES["paper"]).float(), source()
    with Draft(tmp_path / "auto", "cache", {}) as draft:
        made = build(draft, model, data, CacheConfig())
    assert made.facts["form"] == chosen


class Machine:
    """A clock that jobs move forward, on a machine that is busy now and then."""

    def __init__(self) -> None:
        self.now, self.count = 0.0, 0

    def perf_counter(self) -> float:
        return self.now

    def job(self, seconds: float) -> Any:
        def run() -> None:
            self.count += 1
            self.now += seconds * (10 if self.count % 7 == 0 else 1)

        return run


@pytest.mark.parametrize(("scale", "rounds"), [(1e-3, 21), (0.2, 6), (5.0, 4)])
def test_forms_are_timed_in_turns_for_long_enough(scale: float, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    monkeypatch.setattr(cache_form, "time", machine)
    found = cache_form._seconds({"a": machine.job(scale), "b": machine.job(1.2 * scale)})
    assert machine.count == 2 * rounds
    assert found == {"a": pytest.approx(scale), "b": pytest.approx(1.2 * scale)}


def test_states_too_large_for_half_precision(tmp_path: Path) -> None:
    model, data = make_model(CASES["paper"]).float(), source()
    with torch.no_grad():
        model.layer(0).output[1].mul_(1e6)
    with pytest.raises(ArtifactError, match=r"do not fit in fp16 .* set cache.dtype: fp32"):
        built(tmp_path, model, data, form="states", dtype="fp16")


def test_refusals() -> None:
    from gnnlm.config import parse_config

    with pytest.raises(ConfigError, match="dtype pq is for form states"):
        parse_config({"run": "x", "cache": {"form": "projected", "dtype": "pq"}})


def test_more_neighbours_than_rows(tmp_path: Path) -> None:
    """k larger than the store: the table is padded with what is not there."""
    model, data = make_model(GnnConfig(preset="paper", heads=2, dropout=0)).float(), source()
    wide = replace(data, trial=replace(data.trial, neighbours=data.trial.neighbours.padded(65)))
    cache = built(tmp_path, model, data, form="projected", dtype="fp32")
    want = scored(model, data, None)
    for out in (scored(model, wide, None), scored(model, wide, cache)):
        assert torch.isfinite(out).all()
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
