"""What stands before the application: names, keys, sizes and times of requests, and clients that leave."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ssdevice.serve.metrics import Metrics
from ssdevice.serve.names import LOOPBACK, host_name
from ssdevice.serve.refusal import Refusal

MAX_BODY = 1 << 20
BODY_S = 30.0
"""How long a request's content may take."""
IDLE_S = 30.0
"""How long a connection may be without a request, or take nothing of an answer."""
CONNECTIONS = 256
HEALTH = "/health"


class Guard:
    """Passes on requests with their whole content, and cancels those whose clients leave.

    ``hosts``: what requests may call this machine, None for anything. ``key``: what they must bear, None for nothing.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, hosts: Collection[str] | None, key: str | None) -> None:
        self.app = app
        self.metrics = metrics
        self.hosts = hosts
        self.key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request (ASGI)."""
        if scope["type"] != "http":
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.metrics.statuses[message["status"]] += 1
            await send(message)

        try:
            self._check(scope["method"], scope["path"], Headers(scope=scope))
            content = await _content(receive)
        except Refusal as refusal:
            await refusal.response(scope, receive, counted)
            return
        if content is not None:
            await _while_present(self.app, scope, content, receive, counted)

    def _check(self, method: str, path: str, headers: Headers) -> None:
        hosts = [host_name(host) for host in headers.getlist("host")]
        if self.hosts is not None and (len(hosts) != 1 or hosts[0] not in self.hosts):
            raise Refusal(f"this server only answers to names of this machine: use http://{LOOPBACK}", 421)
        given = headers.get("authorization", "").encode()
        if self.key is not None and path != HEALTH and not hmac.compare_digest(given, f"Bearer {self.key}".encode()):
            raise Refusal(
                "a key is needed: Authorization: Bearer KEY", 401, code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        if method == "POST" and headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            # Pages of other sites may post forms and plain text to this machine without being asked.
            raise Refusal("send JSON, with the header Content-Type: application/json", 415)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 18 or int(length) > MAX_BODY:
            raise _too_large()


async def _content(receive: Receive) -> bytes | None:
    """The content of a request; None if its client left."""
    content = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                content += message.get("body", b"")
                if len(content) > MAX_BODY:
                    raise _too_large()
                if not message.get("more_body"):
                    return bytes(content)
    except TimeoutError:
        raise Refusal(f"the request was not sent whole in {BODY_S:g} s", 408, headers={"Connection": "close"}) from None


def _too_large() -> Refusal:
    return Refusal(f"a request has at most {MAX_BODY} bytes", 413, code="request_too_large")


async def _while_present(app: ASGIApp, scope: Scope, content: bytes, receive: Receive, send: Send) -> None:
    """Serve a request until it is answered or its client leaves."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            await asyncio.Event().wait()  # a client that leaves ends this
        given = True
        return {"type": "http.request", "body": content, "more_body": False}

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    answering = asyncio.ensure_future(app(scope, replay, send))
    leaving = asyncio.ensure_future(leave())
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        answering.cancel()
        await asyncio.wait((answering, leaving))
    if not answering.cancelled():
        answering.result()


class Protocol(H11Protocol):
    """Closes connections that do nothing for IDLE_S, and new ones while there are CONNECTIONS."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._stalled: asyncio.TimerHandle | None = None
        if len(self.connections) > CONNECTIONS:
            transport.abort()
        self._expect_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_request()

    def _expect_request(self) -> None:
        """Close the connection unless another request begins: a byte now and then is none."""
        before = self.cycle

        def expire() -> None:
            if self.cycle is before:
                self.transport.abort()

        self.loop.call_later(IDLE_S, expire)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(IDLE_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
