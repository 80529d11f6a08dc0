"""The HTTP server around the application: slow clients, signals, and the way down."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gnnlm.serve.api_errors import Problem, encoded
from gnnlm.serve.app import make_app
from gnnlm.serve.context import Desk
from gnnlm.serve.limits import Limits
from gnnlm.serve.socket import is_loopback

MOST_HEADERS = 32 * 1024  # bytes
IDLE = 15  # seconds that a connection may wait for its next request


class Protocol(H11Protocol):
    """uvicorn's, but requests must arrive and answers be taken in time, and errors are in OpenAI's form."""

    limits = Limits()
    _timer: asyncio.TimerHandle | None = None  # until the headers of a request must be there
    _stalled: asyncio.TimerHandle | None = None  # until the client must have taken some of its answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            transport.close()
            return
        self._expect()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        waiting = before is None or before.response_complete
        super().data_received(data)
        if self.cycle is not before:
            self._arrived()
        elif waiting and self._timer is None:  # the first bytes of a further request
            self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        self._taken()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._taken()
        self._stalled = self.loop.call_later(self.limits.send_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._taken()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size() and self._stalled is None:  # closing waits until all is sent
            self._stalled = self.loop.call_later(self.limits.send_seconds, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        body = encoded(Problem(400, msg).body)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            for event in (
                h11.Response(status_code=400, headers=[*headers, (b"connection", b"close")], reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _expect(self) -> None:
        self._timer = self.loop.call_later(self.limits.read_seconds, self.transport.close)

    def _arrived(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _taken(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


class Server(uvicorn.Server):
    """uvicorn's, with a way down that finishes what is running while new requests get a 503."""

    def __init__(self, config: uvicorn.Config, desk: Desk, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._desk, self._ready = desk, ready
        self._end: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal starts the way down, a second one ends at once."""
        if self._end is None:
            self._end = time.monotonic() + self._desk.limits.grace
            self._desk.worker.drain()
        else:
            self._end, self.force_exit = 0.0, True

    async def on_tick(self, counter: int) -> bool:
        if self._end is not None and (self._desk.worker.idle or time.monotonic() >= self._end):
            self._desk.worker.stop()
            self.should_exit = True
        return await super().on_tick(counter)


def make_server(desk: Desk, loopback: bool, ready: Callable[[], None]) -> Server:
    protocol = type("LimitedProtocol", (Protocol,), {"limits": desk.limits})
    options: dict[str, Any] = {
        "http": protocol,
        "ws": "none",
        "lifespan": "on",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "h11_max_incomplete_event_size": MOST_HEADERS,
        "timeout_keep_alive": IDLE,
        "timeout_graceful_shutdown": 2,
    }
    return Server(uvicorn.Config(make_app(desk, loopback), **options), desk, ready)


def serve(desk: Desk, listening: socket.socket, ready: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM."""
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # what goes wrong in an answer is logged by the app
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        make_server(desk, is_loopback(listening), ready).run(sockets=[listening])
    finally:
        desk.worker.stop()
        for number, handler in before.items():
            signal.signal(number, handler)
