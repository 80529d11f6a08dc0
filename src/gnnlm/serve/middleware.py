"""The checks that every request passes before the framework: API key, host, size and time of the body, metrics.

Nothing of a refused body is parsed or kept.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gnnlm.serve import static_page
from gnnlm.serve.api_errors import ApiError
from gnnlm.serve.context import CLIENT_GONE, ServerContext

OPEN = {"/healthz", "/readyz"} | static_page.PATHS  # they need no key; the page asks for one
METHODS = {"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"}
SAFE_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


class RequestGuard:
    """Middleware around the application. `paths` are those that metrics tell apart."""

    def __init__(self, app: ASGIApp, context: ServerContext, paths: Collection[str], loopback: bool = False) -> None:
        self._app = app
        self._context = context
        self._paths = paths
        self._local_only = loopback and not context.keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = GuardedSend(send)
        began = time.perf_counter()
        try:
            self._check(scope)
            body = await self._read_body(scope, receive)
            await self._app(scope, _replay(body, receive), answer)
        except ApiError as error:
            await answer.refuse(error, receive, self._context.limits.read_seconds)
        finally:
            path = self._label(scope["path"])
            method = scope["method"] if scope["method"] in METHODS else "other"
            metrics = self._context.metrics
            metrics.requests.labels(path, method, str(answer.status)).inc()
            metrics.seconds.labels(path).observe(time.perf_counter() - began)

    def _label(self, path: str) -> str:
        """Return a path as metrics show it, so that clients cannot make up labels."""
        if path.startswith("/v1/models/"):
            return "/v1/models/{model}"
        return path if path in self._paths else "other"

    def _check(self, scope: Scope) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        keys = self._context.keys
        if self._local_only and not is_local(headers.get(b"host", "")):
            # a web page can make a browser reach this address under a host name of the page's own
            message = "this server has no API keys and answers only on this machine; use localhost as its name"
            raise ApiError(403, message, code="host_not_allowed")
        if keys and scope["path"] not in OPEN and not keys.accept(headers.get(b"authorization", "")):
            message = "no API key, or a wrong one; send the header Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        limits = self._context.limits
        too_large = ApiError(
            413, f"the body is larger than this server accepts ({limits.max_body:,} bytes)", code="body_too_large"
        )
        headers = dict(scope["headers"])
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > limits.max_body:
            raise too_large
        if announced == b"0" and b"transfer-encoding" not in headers:
            return b""
        body = bytearray()
        more = True
        end = time.monotonic() + limits.read_seconds
        while more:
            try:
                message = await asyncio.wait_for(receive(), max(0.01, end - time.monotonic()))
            except asyncio.TimeoutError:
                raise ApiError(408, "the body did not arrive in time", headers={"Connection": "close"}) from None
            if message["type"] == "http.disconnect":
                raise ApiError(CLIENT_GONE, "the client has disconnected")
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > limits.max_body:
                raise too_large
        return bytes(body)


class GuardedSend:
    """Sends an answer, with headers of ours, and remembers its status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = False
        self.status = CLIENT_GONE

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            self.status = message["status"]
            message = {**message, "headers": [*message["headers"], *SAFE_HEADERS]}
        await self._send(message)

    async def refuse(self, error: ApiError, receive: Receive, seconds: float) -> None:
        """Answer with an error, unless an answer has started or the client has disconnected.

        The rest of a body that is too large is read and dropped before the answer ends: a client that is still sending
        would not read the answer if the connection were closed at once.
        """
        if self._started or error.status == CLIENT_GONE:
            return
        too_large = error.status == 413
        headers = {"content-type": "application/json", **error.headers}
        if too_large:
            headers["connection"] = "close"
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        raw.append((b"content-length", str(len(error.body)).encode()))
        await self({"type": "http.response.start", "status": error.status, "headers": raw})
        await self({"type": "http.response.body", "body": error.body, "more_body": too_large})
        if too_large:
            await _drop_body(receive, seconds)
            await self({"type": "http.response.body", "body": b""})


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body, then what comes after: that the client disconnects."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed


async def _drop_body(receive: Receive, seconds: float) -> None:
    end = time.monotonic() + seconds
    more = True
    while more and time.monotonic() < end:
        try:
            message = await asyncio.wait_for(receive(), end - time.monotonic())
        except asyncio.TimeoutError:
            return
        more = message["type"] == "http.request" and message.get("more_body", False)


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
