"""The threads that use the models: one writes all texts together, a step at a time, one answers everything else.

New requests join the batch at a step boundary and wait in a bounded queue before that. Requests take turns: each adds
one prompt, then the next request does, so that many prompts of one do not keep another waiting. A long text to be
scored slows writing down, but does not stop it.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from gnnlm.errors import GnnlmError
from gnnlm.serve.api_errors import Problem, busy, leaving
from gnnlm.serve.limits import Limits
from gnnlm.serve.metrics import Metrics
from gnnlm.serve.runs import Served
from gnnlm.write.attribution import copied_spans, described_tokens
from gnnlm.write.batch_loop import Writer
from gnnlm.write.text_state import ScoredToken, TextSettings, TextState
from gnnlm.write.written_text import Span, Token

log = logging.getLogger("gnnlm.serve")
Answer = TypeVar("Answer")
LOOK = 1.0  # seconds between two looks at what is no longer needed


@dataclass(frozen=True)
class Record:
    """A token whose text is final, and the character at which it begins."""

    text: str
    start: int
    id: int
    log_prob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Counts:
    """What a text has taken so far."""

    steps: int
    drafted: int
    accepted: int
    searches: int
    seconds: float


@dataclass(frozen=True)
class Ending:
    """How a text ended."""

    reason: str
    spans: list[Span]
    tokens: int  # written, those behind a stop string included


@dataclass(frozen=True)
class News:
    """What is new of one text: tokens, with their sources if those are asked for, and the end if it has come."""

    number: int
    records: list[Record]
    tokens: list[Token]
    scored: list[ScoredToken]  # the tokens of the prompt, with the first news, if they are asked for
    counts: Counts
    ending: Ending | None


class Mailbox(Protocol):
    """Where a request's news go; called by the worker's thread."""

    def put(self, item: News | Problem) -> None: ...


@dataclass(eq=False)
class Asked:
    """A request to write n texts for each prompt. `sources` is how many each token shows; None: no details at all."""

    run: Served
    prompts: Sequence[Sequence[int]]
    settings: TextSettings
    n: int
    sources: int | None
    stream: bool
    mailbox: Mailbox
    began: float = field(default_factory=time.monotonic)
    begun: int = 0  # prompts
    left: int = 0  # texts that are not finished
    first: bool = False  # whether it has a token
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.left = len(self.prompts) * self.n

    @property
    def model(self) -> str:
        return f"{self.run.name}:{self.settings.predictor}"


@dataclass(eq=False)
class Going:
    """A text that is being written."""

    asked: Asked
    number: int
    writer: Writer
    given: int = 0
    told: bool = False


class Worker:
    """Writes for all requests of a server."""

    def __init__(self, limits: Limits, metrics: Metrics, look: Callable[[], None] = lambda: None) -> None:
        """`look` is called now and then while there is nothing to answer."""
        self._limits, self._metrics, self._look = limits, metrics, look
        self._changed = threading.Condition()  # guards what all threads see
        self._waiting: deque[Asked] = deque()
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._running: set[Asked] = set()
        self._draining = self._stopping = False
        self._calling = False
        self._writers: dict[tuple[Served, str], Writer] = {}  # from here on, the writing thread's own
        self._going: dict[TextState, Going] = {}
        self._threads = [
            threading.Thread(target=work, name=f"gnnlm-{name}", daemon=True)
            for name, work in (("writes", self._run), ("answers", self._answer))
        ]

    # -- for other threads ---------------------------------------------------------------------------------

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, asked: Asked) -> None:
        """Take a request, or refuse it if the queue is full or the server is shutting down."""
        with self._changed:
            self._admissible()
            self._waiting.append(asked)
            self._running.add(asked)
            self._changed.notify_all()
        self._metrics.waiting.set(len(self._waiting))

    def call(self, work: Callable[[], Answer]) -> Future[Answer]:
        """Do something with a model, beside the writing."""
        future: Future[Answer] = Future()
        with self._changed:
            self._admissible()
            self._calls.append((future, work))
            self._changed.notify_all()
        return future

    def cancel(self, asked: Asked) -> None:
        """Forget a request whose client has gone away; does nothing if it is finished."""
        with self._changed:
            if asked in self._running:
                asked.cancelled = True
                self._changed.notify_all()

    def drain(self) -> None:
        """From now on, refuse new requests."""
        with self._changed:
            self._draining = True

    @property
    def ready(self) -> bool:
        return all(thread.is_alive() for thread in self._threads) and not self._draining

    @property
    def idle(self) -> bool:
        with self._changed:
            return not (self._running or self._calls or self._calling)

    def stop(self) -> None:
        """End everything that is left, and the threads."""
        with self._changed:
            self._draining = self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(30)

    def _admissible(self) -> None:
        if self._draining:
            raise leaving()
        if len(self._waiting) + len(self._calls) >= self._limits.queue:
            raise busy()

    # -- the threads ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._wait():
            self._end_some()
            self._admit()
            self._step_all()
            self._drop_outdated()
            self._metrics.waiting.set(len(self._waiting))
            self._metrics.active.set(len(self._going))
        for asked in list(self._running):
            self._fail(asked, leaving())

    def _wait(self) -> bool:
        """Wait for something to do; false if there will be nothing more."""
        with self._changed:
            while not (self._stopping or self._running):
                self._changed.wait(LOOK)
                self._drop_outdated()
            return not self._stopping

    def _drop_outdated(self) -> None:
        """Close generations that no text is written from any more."""
        for run, predictor in list(self._writers):
            if run.outdated and not self._writers[run, predictor].busy:
                del self._writers[run, predictor]

    def _answer(self) -> None:
        """Answer calls one after the other."""
        while True:
            with self._changed:
                self._calling = False
                if not (self._stopping or self._calls):
                    self._changed.wait(LOOK)
                if self._stopping:
                    break
                self._calling = bool(self._calls)
                future, work = self._calls.popleft() if self._calls else (Future[Any](), self._look)
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
        for future, _ in self._calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(leaving())

    def _end_some(self) -> None:
        """Forget requests whose client has gone, and end those that have taken too long."""
        late = time.monotonic() - self._limits.max_seconds
        for asked in [asked for asked in self._running if asked.cancelled or asked.began < late]:
            if asked.cancelled:
                self._metrics.cancelled.inc()
                self._forget(asked)
            elif asked.begun < len(asked.prompts):
                seconds = f"{self._limits.max_seconds:g} seconds"
                self._fail(asked, Problem(503, f"the request was not finished in {seconds}", code="timeout"))
            else:  # what is there is the answer
                mine = self._texts_of(asked)
                for writing in mine:
                    self._going[writing].writer.stop(writing, "length")
                self._deliver(mine)

    def _admit(self) -> None:
        """Let waiting requests add prompts in turn, as far as there is room."""
        while True:
            with self._changed:
                if not self._waiting:
                    return
                asked = self._waiting[0]
                if self._going and len(self._going) + asked.n > self._limits.batch:
                    return
                self._waiting.popleft()
                if asked.begun + 1 < len(asked.prompts):
                    self._waiting.append(asked)
            key = asked.run, asked.settings.predictor
            if key not in self._writers:
                self._writers[key] = asked.run.book.writer(asked.settings.predictor)
            prompt = asked.prompts[asked.begun]
            for sample, writing in enumerate(self._writers[key].add(prompt, asked.settings, asked.n)):
                self._going[writing] = Going(asked, asked.begun * asked.n + sample, self._writers[key])
            asked.begun += 1
            self._metrics.prompt_tokens.labels(asked.model).inc(len(prompt))

    def _step_all(self) -> None:
        for key, writer in list(self._writers.items()):
            if writer.busy:
                self._step(key, writer)

    def _step(self, key: tuple[Served, str], writer: Writer) -> None:
        try:
            written = writer.step()
            self._metrics.steps.inc()
            self._deliver(written)
        except Exception as error:  # whatever it is, the server stays up
            log.exception("a step failed")
            self._metrics.failed.inc()
            message = str(error) if isinstance(error, GnnlmError) else "the server made a mistake; its log has more"
            del self._writers[key]
            for asked in {going.asked for going in self._going.values() if going.writer is writer}:
                self._fail(asked, Problem(500, message))

    def _deliver(self, writings: Sequence[TextState]) -> None:
        """Tell the requests what is new of these texts."""
        news = [(writing, self._going[writing]) for writing in writings if writing in self._going]
        for _, same in itertools.groupby(sorted(news, key=_run_of), _run_of):
            parts = [
                (writing, going, places) for writing, going in same if (places := _new(writing, going)) is not None
            ]
            detailed = [part for part in parts if part[1].asked.sources is not None]
            tokens: Iterator[list[Token]] = iter(())
            if detailed:
                most = max(going.asked.sources or 0 for _, going, _ in detailed)
                model = detailed[0][1].asked.run.book.model
                tokens = iter(described_tokens(model, [(writing, places) for writing, _, places in detailed], most))
            for writing, going, places in parts:
                shown = [] if going.asked.sources is None else _cut(next(tokens), going.asked.sources)
                self._tell(writing, going, places, shown)

    def _tell(self, writing: TextState, going: Going, places: range, tokens: list[Token]) -> None:
        asked, stream = going.asked, writing.detokenizer
        if writing.tokens and not asked.first:
            asked.first = True
            self._metrics.first.observe(time.monotonic() - asked.began)
        ending = None
        if writing.finish_reason is not None:
            spans = [] if asked.sources is None else self._spans(writing, asked, places.stop)
            ending = Ending(writing.finish_reason, spans, len(writing.tokens))
        starts = [stream.offsets[place] if place < len(stream.offsets) else len(stream.text) for place in places]
        records = [
            Record(stream.piece(place), start, token.id, token.log_prob, token.top)
            for place, start in zip(places, starts, strict=True)
            for token in [writing.tokens[place]]
        ]
        scored = [] if going.told else writing.scored
        going.given, going.told = places.stop, True
        counts = Counts(writing.steps, writing.drafted, writing.accepted, writing.searches, writing.seconds)
        if ending is not None:  # counted before the answer goes out: who has it may look at the metrics at once
            self._count(asked, counts, ending.tokens)
        asked.mailbox.put(News(going.number, records, tokens, scored, counts, ending))
        if ending is not None:
            del self._going[writing]
            asked.left -= 1
            if not asked.left:
                self._forget(asked)

    def _spans(self, writing: TextState, asked: Asked, count: int) -> list[Span]:
        return copied_spans(asked.run.book.model, writing, count)

    def _count(self, asked: Asked, counts: Counts, tokens: int) -> None:
        metrics = self._metrics
        metrics.tokens.labels(asked.model).inc(tokens)
        metrics.drafted.labels(asked.model).inc(counts.drafted)
        metrics.accepted.labels(asked.model).inc(counts.accepted)
        metrics.searches.labels(asked.model).inc(counts.searches)

    def _texts_of(self, asked: Asked) -> list[TextState]:
        return [writing for writing, going in self._going.items() if going.asked is asked]

    def _fail(self, asked: Asked, problem: Problem) -> None:
        asked.mailbox.put(problem)
        self._forget(asked)

    def _forget(self, asked: Asked) -> None:
        for writing in self._texts_of(asked):
            self._going.pop(writing).writer.stop(writing, "interrupted")
        with self._changed:
            self._running.discard(asked)
            if asked in self._waiting:
                self._waiting.remove(asked)


def _run_of(one: tuple[TextState, Going]) -> int:
    """Tells runs apart, also one with documents attached from the same without."""
    return id(one[1].asked.run)


def _new(writing: TextState, going: Going) -> range | None:
    """The tokens of a text that can be told; None if there is nothing to tell."""
    stream = writing.detokenizer
    if writing.finish_reason is not None:
        stream.finish()
        ends = len(writing.tokens) - len(stream.offsets)  # an end token has no text
        return range(going.given, max(going.given, stream.kept + ends))
    if not going.asked.stream or stream.settled == going.given:
        return None
    return range(going.given, stream.settled)


def _cut(tokens: list[Token], sources: int) -> list[Token]:
    return [replace(token, sources=token.sources[:sources]) for token in tokens]
