"""Queries and keys from base and GNN: a run where the answer is known, FAISS as oracle, a store that leaks nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import torch

from gnnlm.artifact import Artifact, Draft
from gnnlm.evaluate.analysis import gnn_store as store_module
from gnnlm.evaluate.analysis import representation
from gnnlm.evaluate.analysis.gnn_store import STATES, TrainNeighbours, build_gnn_store, gnn_keys
from gnnlm.evaluate.analysis.representation import keys_index, queries_of, searched
from gnnlm.evaluate.analysis.score_cache import CachedScores, shards
from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.retrieval.index import Rows, as_keys, keys_of
from gnnlm.retrieval.neighbours import NeighbourTable
from gnnlm.retrieval.search import LeakageRule, search_table
from gnnlm.run import Run
from gnnlm.run.analyze import Analysis
from tests.cli import gnnlm
from tests.evaluate.analysis.copies import copied_run

PAIRS = ("base/base", "base/gnn", "gnn/base", "gnn/gnn")


@pytest.fixture(scope="module")
def analysed(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    """A run with the part made."""
    analysis = Analysis(copied_run(tiny_run, tmp_path_factory.mktemp("representation")))
    analysis.build(analysis.plan(["representation"]))
    return analysis


def made(analysis: Analysis, name: str) -> Artifact:
    return Artifact.open(analysis.root / name)


def result(analysis: Analysis) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(made(analysis, "representation").text("result.json"))
    return found


def scored(analysis: Analysis, split: str) -> CachedScores:
    return CachedScores(made(analysis, f"scored-{split}"))


# -- the four pairs ----------------------------------------------------------------------------------------


def test_an_identity_network_makes_all_four_equal(tiny_run: Run, tmp_path: Path) -> None:
    """A network that starts as the identity, and whose weights never move, leaves the base model's states."""
    run = copied_run(tiny_run, tmp_path, train={"lr": 1e-30, "weight_decay": 0.0})
    assert run.snapshot.gnn is not None
    done = gnnlm("analyze", run.root, "--part", "representation", "--json")
    found = json.loads(done.stdout.splitlines()[-1])["representation"]
    assert len({found[pair]["ppl"] for pair in PAIRS}) == 1
    assert all(found[pair]["change"] == found[pair]["change_low"] == found[pair]["change_high"] == 0 for pair in PAIRS)
    assert len({json.dumps(found[pair]["mix"]) for pair in PAIRS}) == 1
    states = np.asarray(keys_of(run.artifact("encode"), "train"))
    assert np.array_equal(Artifact.open(run.root / "analysis" / "gnn-store").array(STATES), states)
    assert "All four are equal" in (run.root / "analysis" / "analysis.md").read_text()


def test_base_for_both_is_the_runs_own_search(analysed: Analysis) -> None:
    """Searched anew it finds the neighbours of the run's table, and scores as +GNN+kNN in the report."""
    subject, store = analysed.subject, made(analysed, "gnn-store")
    index = keys_index(subject, "base", store)
    for split in ("valid", "test"):
        own = subject.snapshot.searched(split).table
        keys = queries_of(subject, "base", split, scored(analysed, split))
        anew = search_table(index, keys, own.k, 512, "search")
        assert np.array_equal(anew.ids, own.ids)
        assert np.array_equal(anew.similarity, own.similarity)
    assert result(analysed)["base/base"]["ppl"] == pytest.approx(subject.report.rows["gnn_knn"].ppl, rel=1e-5)
    mix, own = result(analysed)["base/base"]["mix"], subject.report.mix["gnn"]
    assert [mix[name] for name in ("k", "temperature", "weight")] == [
        own[name] for name in ("k", "temperature", "weight")
    ]
    assert mix["gate"]["weights"] == pytest.approx(own["gate"]["weights"], abs=1e-3)


@pytest.mark.parametrize("pair", PAIRS)
def test_the_neighbours_of_a_pair_against_faiss(pair: str, analysed: Analysis) -> None:
    subject, store = analysed.subject, made(analysed, "gnn-store")
    query, key = pair.split("/")
    table = searched(subject, query, key, "test", scored(analysed, "test"), keys_index(subject, key, store)).table
    rows = Rows.of(subject.snapshot.streams["train"]).all().numpy()
    states = store.array(STATES) if key == "gnn" else keys_of(subject.artifact("encode"), "train")
    asked = scored(analysed, "test").gnn_states_PD if query == "gnn" else subject.test.text.segments[0].states_PD
    assert isinstance(asked, torch.Tensor)
    flat = faiss.IndexFlatIP(asked.shape[1])
    flat.add(as_keys(torch.from_numpy(np.array(states))[rows], "cosine").numpy())
    similarity, near = flat.search(as_keys(asked, "cosine").numpy(), table.k + 1)
    assert np.allclose(table.similarity, similarity[:, :-1], atol=1e-5)
    clear = np.diff(similarity, axis=1).max(1) < -1e-5  # without ties, also with the first row that is left out
    assert clear.mean() > 0.5
    assert np.array_equal(table.ids[clear], rows[near[clear, :-1]])
    assert (
        np.asarray(subject.snapshot.streams["train"].tokens)[table.ids] >= 0
    ).all()  # rows without a token are not found


def test_each_pair_has_its_own_mix_and_change(analysed: Analysis) -> None:
    found = result(analysed)
    scores = {pair: np.array(made(analysed, "representation").array(f"{pair.replace('/', '-')}.tuned.log_probs.npy"),
                             dtype=np.float64) for pair in PAIRS}  # fmt: skip
    for pair in PAIRS:
        assert found[pair]["ppl"] == pytest.approx(np.exp(-scores[pair].mean()))
        gain = np.exp(-(scores[pair] - scores["base/base"]).mean()) - 1
        assert found[pair]["change"] == pytest.approx(gain, abs=1e-12)
        assert found[pair]["change_low"] <= found[pair]["change"] <= found[pair]["change_high"]
    assert len({found[pair]["ppl"] for pair in PAIRS}) == 4  # a trained network makes a difference
    assert found["store"]["searched_here"] == 0


def test_an_interrupted_part_resumes(analysed: Analysis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, parts = analysed.subject, [scored(analysed, split) for split in ("valid", "test")]
    store, calls, real = made(analysed, "gnn-store"), list[object](), representation.choose

    def choose(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(representation, "choose", choose)
    with pytest.raises(KeyboardInterrupt), Draft(tmp_path / "part", "part", {}) as draft:
        representation.measure(subject, draft, *parts, store)
    with Draft(tmp_path / "part", "part", {}) as draft:
        assert representation.measure(subject, draft, *parts, store).as_json() == result(analysed)
        draft.finish({})
    assert len(calls) == 3 + 2  # two pairs were kept


# -- the store of GNN states -------------------------------------------------------------------------------


def test_a_train_position_finds_nothing_of_its_own_document(analysed: Analysis) -> None:
    subject = analysed.subject
    stream, near = subject.snapshot.streams["train"], TrainNeighbours.of(subject)
    positions = torch.arange(len(stream))
    found = near.at(positions).positions
    own = stream.document_of(positions.numpy())[:, None]
    assert (found >= 0).all()
    assert (stream.document_of(found.numpy()) != own).all()
    assert torch.equal(found, torch.from_numpy(np.array(subject.snapshot.searched("train").table.ids)).long())


def test_states_depend_on_nothing_later(analysed: Analysis) -> None:
    """The state of a position is that of its document read up to there, in one piece and without the cache."""
    subject, kept = analysed.subject, made(analysed, "gnn-store").array(STATES)
    stream, text = subject.snapshot.streams["train"], subject.snapshot.searched("train")
    predictor = replace(subject.snapshot.predictor, cache=None)
    for document, count in ((0, 60), (3, 25)):
        positions = torch.arange(count) + int(stream.starts[document])
        ((_, prediction),) = text.predictions(predictor, count, ("gnn",), positions)
        states = prediction.states["gnn"].numpy()
        np.testing.assert_allclose(kept[positions.numpy()], states, rtol=2e-3, atol=2e-3)


def test_positions_that_were_not_queried_are_searched(analysed: Analysis) -> None:
    """With half a table, the other half is found by search under the same rule: here it is exact, so the same."""
    near = TrainNeighbours.of(analysed.subject)
    assert near.table is not None
    queried = torch.arange(0, len(near.table), 2)
    half = NeighbourTable(near.table.ids[::2], near.table.similarity[::2], queried)
    partly, nothing = replace(near, table=half), replace(near, table=None)
    positions = torch.arange(40, 700)
    for some in (partly, nothing):
        assert torch.equal(some.at(positions).positions, near.at(positions).positions)
        assert torch.equal(some.at(positions).similarity, near.at(positions).similarity)
    assert (near.unknown, partly.unknown, nothing.unknown) == (0, len(near.table) - len(queried), len(near.table))


def test_documents_read_whole_widen_the_rule(analysed: Analysis) -> None:
    """Under `receptive-field` a deep network carries further than a block of training; the table is then not used."""
    subject = analysed.subject
    values = subject.config.model_dump(mode="json")
    values["search"]["exclude"], values["gnn"]["layers"] = "receptive-field", 4
    config = type(subject.config).model_validate(values)
    assert LeakageRule.of(config, 10).carried == config.train.block - 1 == 23
    assert LeakageRule.of(config, 10, unbroken=True).carried == 3 * (config.gnn.context - 1) == 33
    deep = Subject(subject.name, config, subject.snapshot, subject.artifact, subject.stages)
    near = TrainNeighbours.of(deep)
    assert near.table is None
    positions = torch.arange(100, 160)
    found, rule = near.at(positions).positions, near.queries.rule
    assert rule is not None
    first, last = subject.snapshot.encoded["train"].bounds(positions)
    inside = (found >= first[:, None]) & (found <= last[:, None])
    far = (found - positions[:, None]).abs() > rule.span
    assert (far | ~inside)[found >= 0].all()
    assert bool(inside.any())  # its own document, but far away, is allowed


def test_the_store_resumes_to_the_same_bytes(
    analysed: Analysis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, rounds, real = analysed.subject, list[torch.Tensor](), TrainNeighbours.at

    def at(self: TrainNeighbours, positions: torch.Tensor) -> Any:
        rounds.append(positions)
        if len(rounds) == 4:
            raise KeyboardInterrupt
        return real(self, positions)

    monkeypatch.setattr(store_module, "shards", lambda starts, done: shards(starts, done, least=900))
    monkeypatch.setattr(TrainNeighbours, "at", at)
    with pytest.raises(KeyboardInterrupt), Draft(tmp_path / "store", "store", {}) as draft:
        build_gnn_store(draft, subject)
    with Draft(tmp_path / "store", "store", {}) as draft:
        again = build_gnn_store(draft, subject)
    assert int(rounds[4][0]) == int(rounds[3][0]) > 0
    np.testing.assert_allclose(again.array(STATES), made(analysed, "gnn-store").array(STATES), rtol=2e-3, atol=2e-3)


def test_a_coded_run_has_a_coded_store(analysed: Analysis, tmp_path: Path) -> None:
    subject = analysed.subject
    values = subject.config.model_dump(mode="json")
    values["codec"] = {"kind": "pq", "bytes": 8, "train_rows": 2000}
    config = type(subject.config).model_validate(values)
    coded = Subject(subject.name, config, subject.snapshot, subject.artifact, subject.stages)
    with Draft(tmp_path / "store", "store", {}) as draft:
        store = build_gnn_store(draft, coded)
    assert set(store.manifest.files) == {"codes.npy", "quantizer.safetensors"}
    positions = torch.arange(0, 3800, 7)
    exact = gnn_keys(made(analysed, "gnn-store"), positions).float()
    lost = (gnn_keys(store, positions) - exact).square().sum() / (exact - exact.mean(0)).square().sum()
    assert float(lost) == pytest.approx(store.facts["error"], rel=0.2)
    assert 0 < store.facts["error"] < 0.5
