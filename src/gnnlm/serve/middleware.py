"""What every request passes first: who asks, how much is sent, how long that takes, and how it is counted.

It stands before the framework, so that nothing of a refused body is parsed or kept.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Callable, MutableMapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gnnlm.serve import static_page
from gnnlm.serve.api_errors import Problem, encoded
from gnnlm.serve.context import CLIENT_GONE, Desk

OPEN = {"/healthz", "/readyz"} | static_page.PATHS  # they need no key; the page asks for one
SAFE_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


class Guard:
    """Keys, the host's name, the size and the time of a body; counts answers and their time."""

    def __init__(self, app: ASGIApp, desk: Desk, paths: Callable[[str], str], loopback: bool = False) -> None:
        self._app, self._desk, self._paths = app, desk, paths
        self._local_only = loopback and not desk.keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = Answer(send)
        began = time.perf_counter()
        try:
            try:
                self._check(scope)
                body = await self._body(scope, receive)
                await self._app(scope, _replayed(body, receive), answer)
            except Problem as problem:
                await answer.refuse(problem, receive, self._desk.limits.read_seconds)
        finally:
            path, metrics = self._paths(scope["path"]), self._desk.metrics
            metrics.requests.labels(path, _method(scope["method"]), str(answer.status)).inc()
            metrics.seconds.labels(path).observe(time.perf_counter() - began)

    def _check(self, scope: Scope) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if self._local_only and not is_local(headers.get(b"host", "")):
            # a page on the web can make a browser ask this address under a name of its own
            message = "this server has no API keys and answers only on this machine; ask for it as localhost"
            raise Problem(403, message, code="host_not_allowed")
        if self._desk.keys and self._needs_key(scope) and not self._desk.keys.accept(headers.get(b"authorization", "")):
            message = "no API key, or a wrong one; send the header Authorization: Bearer KEY"
            raise Problem(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _needs_key(self, scope: Scope) -> bool:
        return scope["path"] not in OPEN

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        most = self._desk.limits.max_body
        too_large = Problem(413, f"the body is larger than this server takes ({most:,} bytes)", code="body_too_large")
        headers = dict(scope["headers"])
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > most:
            raise too_large
        if announced == b"0" and b"transfer-encoding" not in headers:
            return b""
        parts: list[bytes] = []
        size, more = 0, True
        end = time.monotonic() + self._desk.limits.read_seconds
        while more:
            try:
                message = await asyncio.wait_for(receive(), max(0.01, end - time.monotonic()))
            except asyncio.TimeoutError:
                raise Problem(408, "the body did not arrive in time", headers={"Connection": "close"}) from None
            if message["type"] == "http.disconnect":
                raise Problem(CLIENT_GONE, "the client went away")
            parts.append(message.get("body", b""))
            size, more = size + len(parts[-1]), message.get("more_body", False)
            if size > most:
                raise too_large
        return b"".join(parts)


class Answer:
    """An answer on its way out."""

    def __init__(self, send: Send) -> None:
        self._send, self.status, self.started = send, CLIENT_GONE, False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started, self.status = True, message["status"]
            message = {**message, "headers": [*message["headers"], *SAFE_HEADERS]}
        await self._send(message)

    async def refuse(self, problem: Problem, receive: Receive, seconds: float) -> None:
        """Answer with an error. Before the end of one to a large body, more of it is thrown away: a client that is
        still sending would not read the answer if the connection were closed at once."""
        if self.started:
            return
        if problem.status == CLIENT_GONE:
            self.status = CLIENT_GONE
            return
        headers = {"content-type": "application/json", **problem.headers}
        if problem.status == 413:
            headers["connection"] = "close"
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        body = encoded(problem.body)
        raw.append((b"content-length", str(len(body)).encode()))
        await self({"type": "http.response.start", "status": problem.status, "headers": raw})
        await self({"type": "http.response.body", "body": body, "more_body": problem.status == 413})
        if problem.status == 413:
            await _throw_away(receive, seconds)
            await self({"type": "http.response.body", "body": b""})


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body that was read, then whatever comes (which is that the client goes away)."""
    left: list[MutableMapping[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> MutableMapping[str, Any]:
        return left.pop() if left else await receive()

    return again


async def _throw_away(receive: Receive, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            message = await asyncio.wait_for(receive(), end - time.monotonic())
        except asyncio.TimeoutError:
            return
        if message["type"] != "http.request" or not message.get("more_body", False):
            return


def _method(method: str) -> str:
    """One of the usual ones, so that clients cannot make up labels."""
    return method if method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH") else "other"


def is_local(host: str) -> bool:
    """Whether a Host header names this machine by a loopback name or address.

    >>> is_local("localhost:8000"), is_local("127.0.0.1"), is_local("[::1]:80"), is_local("evil.example")
    (True, True, True, False)
    """
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
