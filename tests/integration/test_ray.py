"""A Ray cluster of several nodes on this machine: the bytes of the local engine, whatever is lost on the way."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster

import gnnlm as package
from gnnlm.config import parse_config
from gnnlm.engine import Place, using
from gnnlm.engine.ray import RayEngine, cluster_here
from gnnlm.engine.storage import SCRATCH
from gnnlm.errors import ConfigError, EngineError
from gnnlm.library.library import Library
from gnnlm.retrieval.index import Allowed
from gnnlm.retrieval.segmented import SpreadIndex
from gnnlm.run import Run
from gnnlm.run.snapshot import open_index_group
from tests.cli import error_line, gnnlm
from tests.conftest import merge
from tests.library.conftest import make_text

pytestmark = pytest.mark.integration
CHANGES: dict[str, Any] = {  # all that is cut into shards, in several segments
    "store": {"segment_tokens": 1500, "shard_tokens": 256},
    "search": {"shard_queries": 256},
    "codec": {"kind": "pq", "bytes": 8, "train_rows": 2000},
    "index": {"kind": "ivf", "clusters": 8, "probes": 8},
    "cache": {"form": "states", "dtype": "pq", "bytes": 8},
    "train": {"curriculum": [{"k": 4, "steps": 2}]},
    "tune": {"gate": False},
}
NODE_TRIES = 4  # Ray gives a node 30 seconds to start, and a busy machine may need more
NOT_COMPARED = {"manifest.json", "report.json", "report.md", "rows.png", "training.png", "history.json"}  # have times


@pytest.fixture(scope="module")
def several(tiny_values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run in several segments, built by the local engine."""
    run = Run(configured(tiny_values, tmp_path_factory.mktemp("local") / "run"))
    run.build_all()
    assert len(run.snapshot.streams["train"].segments) > 2
    return run


def configured(values: dict[str, Any], root: Path, **changes: Any) -> Any:
    return parse_config(merge(merge(merge(values, CHANGES), {"run": str(root)}), changes))


def bytes_of(root: Path) -> dict[str, bytes]:
    """Everything that a run made, but for what holds times."""
    kept = ("corpus", "store", "codec", "index", "search", "gnn", "cache", "tune", "report", "segments")
    files = (path for folder in kept for path in sorted((root / folder).rglob("*")) if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in files if path.name not in NOT_COMPARED}


def test_starts_by_itself_is_interrupted_and_resumed_by_the_other_engine(several: Run, tmp_path: Path) -> None:
    """Ctrl-C during the search of a Ray that started by itself; the local engine goes on from the finished shards."""
    run = tmp_path / "run"
    gnnlm("fork", several.root, run, "--set", "search.k=15")
    process = subprocess.Popen(
        [sys.executable, "-m", "gnnlm", "search", str(run), "--engine", "ray"], stderr=subprocess.PIPE, text=True
    )
    journal = run / ".search.partial" / "journal.json"
    wait_until(lambda: journal.exists() or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130, said
    assert "engine: Ray, 1 nodes" in said
    assert "Traceback" not in said
    assert said.rstrip().splitlines()[-1].startswith("error: interrupted; finished work is kept")
    assert "resuming where it was interrupted" in gnnlm("search", run).stderr
    straight = tmp_path / "straight"
    gnnlm("fork", several.root, straight, "--set", "search.k=15")
    gnnlm("search", straight)
    assert bytes_of(run) == bytes_of(straight)


# -- one cluster of several nodes ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The driver connects to the head before there are other nodes, so that it survives the loss of any of them."""
    made = Cluster(initialize_head=True, connect=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def engine(cluster: Cluster) -> RayEngine:
    return RayEngine()


def wait_until(true: Any, seconds: float = 240.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it never got that far"
        time.sleep(0.02)


def joined(cluster: Cluster, **given: Any) -> Any:
    """A new node of the cluster."""
    for tries_left in reversed(range(NODE_TRIES)):
        try:
            return cluster.add_node(num_cpus=1, **given)
        except Exception:
            if not tries_left:
                raise
    return None


def lose(cluster: Cluster, node: Any) -> None:
    """Kill a node, and wait until the cluster knows."""
    before = alive()
    cluster.remove_node(node, allow_graceful=False)
    wait_until(lambda: alive() < before)


def alive() -> int:
    return sum(node["Alive"] for node in ray.nodes())


@pytest.mark.timeout(900)
def test_a_lost_node_costs_only_its_shards(
    several: Run, tiny_values: dict[str, Any], tmp_path: Path, cluster: Cluster
) -> None:
    doomed = joined(cluster)
    run = Run(configured(tiny_values, tmp_path / "run"))
    engine = RayEngine()
    run.use(engine)
    shards = run.root / "segments" / "0001" / ".states.partial" / "journal.json"

    lost_in: list[str] = []

    def lose_it() -> None:
        wait_until(shards.exists)
        cluster.remove_node(doomed, allow_graceful=False)
        lost_in.extend(name for name in run.stages if not (run.path(name) / "manifest.json").exists())

    killer = threading.Thread(target=lose_it)
    killer.start()
    run.build_all()
    killer.join()
    assert "search" in lost_in  # it had tasks to come, if none was running at that moment
    wait_until(lambda: alive() == 1)
    assert bytes_of(run.root) == bytes_of(several.root)
    opened = Run(run.config, reading=True)  # with the local engine, as on a laptop
    assert opened.open_all("eval").facts["predictors"]


@pytest.mark.timeout(900)
def test_storage_that_is_copied_to_each_machine(
    several: Run, tiny_values: dict[str, Any], tmp_path: Path, cluster: Cluster
) -> None:
    """An fsspec path; workers see copies of what they need, never the run directory."""
    url = f"file://{tmp_path}/bucket"
    node = joined(cluster, env_vars={SCRATCH: str(tmp_path / "scratch")})
    made = {}
    for name in ("copied", "local"):
        config = configured(tiny_values, tmp_path / name, search={"k": 14})
        assert several.fork(config)[-1] == "index"
        made[name] = Run(config)
        if name == "copied":
            made[name].use(RayEngine(storage=url))
        made[name].build("search")
    assert bytes_of(made["copied"].root) == bytes_of(made["local"].root)
    (seen,) = (tmp_path / "scratch" / "runs").iterdir()
    assert (seen / "segments" / "0001" / "index" / "index.faiss").is_file()
    assert not [path for path in (tmp_path / "bucket" / "shards").rglob("*") if path.is_file()]
    lose(cluster, node)


@pytest.mark.timeout(900)
def test_search_by_actors_is_the_local_search(several: Run, cluster: Cluster, engine: RayEngine) -> None:
    node = joined(cluster)
    local = several.snapshot.index
    run = Run(several.config, reading=True)
    book = package.open(several.root, engine)
    spread = book.model.index
    assert isinstance(spread, SpreadIndex)
    assert len(spread.rows) == 2
    assert len(spread) == len(local)
    queries = torch.from_numpy(run.artifact("encode").array("test.states.npy")[:40].copy())
    open_ = torch.rand(len(several.snapshot.store), generator=torch.Generator().manual_seed(0)) < 0.3
    barred = (torch.arange(40) * 20, torch.arange(40) * 20 + 900)
    for allowed in (None, Allowed(positions=open_), Allowed(barred), Allowed(barred, open_)):
        for k in (1, 9, len(local)):
            same(spread.search(queries, k, allowed), local.search(queries, k, allowed))
    near = local.search(queries, 7)
    same(spread.compare(queries, near.positions, 5), local.compare(queries, near.positions, 5))
    text = "ban dor kisha. luto mev, dosha"
    scores = [each.score(text).log_probs["knn"].tolist() for each in (book, package.open(several.root))]
    assert scores[0] == scores[1]
    lose(cluster, node)  # its actor is opened again on a node that is left
    same(spread.search(queries, 9), local.search(queries, 9))


@pytest.mark.timeout(900)
def test_a_store_that_changed_is_searched_by_actors(
    several: Run, cluster: Cluster, engine: RayEngine, tmp_path: Path
) -> None:
    """A generation: segments that were added, removed documents in some, and one whose documents are all removed."""
    root = Path(shutil.copytree(several.root, tmp_path / "run"))
    library = Library(root)
    library.add_texts({"kept": make_text(1), "gone": make_text(2)})
    library.add_texts({"brief": make_text(3)})
    old = library.documents()[0].name  # of the first segment, which the stages built
    library.remove(["gone", "brief", old])
    node = joined(cluster)
    try:
        book, local = package.open(root, engine), package.open(root)
        assert isinstance(book.model.index, SpreadIndex)
        assert book.generation == 3
        agree(book, local, gone={"gone", "brief", old}, found={"kept"})
        library.add_texts({"later": make_text(4)})
        library.remove(["kept"])
        agree(book, local, gone={"gone", "brief", old, "later"}, found={"kept"})  # they keep what they opened
        assert book.refresh()
        assert local.refresh()
        assert not book.refresh()
        agree(book, local, gone={"gone", "brief", old, "kept"}, found={"later"})
        copied = package.open(root, RayEngine(storage=f"file://{tmp_path}/bucket"))
        agree(copied, local, gone={"gone", "brief", old, "kept"}, found={"later"})
    finally:
        lose(cluster, node)


def agree(book: package.Book, local: package.Book, gone: set[str], found: set[str]) -> None:
    """Two books find the same, predict the same, and find these documents by the text of each."""
    spread, index = book.model.index, local.model.index
    assert len(spread) == len(index)
    assert book.documents == local.documents
    texts = [make_text(number) for number in range(1, 5)]
    lines = [book.neighbors(text[:60], k=4) for text in texts]
    assert lines == [local.neighbors(text[:60], k=4) for text in texts]
    cited = {near.document for text in lines for line in text for near in line}
    assert cited & (gone | found) == found
    for text in texts[:2]:
        for name, values in local.score(text).log_probs.items():
            assert book.score(text).log_probs[name].tolist() == values.tolist(), name
    assert local.run is not None
    queries = torch.from_numpy(local.run.artifact("encode").array("test.states.npy")[:20].copy())
    for k in (1, 9, len(index)):
        same(spread.search(queries, k), index.search(queries, k))


def same(found: Any, wanted: Any) -> None:
    assert torch.equal(found.positions, wanted.positions)
    assert torch.equal(found.similarity, wanted.similarity)


# -- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.timeout(900)
def test_an_error_of_an_actor_is_told_as_it_is(engine: RayEngine, tmp_path: Path) -> None:
    held = engine.hold(
        Place(tmp_path, ()), [partial(open_index_group, reopen=Run.reopen, generation=0, first=0, last=1)]
    )
    with pytest.raises(ConfigError, match=tmp_path.name):
        held.ask("search", {0: ()})


def test_no_cluster_at_the_address(several: Run) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = error_line("search", several.root, "--engine", "ray", "--ray-address", f"127.0.0.1:{port}")
    assert f"no Ray cluster answers at 127.0.0.1:{port}" in line
    assert "ray start --head" in line


def test_a_cluster_that_was_killed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray leaves the address of the last cluster behind."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        monkeypatch.setattr(ray._private.utils, "read_ray_address", lambda: address)
        assert cluster_here()
    assert not cluster_here()
    monkeypatch.setattr(ray._private.utils, "read_ray_address", lambda: None)
    assert not cluster_here()


def test_more_threads_than_any_node_has(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    with pytest.raises(EngineError, match="set OMP_NUM_THREADS to 1"), using("ray"):
        pass


@pytest.mark.timeout(900)
def test_a_node_with_another_version(several: Run, cluster: Cluster, engine: RayEngine, tmp_path: Path) -> None:
    other = tmp_path / "other" / "gnnlm"
    shutil.copytree(Path(package.__file__).parent, other, ignore=shutil.ignore_patterns("__pycache__"))
    init = other / "__init__.py"
    init.write_text(init.read_text().replace(package.__version__, "0.0.1"))
    node = joined(cluster, env_vars={"PYTHONPATH": str(other.parent)})
    try:
        with pytest.raises(EngineError, match=r"has gnnlm 0\.0\.1 .*install the same version on all machines"):
            engine.check(several.root, {})
    finally:
        lose(cluster, node)


@contextmanager
def node_without(cluster: Cluster, hidden: Path, empty: Path) -> Iterator[None]:
    """A node that sees an empty folder in the place of another stands for a machine that does not have it."""
    before, mine = alive(), ["unshare", "--mount", "--map-root-user"]
    if subprocess.run([*mine, "true"], capture_output=True).returncode:
        pytest.skip("this system lets nobody change its mounts")
    start = f"mount --bind {empty} {hidden} && exec {Path(sys.executable).parent}/ray start --block --num-cpus=1 "
    command = [*mine, "sh", "-c", f"{start} --address={cluster.address}"]
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        while alive() == before and len(nodes) < NODE_TRIES:
            nodes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True))
            wait_until(lambda: alive() > before or nodes[-1].poll() is not None)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(nodes[-1].pid, signal.SIGTERM)
        nodes[-1].wait(60)
        wait_until(lambda: alive() == before)


@pytest.mark.timeout(900)
def test_a_node_that_does_not_see_the_run(several: Run, cluster: Cluster, engine: RayEngine, tmp_path: Path) -> None:
    with node_without(cluster, several.root, tmp_path), pytest.raises(EngineError, match=r"does not see .*--storage"):
        Run(several.config, reading=True).use(engine)


@pytest.mark.timeout(900)
def test_a_node_without_the_model(
    tiny_values: dict[str, Any], cluster: Cluster, engine: RayEngine, tiny_lm_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    run = Run(configured(tiny_values, tmp_path / "run"))
    with (
        node_without(cluster, tiny_lm_dir, tmp_path / "empty"),
        pytest.raises(EngineError, match=f"lacks the model {tiny_lm_dir}"),
    ):
        run.use(engine)
