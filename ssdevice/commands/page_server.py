"""The server of ``ssdevice web``: the files of a page and nothing else, on loopback, only to pages of this machine."""

from __future__ import annotations

import errno
import re
import socket
import sys
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path, PurePosixPath
from threading import BoundedSemaphore
from typing import Any, BinaryIO

from ssdevice.errors import InputError
from ssdevice.serve.names import HOSTS, LOOPBACK, host_name

IDLE_S = 30.0
"""How long a connection may send and take nothing."""
CONNECTIONS = 64
"""How many there may be at a time; a browser opens six."""
PIECE = 1 << 16
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".wasm": "application/wasm",
}
POLICY = ("default-src 'self'", "script-src 'self' 'wasm-unsafe-eval'", "img-src 'self' data:", "base-uri 'none'")
HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",  # with the next: memory that threads share
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Content-Security-Policy": "; ".join(POLICY),  # nothing is loaded from elsewhere
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")

Site = Mapping[str, Path | bytes]
"""Path below the page's address -> the file there, or its content."""


def listen(host: str, port: int) -> socket.socket:
    """The socket of a server. Raises InputError if it cannot have the address or the port (0: any free one)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = "is taken; choose another (0: any free one)" if taken else f"on {host} cannot be used: {error.strerror}"
        raise InputError(f"--port {port} {why}") from error


class PageServer(ThreadingHTTPServer):
    """A server of these files. Raises InputError if it cannot have the port (0: any free one)."""

    def __init__(self, files: Site, port: int) -> None:
        self.files = files
        self._free = BoundedSemaphore(CONNECTIONS)
        listening = listen(LOOPBACK, port)
        super().__init__(listening.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.server_port = listening, listening.getsockname()[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # the reader has left, or took nothing for too long
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = IDLE_S

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, format: str, *args: object) -> None:
        return

    def _answer(self, body: bool) -> None:
        if [host_name(host) for host in self.headers.get_all("Host", [])] not in [[host] for host in HOSTS]:
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, f"open this page as http://{LOOPBACK}")
            return
        path = self.path.partition("?")[0].removeprefix("/") or "index.html"
        content = self.server.files.get(path)
        if content is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        with BytesIO(content) if isinstance(content, bytes) else content.open("rb") as stream:
            self._send(stream, TYPES.get(PurePosixPath(path).suffix, "application/octet-stream"), body)

    def _send(self, stream: BinaryIO, kind: str, body: bool) -> None:
        """Answer with a file, or with the part of it that a GET asks for."""
        size = stream.seek(0, 2)
        wanted = self.headers["Range"] if body and "If-Range" not in self.headers else None  # files have no versions
        part = part_of(wanted, size)
        headers = {**HEADERS, "Accept-Ranges": "bytes", "Content-Type": kind, "Content-Length": str(len(part or ""))}
        if part is None:
            self.send_response(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
            headers["Content-Range"] = f"bytes */{size}"
        elif len(part) < size:
            self.send_response(HTTPStatus.PARTIAL_CONTENT)
            headers["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{size}"
        else:
            self.send_response(HTTPStatus.OK)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if part and body:
            stream.seek(part.start)
            for at in range(part.start, part.stop, PIECE):
                self.wfile.write(stream.read(min(PIECE, part.stop - at)))


def part_of(wanted: str | None, size: int) -> range | None:
    """The bytes of a file that a header ``Range`` asks for; None: it has none of them.

    All of them for no header, and for those that a server may ignore: of another form, or with several ranges.
    """
    found = _RANGE.fullmatch(wanted.strip()) if wanted else None
    first, last = found.groups() if found else ("", "")
    if not first and not last:
        return range(size)
    if not first:  # the last so many
        part = range(max(size - int(last), 0), size)
    elif last and int(last) < int(first):
        return range(size)
    else:
        part = range(int(first), min(int(last) + 1, size) if last else size)
    return part or None
