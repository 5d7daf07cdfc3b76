"""What requests must pass before an application gets them, and what they are refused with.

Their names, keys, sizes and times are checked.
"""

import asyncio
import hmac
import json
import logging
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from ssdevice.errors import BundleError, ContextOverflowError, InputError, SSDeviceError
from ssdevice.runtime.split import BINARY, HEALTH
from ssdevice.serve.metrics import Metrics
from ssdevice.serve.names import LOOPBACK, host_name

MAX_BODY = 1 << 20
BODY_S = 30.0
"""How long a request's content may take."""
IDLE_S = 30.0
"""How long a connection may be without a request, or take nothing of an answer."""
CONNECTIONS = 256
LAST_WORDS_S = 5
"""How long answers may go on after Ctrl-C."""
VERIFY = "/v1/verify/"
INVALID = "invalid_request_error"
SERVER = "server_error"
DONE = b"data: [DONE]\n\n"
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
log = logging.getLogger(__name__)


def json_of(value: Any) -> bytes:
    """A value as JSON.

    Half a character, which JSON can name and UTF-8 cannot hold, is written as its escape.
    """
    return _JSON.encode(value).encode("utf-8", "backslashreplace")


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(json_of(value), status, headers, "application/json")


def event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: %b\n\n" % json_of(value)


@dataclass(eq=False)
class Refusal(SSDeviceError):
    """A request that is not answered.

    ``kind``, ``code``: OpenAI's words.
    ``param``: the parameter at fault.
    """

    message: str
    status: int = 400
    kind: str = INVALID
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        super().__init__(self.message)

    @classmethod
    def of(cls, error: BaseException) -> "Refusal":
        """The refusal for an error of any kind; one that nobody foresaw is logged."""
        if isinstance(error, Refusal):
            return error
        if isinstance(error, ContextOverflowError):
            return cls(str(error), code="context_length_exceeded", param="messages")
        if isinstance(error, InputError) and not isinstance(error, BundleError):
            return cls(str(error))
        if isinstance(error, SSDeviceError):
            return cls(str(error), 500, kind=SERVER)
        log.error("a request failed", exc_info=error)  # its traceback is not for clients
        return cls(
            f"the server failed ({type(error).__name__}); its log says more", 500, kind=SERVER
        )

    @property
    def body(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def response(self) -> Response:
        return json_response(self.body, self.status, self.headers)


class Guard:
    """Passes on requests that may ask, and counts responses.

    ``hosts``: names by which requests may call this machine, None for any. ``key``: what they must
    bear, None for nothing.
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, hosts: Collection[str] | None, key: str | None
    ) -> None:
        self.app = app
        self.metrics = metrics
        self.hosts = hosts
        self.key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request (ASGI)."""
        last: dict[str, Any] = {}

        async def counted(message: Message) -> None:
            last.update(message)
            if message["type"] == "http.response.start":
                self.metrics.statuses[message["status"]] += 1
            await send(message)

        try:
            self._check(scope["method"], scope["path"], Headers(scope=scope))
            await self.app(scope, receive, counted)
        except Refusal as refusal:
            await refusal.response(scope, receive, counted)
        except asyncio.CancelledError:  # LAST_WORDS_S after Ctrl-C
            ending = Refusal("the server ends", 503, kind=SERVER)
            if not last:
                await ending.response(scope, receive, counted)
            elif last.get("more_body", last["type"] == "http.response.start"):  # a stream
                await send({"type": "http.response.body", "body": event(ending.body) + DONE})

    def _check(self, method: str, path: str, headers: Headers) -> None:
        hosts = [host_name(host) for host in headers.getlist("host")]
        if self.hosts is not None and (len(hosts) != 1 or hosts[0] not in self.hosts):
            raise Refusal(
                f"this server only answers to names of this machine: use http://{LOOPBACK}", 421
            )
        if path != HEALTH and not self._bears_key(headers.get("authorization", "")):
            raise Refusal(
                "a key is needed: Authorization: Bearer KEY",
                401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        kind = BINARY if path.startswith(VERIFY) else "application/json"
        if method == "POST" and headers.get("content-type", "").partition(";")[0].strip() != kind:
            # Pages of other sites may post forms and plain text to this machine unasked.
            raise Refusal(f"the header Content-Type is to be {kind}", 415)

    def _bears_key(self, authorization: str) -> bool:
        if self.key is None:
            return True
        return hmac.compare_digest(authorization.encode(), f"Bearer {self.key}".encode())


async def content_of(http: Request) -> bytes:
    """The content of a request.

    Raises Refusal if it is too large, comes too slowly, or not at all.
    """
    content = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in http.stream():
                content += part
                if len(content) > MAX_BODY:
                    raise Refusal(
                        f"a request has at most {MAX_BODY} bytes", 413, code="request_too_large"
                    )
    except TimeoutError:
        raise Refusal(
            f"the request was not sent whole in {BODY_S:g} s", 408, headers={"Connection": "close"}
        ) from None
    except ClientDisconnect:
        raise Refusal("the client left") from None
    return bytes(content)


class Protocol(H11Protocol):
    """Closes connections that do nothing for IDLE_S, and new ones while there are CONNECTIONS."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # asyncio does so only where the listening socket names its protocol: an answer's content
        # would wait up to 40 ms for the acknowledgement of its headers.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
        self._stalled.cancel()


def server(app: ASGIApp) -> Server:
    return Server(
        Config(
            app,
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=int(IDLE_S),
            timeout_graceful_shutdown=LAST_WORDS_S,
            proxy_headers=False,
        )
    )
