"""The server of ``ssdevice web``: the files of a page and nothing else, only to pages of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from ssdevice.serve.guard import Guard
from ssdevice.serve.metrics import Metrics
from ssdevice.serve.names import HOSTS

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".wasm": "application/wasm",
}
"""Not as the system has them: a browser compiles no other type while it loads it, and runs no other as a module."""


def page(files: Mapping[str, Path], headers: Mapping[str, str]) -> Guard:
    """The application (ASGI) that answers with these files, by their path below its address, and with ``headers``."""

    async def answer(request: Request) -> Response:
        path = request.path_params["path"] or "index.html"
        if path not in files:
            return PlainTextResponse("Not Found", 404)
        kind = TYPES.get(PurePosixPath(path).suffix, "application/octet-stream")
        return FileResponse(files[path], headers=headers, media_type=kind)

    return Guard(Starlette(routes=[Route("/{path:path}", answer)]), Metrics(), HOSTS, None)
