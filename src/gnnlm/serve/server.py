"""The HTTP server around the application: limits on slow clients, signals, and the graceful end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gnnlm.serve.api_errors import ApiError
from gnnlm.serve.app import make_app
from gnnlm.serve.context import ServerContext
from gnnlm.serve.limits import Limits
from gnnlm.serve.socket import is_loopback

MOST_HEADERS = 32 * 1024  # bytes
IDLE_SECONDS = 15  # that a connection may wait for its next request


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol with time limits on requests and answers, and errors in OpenAI's form."""

    limits = Limits()
    _receive_timer: asyncio.TimerHandle | None = None  # until the headers of a request must have arrived
    _send_timer: asyncio.TimerHandle | None = None  # until the client must have read some of its answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            transport.close()
        else:
            self._start_receive_timer()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        waiting = before is None or before.response_complete
        super().data_received(data)
        if self.cycle is not before:
            self._stop_receive_timer()
        elif waiting and self._receive_timer is None:  # the first bytes of another request
            self._start_receive_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_receive_timer()
        self._stop_send_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_send_timer()
        self._start_send_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_send_timer()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size() and self._send_timer is None:  # closing waits until all is sent
            self._start_send_timer()

    def send_400_response(self, msg: str) -> None:
        body = ApiError(400, msg).body
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            start = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for event in (start, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _start_receive_timer(self) -> None:
        self._receive_timer = self.loop.call_later(self.limits.read_seconds, self.transport.close)

    def _stop_receive_timer(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def _start_send_timer(self) -> None:
        self._send_timer = self.loop.call_later(self.limits.send_seconds, self.transport.abort)

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None


class Server(uvicorn.Server):
    """uvicorn's server with a graceful end: running requests are finished while new ones get a 503."""

    def __init__(self, config: uvicorn.Config, context: ServerContext, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._context = context
        self._ready = ready
        self._deadline: float | None = None  # of a server that has been told to stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse new requests at the first signal; end at once at the second."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._context.limits.grace
            self._context.worker.drain()
        else:
            self._deadline = 0.0
            self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        if self._deadline is not None and (self._context.worker.idle or time.monotonic() >= self._deadline):
            self._context.worker.stop()
            self.should_exit = True
        return await super().on_tick(counter)


def make_server(context: ServerContext, loopback: bool, ready: Callable[[], None]) -> Server:
    config = uvicorn.Config(
        make_app(context, loopback),
        http=type("ServerProtocol", (LimitedProtocol,), {"limits": context.limits}),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=MOST_HEADERS,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=2,
    )
    return Server(config, context, ready)


def serve(context: ServerContext, listening: socket.socket, ready: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM."""
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # the application logs errors of requests
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        make_server(context, is_loopback(listening), ready).run(sockets=[listening])
    finally:
        context.worker.stop()
        for number, handler in before.items():
            signal.signal(number, handler)
