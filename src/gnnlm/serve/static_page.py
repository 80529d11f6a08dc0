"""The page at `/`: plain files of this package, sent as they are, with a strict Content-Security-Policy."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files

from fastapi import APIRouter, Request, Response

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # the browser itself refuses text as markup
        "trusted-types 'none'",
    )
)
HEADERS = {"Content-Security-Policy": POLICY, "Cross-Origin-Opener-Policy": "same-origin", "Cache-Control": "no-cache"}


@dataclass(frozen=True)
class PageFile:
    """A file of the page, as it is sent."""

    body: bytes
    type: str

    @cached_property
    def tag(self) -> str:
        return f'"{hashlib.sha256(self.body).hexdigest()[:32]}"'

    def response(self, request: Request) -> Response:
        """Return the file, or 304 if the browser has it."""
        headers = {**HEADERS, "ETag": self.tag}
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if self.tag in known:
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers=headers, media_type=self.type)


def _read_files() -> dict[str, PageFile]:
    """Return all files of the page by path."""
    found = {}
    for file in files("gnnlm.serve").joinpath("page").iterdir():
        suffix = "." + file.name.rpartition(".")[2]
        path = "/" if file.name == "index.html" else f"/page/{file.name}"
        found[path] = PageFile(file.read_bytes(), TYPES[suffix])
    return found


FILES = _read_files()
PATHS = frozenset(FILES)
router = APIRouter(include_in_schema=False)


async def send(request: Request) -> Response:
    return FILES[request.url.path].response(request)


for path in FILES:
    router.add_api_route(path, send, methods=["GET", "HEAD"])
