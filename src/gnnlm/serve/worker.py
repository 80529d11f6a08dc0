"""The threads that use the models: one writes all texts together, a step at a time; the other runs all other calls.

Requests wait in a bounded queue and join the batch between two steps. They take turns: each adds one prompt, then the
next request does, so that a request with many prompts does not keep another waiting. A long text to be scored slows
writing down, but does not stop it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from gnnlm.errors import GnnlmError
from gnnlm.serve.api_errors import FAILED, ApiError, queue_full, shutting_down
from gnnlm.serve.call_thread import CallThread
from gnnlm.serve.limits import Limits
from gnnlm.serve.metrics import Metrics
from gnnlm.serve.runs import ServedRun
from gnnlm.serve.text_updates import ActiveText, QueuedRequest, TextUpdate, updates_of
from gnnlm.write.batch_loop import Writer
from gnnlm.write.text_state import TextState

log = logging.getLogger("gnnlm.serve")
T = TypeVar("T")
PAUSE = 1.0  # seconds between two looks for outdated writers while there is nothing to write
STOP_SECONDS = 30.0  # that a thread may take to end


class Worker:
    """Writes and answers for all requests of a server."""

    def __init__(self, limits: Limits, metrics: Metrics, when_idle: Callable[[], None] = lambda: None) -> None:
        """`when_idle` is called about once a second while there are no calls."""
        self._limits = limits
        self._metrics = metrics
        self._changed = threading.Condition()  # guards what all threads use
        self._waiting: deque[QueuedRequest] = deque()
        self._running: set[QueuedRequest] = set()  # the waiting ones included
        self._draining = False
        self._stopping = False
        self._calls = CallThread(when_idle)
        self._thread = threading.Thread(target=self._run, name="gnnlm-writes", daemon=True)
        # used by the writing thread only
        self._writers: dict[tuple[ServedRun, str], Writer] = {}
        self._active: dict[TextState, ActiveText] = {}

    # -- for other threads ---------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()
        self._calls.start()

    def submit(self, request: QueuedRequest) -> None:
        """Queue a request; refuse it if the queue is full or the server is shutting down."""
        with self._changed:
            self._check_admission()
            self._waiting.append(request)
            self._running.add(request)
            self._changed.notify_all()
        self._metrics.waiting.set(len(self._waiting))

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Queue a call; refuse it if the queue is full or the server is shutting down."""
        with self._changed:
            self._check_admission()
            return self._calls.submit(work)

    def cancel(self, request: QueuedRequest) -> None:
        """Drop a request whose client has disconnected; do nothing if it is finished."""
        with self._changed:
            if request in self._running:
                request.cancelled = True
                self._changed.notify_all()

    def drain(self) -> None:
        """From now on, refuse new requests."""
        with self._changed:
            self._draining = True

    @property
    def ready(self) -> bool:
        return self._thread.is_alive() and self._calls.alive and not self._draining

    @property
    def idle(self) -> bool:
        with self._changed:
            return not (self._running or self._calls.busy)

    def stop(self) -> None:
        """End everything that is left, and the threads."""
        with self._changed:
            self._draining = True
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)
        self._calls.stop(STOP_SECONDS)

    def _check_admission(self) -> None:
        if self._draining:
            raise shutting_down()
        if len(self._waiting) + len(self._calls) >= self._limits.queue:
            raise queue_full()

    # -- the writing thread --------------------------------------------------------------------------------

    def _run(self) -> None:  # without variables, which would keep a book open while the thread waits
        while self._wait():
            self._end_some()
            self._admit()
            self._step_all()
            self._drop_outdated()
            self._metrics.waiting.set(len(self._waiting))
            self._metrics.active.set(len(self._active))
        for request in list(self._running):
            self._fail(request, shutting_down())

    def _wait(self) -> bool:
        """Wait for a request; return false when the worker stops."""
        with self._changed:
            while not (self._stopping or self._running):
                self._changed.wait(PAUSE)
                self._drop_outdated()
            return not self._stopping

    def _drop_outdated(self) -> None:
        """Drop the writers of outdated generations that have no text in progress."""
        for run, predictor in list(self._writers):
            if run.outdated and not self._writers[run, predictor].busy:
                del self._writers[run, predictor]

    def _end_some(self) -> None:
        """Drop cancelled requests, and end those that have reached the time limit with what is written so far."""
        late = time.monotonic() - self._limits.max_seconds
        for request in [one for one in self._running if one.cancelled or one.began < late]:
            if request.cancelled:
                self._metrics.cancelled.inc()
                self._drop(request)
            elif request.prompts_begun < len(request.prompts):
                message = f"the request was not finished in {self._limits.max_seconds:g} seconds"
                self._fail(request, ApiError(503, message, code="timeout"))
            else:
                texts = self._texts_of(request)
                for text in texts:
                    text.writer.stop(text.state, "length")
                self._deliver(texts)

    def _admit(self) -> None:
        """Let waiting requests add prompts in turn while the batch has room."""
        while True:
            with self._changed:
                if not self._waiting:
                    return
                request = self._waiting[0]
                if self._active and len(self._active) + request.n > self._limits.batch:
                    return
                self._waiting.popleft()
                if request.prompts_begun + 1 < len(request.prompts):
                    self._waiting.append(request)
            predictor = request.settings.predictor
            writer = self._writers.get((request.run, predictor))
            if writer is None:
                writer = self._writers[request.run, predictor] = request.run.book.writer(predictor)
            prompt = request.prompts[request.prompts_begun]
            first = request.prompts_begun * request.n
            for number, state in enumerate(writer.add(prompt, request.settings, request.n), first):
                self._active[state] = ActiveText(request, number, state, writer)
            request.prompts_begun += 1
            self._metrics.prompt_tokens.labels(request.model).inc(len(prompt))

    def _step_all(self) -> None:
        for key, writer in list(self._writers.items()):
            if writer.busy:
                self._step(key, writer)

    def _step(self, key: tuple[ServedRun, str], writer: Writer) -> None:
        try:
            written = writer.step()
            self._metrics.steps.inc()
            self._deliver([self._active[state] for state in written if state in self._active])
        except Exception as error:  # of any kind: the other requests go on
            log.exception("a step failed")
            self._metrics.failed.inc()
            message = str(error) if isinstance(error, GnnlmError) else FAILED
            del self._writers[key]
            for request in {text.request for text in self._active.values() if text.writer is writer}:
                self._fail(request, ApiError(500, message))

    def _deliver(self, texts: Sequence[ActiveText]) -> None:
        """Send requests what is new of texts of one run."""
        for text, update in updates_of(texts):
            request = text.request
            if update.written and not request.first_token:
                request.first_token = True
                self._metrics.first.observe(time.monotonic() - request.began)
            if update.finish_reason is not None:
                self._count(request.model, update)  # before the client can have the answer and read the metrics
            request.deliver(update)
            if update.finish_reason is not None:
                del self._active[text.state]
                request.unfinished -= 1
                if not request.unfinished:
                    self._drop(request)

    def _count(self, model: str, update: TextUpdate) -> None:
        self._metrics.tokens.labels(model).inc(update.written)
        self._metrics.drafted.labels(model).inc(update.drafted)
        self._metrics.accepted.labels(model).inc(update.accepted)
        self._metrics.searches.labels(model).inc(update.searches)

    def _texts_of(self, request: QueuedRequest) -> list[ActiveText]:
        return [text for text in self._active.values() if text.request is request]

    def _fail(self, request: QueuedRequest, error: ApiError) -> None:
        request.deliver(error)
        self._drop(request)

    def _drop(self, request: QueuedRequest) -> None:
        """Forget a request, and stop its texts."""
        for text in self._texts_of(request):
            text.writer.stop(text.state, "interrupted")
            del self._active[text.state]
        with self._changed:
            self._running.discard(request)
            if request in self._waiting:
                self._waiting.remove(request)
