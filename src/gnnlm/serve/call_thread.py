"""A thread that runs calls with a model one after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from gnnlm.serve.api_errors import shutting_down

T = TypeVar("T")
PAUSE = 1.0  # seconds without a call after which `when_idle` is called


class CallThread:
    def __init__(self, when_idle: Callable[[], None]) -> None:
        """`when_idle` is called about once a second while there are no calls."""
        self._when_idle = when_idle
        self._calls: queue.Queue[tuple[Future[Any], Callable[[], Any]] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="gnnlm-calls", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((future, work))
        return future

    def __len__(self) -> int:
        """The calls that wait."""
        return self._calls.qsize()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def busy(self) -> bool:
        return self._calls.unfinished_tasks > 0

    def stop(self, seconds: float) -> None:
        """Refuse the calls that wait, and wait for the running one for some seconds."""
        waiting = []
        while not self._calls.empty():
            waiting.append(self._calls.get_nowait())
        for call in waiting:
            if call is not None and call[0].set_running_or_notify_cancel():
                call[0].set_exception(shutting_down())
        self._calls.put(None)
        if self.alive:
            self._thread.join(seconds)

    def _run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run a call; return false at the end. No variable of it outlives the call, as that would keep a book open."""
        try:
            call = self._calls.get(timeout=PAUSE)
        except queue.Empty:
            self._when_idle()
            return True
        if call is None:
            return False
        future, work = call
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
        self._calls.task_done()
        return True
