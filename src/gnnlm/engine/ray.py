"""The Ray engine: tasks all over a cluster, segments held by actors.

Workers get a recipe and paths in the run directory, never data. So finished files survive the loss of a worker, a node
or the driver. Ray runs the tasks of a lost worker again elsewhere.

All workers compute with as many threads as the process that started them, so they make the same bytes.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError, TaskUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gnnlm.artifact import disk
from gnnlm.engine.engine_protocol import ObjectPool, Place, Recipe, Spread
from gnnlm.engine.machine_check import MachineRequirements, difference, pin_threads
from gnnlm.engine.shard_task import Arrays, Task, Work, load_arrays, write_result
from gnnlm.engine.storage import RunView, Storage
from gnnlm.errors import EngineError, GnnlmError
from gnnlm.progress import Message, kept_messages, log, say, warn

ATTEMPTS = 10  # at a task whose workers end; its own errors are not tried again
AHEAD = 4  # tasks that are started before they are needed, for each that can run at once
LOOPBACK = "127.0.0.1"
ANSWER = 5.0  # seconds that a cluster has to accept a connection
LOOK = 1.0  # seconds between two looks at the nodes
APPEAR = 60.0  # seconds that shared storage has to show a file that another machine has written
OBJECT_STORE = 256 * 2**20  # bytes, where Ray is started here: tasks exchange files, not objects


@dataclass(frozen=True)
class WorkerSetup:
    """What every worker of a stage needs to begin."""

    place: Place
    threads: int
    wanted: MachineRequirements
    expected: Mapping[str, str]
    storage: Storage | None = None
    view: RunView | None = None

    def enter(self) -> Path:
        """Check the machine and pin the threads in a worker; return the run directory as seen there."""
        pin_threads(self.threads)
        _check(self)
        if self.storage is None:
            return self.place.root
        assert self.view is not None
        return self.storage.download(self.view)


_checked: dict[str, str] = {}  # what this worker was last found to have


def _check(duty: WorkerSetup) -> None:
    """Refuse a machine that would make other bytes, checked once for each worker: machines may join later."""
    if _checked == duty.expected:
        return
    node, found = f"the machine {socket.gethostname()}", duty.wanted.facts()
    if (problem := difference(node, duty.expected, found, duty.place.root)) is not None:
        raise EngineError(problem)
    _checked.clear()
    _checked.update(found)


def _do(duty: WorkerSetup, recipe: Recipe, folder: str, task: Task) -> list[Message]:
    """Do a task in a worker; return its messages."""
    with kept_messages() as said:
        root = duty.enter()
        path = write_result(task, recipe(root, task.kind), root / folder)
        if duty.storage is not None:
            assert duty.view is not None
            duty.storage.put(path, f"shards/{duty.view.name}/{folder}/{task.name}")
            path.unlink()
    return said


class _Holder:
    """An actor that opens an object and calls its methods; Ray makes a lost actor again elsewhere."""

    def __init__(self, duty: WorkerSetup, opener: Callable[[Path], Any]) -> None:
        # opened when it is first asked: an error of an actor that is being made would be told as its loss
        self._opened = cache(lambda: opener(duty.enter()))

    def ask(self, method: str, arguments: tuple[Any, ...]) -> Any:
        return getattr(self._opened(), method)(*arguments)


class ActorPool:
    """Objects in actors, which are made at the first call."""

    def __init__(self, make: Callable[[], Sequence[Any]]) -> None:
        self._make = make

    @cached_property
    def actors(self) -> Sequence[Any]:
        return self._make()

    def ask(self, method: str, requests: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """See `ObjectPool.ask`."""
        asked = {number: self.actors[number].ask.remote(method, given) for number, given in requests.items()}
        with _told():
            return dict(zip(asked, ray.get(list(asked.values())), strict=True))


@dataclass(frozen=True)
class ClusterSpread:
    """Does tasks on the nodes of a cluster; `done` yields their files in order, given a folder and the tasks."""

    done: Callable[[Path, Sequence[Task]], Iterator[Path]]

    def arrays(self, folder: Path, work: Work, tasks: Sequence[Task]) -> Iterator[Arrays]:
        """See `Spread.arrays`."""
        return map(load_arrays, self.files(folder, work, tasks))

    def files(self, folder: Path, work: Work, tasks: Sequence[Task]) -> Iterator[Path]:
        """See `Spread.files`; the work is made again where a task is done."""
        with _told():
            yield from self.done(folder.absolute(), tasks)


class RayEngine:
    """A Ray cluster, or this machine as one."""

    def __init__(self, address: str | None = None, storage: str | None = None) -> None:
        """Connect to the cluster at an address, or to the one that is running here; if there is none, start one."""
        import torch

        self.threads = torch.get_num_threads()
        self.storage = None if storage is None else Storage(storage)
        self._wanted, self._expected = MachineRequirements(), dict[str, str]()
        self._connected_here = not ray.is_initialized()  # or by a program that uses Ray itself
        if self._connected_here:
            _connect(address)
        self._known = {node["NodeID"] for node in _nodes()}
        most = max((int(node["Resources"].get("CPU", 0)) for node in _nodes()), default=0)
        if most < self.threads:
            self.close()
            raise EngineError(
                f"a task computes with {self.threads} threads, as this process does, but the largest node of the "
                f"cluster has {most} CPUs; set OMP_NUM_THREADS to {max(1, most)} or fewer"
            )
        say(f"engine: Ray, {len(self._known)} nodes, {self._slots} tasks of {self.threads} threads at once")

    def close(self) -> None:
        if self._connected_here:
            ray.shutdown()

    def __enter__(self) -> RayEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self, root: Path, models: Mapping[str, Callable[[], str]]) -> None:
        """Refuse nodes that have other software, lack these models, or do not see the run directory."""
        disk.make_directories(root)
        file = None if self.storage is not None else root.absolute() / f".seen-{uuid.uuid4().hex[:8]}"
        if file is not None:
            with suppress(PermissionError):  # a finished run that may only be read is seen by its config
                file.touch()
            file = file if file.exists() else root.absolute() / "config.yaml"
        asked = MachineRequirements(models, file)
        try:
            expected = asked.facts()
            asking = ray.remote(MachineRequirements.facts)
            answers = {}
            for node in _nodes():
                there_only = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                options = asking.options(num_cpus=0, max_retries=0, scheduling_strategy=there_only)
                answers[_name(node)] = options.remote(asked)
            for name, answer in answers.items():
                try:
                    there = ray.get(answer)
                except TaskUnschedulableError:  # the node was lost after it was listed
                    continue
                except RayError as error:
                    cause = _first_line(error.cause if isinstance(error, RayTaskError) else error)
                    raise EngineError(
                        f"{name} cannot run gnnlm ({cause}); install the same version on all machines"
                    ) from error
                if (found := difference(name, expected, there, root)) is not None:
                    raise EngineError(found)
        finally:
            if file is not None and file.name != "config.yaml":
                file.unlink(missing_ok=True)
        expected.pop("file", None)
        self._wanted, self._expected = MachineRequirements(models), expected

    # -- tasks -----------------------------------------------------------------------------------------------------

    def spread(self, place: Place, recipe: Recipe) -> Spread:
        """See `Engine.spread`."""
        return ClusterSpread(partial(self._map, place, recipe))

    def _duty(self, place: Place, reads: Sequence[str] = ()) -> WorkerSetup:
        view = None
        if self.storage is not None:
            view = RunView.of(place.root, [*place.needs, *reads])
            self.storage.upload(place.root, view)
        return WorkerSetup(place, self.threads, self._wanted, self._expected, self.storage, view)

    def _map(self, place: Place, recipe: Recipe, folder: Path, tasks: Sequence[Task]) -> Iterator[Path]:
        """Yield the files of tasks in order; several tasks run at once, some before they are needed."""
        if not tasks:
            return
        duty = self._duty(place, sorted({name for task in tasks for name in task.reads}))
        below = str(folder.relative_to(place.root))
        remote = ray.remote(_do).options(
            num_cpus=self.threads, max_retries=ATTEMPTS, retry_exceptions=False, scheduling_strategy="SPREAD"
        )
        shared, sent = ray.put(duty), ray.put(recipe)
        running: dict[Any, int] = {}
        done: dict[int, list[Message]] = {}
        begun = 0
        told: set[Message] = set()
        try:
            for number, task in enumerate(tasks):
                path = folder / task.name
                while number not in done:
                    while begun < min(len(tasks), number + AHEAD * self._slots):
                        if self._is_there(duty, folder, below, tasks[begun]):
                            done[begun] = []
                        else:
                            running[remote.remote(shared, sent, below, tasks[begun])] = begun
                        begun += 1
                    if number not in done:
                        ready, _ = ray.wait(list(running), num_returns=1, timeout=LOOK)
                        for each in ready:
                            done[running.pop(each)] = ray.get(each)
                        self._look()
                for message in done.pop(number):
                    if message not in told:  # each worker loads the model, and says so
                        log(*message)
                    told.add(message)
                self._fetch(duty, path, below, task)
                yield path
                if not task.kept:
                    disk.remove_file(path)
                    if duty.storage is not None and duty.view is not None:
                        duty.storage.remove(f"shards/{duty.view.name}/{below}/{task.name}")
        finally:
            for each in running:
                with suppress(RayError):  # gently: killing a task that is just ending can bring Ray itself down
                    ray.cancel(each)

    def _is_there(self, duty: WorkerSetup, folder: Path, below: str, task: Task) -> bool:
        if (folder / task.name).exists():
            return True
        if duty.storage is None or duty.view is None:
            return False
        return duty.storage.has(f"shards/{duty.view.name}/{below}/{task.name}")

    def _fetch(self, duty: WorkerSetup, path: Path, below: str, task: Task) -> None:
        """Download a finished file, or wait until it is visible here."""
        if duty.storage is not None and duty.view is not None and not path.exists():
            duty.storage.get(f"shards/{duty.view.name}/{below}/{task.name}", path)
        until = time.monotonic() + APPEAR
        while not path.exists():
            if time.monotonic() > until:
                raise EngineError(
                    f"{path} was written by a node, but cannot be seen here; choose a run directory on storage that "
                    "all machines share, or name storage that all can reach with --storage"
                )
            time.sleep(0.1)
            with suppress(OSError):
                os.listdir(path.parent)  # network file systems look again at a folder that is listed

    def _look(self) -> None:
        """Report nodes that were lost or have joined."""
        alive = {node["NodeID"] for node in _nodes()}
        for _ in self._known - alive:
            warn(f"a node of the cluster was lost; its unfinished shards are done by the other {len(alive)}")
        for _ in alive - self._known:
            say(f"engine: a node has joined the cluster, which has {len(alive)} now")
        self._known = alive

    @property
    def _slots(self) -> int:
        """The number of tasks that can run at once."""
        return max(1, sum(int(node["Resources"].get("CPU", 0)) // self.threads for node in _nodes()))

    # -- objects that are held -------------------------------------------------------------------------------------

    def groups(self, count: int) -> int:
        """Return one group for each node, but no more than there are segments."""
        return min(count, len(_nodes()))

    def hold(self, place: Place, openers: Sequence[Callable[[Path], Any]]) -> ObjectPool:
        """See `Engine.hold`; each actor prefers a node of its own."""

        def make() -> list[Any]:
            duty, nodes, actor = self._duty(place), _nodes(), ray.remote(_Holder)
            made = []
            for number, opener in enumerate(openers):
                prefer = NodeAffinitySchedulingStrategy(nodes[number % len(nodes)]["NodeID"], soft=True)
                # no CPU is reserved: what is held must not keep tasks waiting
                options = actor.options(num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=prefer)
                made.append(options.remote(duty, opener))
            return made

        return ActorPool(make)


# -- the cluster ---------------------------------------------------------------------------------------------------


def _connect(address: str | None) -> None:
    """Connect, or start Ray on this machine alone, where nobody else can reach it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # quiet about a coming change
    internals = ray._private.worker
    if hasattr(internals, "print_to_stdstream"):  # Ray prints the last words of its processes on our stdout
        internals.print_to_stdstream = lambda *_, **__: None
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": None}
    host, _, port = (address or os.environ.get("RAY_ADDRESS") or "").removeprefix("ray://").rpartition(":")
    with _own_signals():
        if port.isdigit() and (error := _silence(host, port)) is not None:
            raise _no_cluster(f"{host}:{port}", error) from error
        try:
            if address is None and not port and not cluster_here():
                raise ConnectionError("no cluster runs on this machine")
            ray.init(address=address or "auto", **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            if address is not None or port:
                raise _no_cluster(address or f"{host}:{port}", error) from error
            quiet["include_dashboard"] = False
            _stay_on_loopback()
            ray.init(address="local", object_store_memory=OBJECT_STORE, _node_ip_address=LOOPBACK, **quiet)


def _silence(host: str, port: str) -> OSError | None:
    """Return why an address does not answer; None if it does."""
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER).close()
    except OSError as error:
        return error
    return None


def cluster_here() -> bool:
    """Return whether the cluster last started on this machine answers; Ray waits minutes for a killed one."""
    host, _, port = (ray._private.utils.read_ray_address() or "").rpartition(":")
    return port.isdigit() and _silence(host, port) is None


def _stay_on_loopback() -> None:
    """Make a Ray that is started here listen on loopback only, as it does where it supports no clusters (macOS)."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # for its processes
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = False  # for this one


def _no_cluster(address: str, error: Exception) -> EngineError:
    return EngineError(
        f"no Ray cluster answers at {address} ({_first_line(error)}); start one (ray start --head), or leave "
        "--ray-address out to use this machine"
    )


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restore the signal handlers that Ray replaces."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        with suppress(ValueError):  # not in the main thread: Ray could not take it either
            for number, handler in kept.items():
                signal.signal(number, handler)


@contextmanager
def _told() -> Iterator[None]:
    """Raise an error of a worker as if it had happened here; report a loss in one line."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, GnnlmError | OSError):
            raise error.cause from error
        raise
    except RayError as error:
        raise EngineError(
            f"the cluster lost a task {ATTEMPTS} times ({_first_line(error)}); see its nodes' memory and logs, and run "
            "the same command again: it resumes where it stopped"
        ) from error


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _name(node: Mapping[str, Any]) -> str:
    return f"node {node['NodeManagerAddress']} ({node['NodeID'][:6]})"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:160] if lines else type(error).__name__
