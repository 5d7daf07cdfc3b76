"""OpenAI's endpoints over one session."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Send

from ssdevice.errors import SSDeviceError
from ssdevice.runtime.generation import Generation
from ssdevice.runtime.session import Session
from ssdevice.runtime.split import BINARY, HEALTH, VERIFIES
from ssdevice.serve import metrics
from ssdevice.serve.decoder import Decoder
from ssdevice.serve.guard import DONE, VERIFY, Guard, Refusal, content_of, event, json_response
from ssdevice.serve.reply import Reply
from ssdevice.serve.request import Request, chat_request, text_request
from ssdevice.serve.verifying import Verifying


def application(
    session: Session,
    *,
    waiting: int,
    hosts: Collection[str] | None,
    key: str | None,
    devices: int = 0,
) -> Guard:
    """The server's application (ASGI).

    ``waiting``: requests that may wait while one is decoded; ``devices``: how many may have their
    drafts verified; ``hosts``, ``key``: see Guard.
    """
    verifying = Verifying(session, devices) if devices else None
    counts = metrics.Metrics()
    decoder = Decoder(session, counts, waiting)
    bundle = session.bundle
    names = [app.name for app in bundle.manifest.apps]
    created = int(bundle.folder.stat().st_mtime)
    fingerprint = f"fp_{bundle.manifest.model.sha256[:12]}"

    def known(name: str) -> dict[str, Any]:
        if name not in names:
            what = f"there is no model {name[:100]!r}; the bundle's apps are {', '.join(names)}"
            raise Refusal(what, 404, code="model_not_found", param="model")
        limits = {VERIFIES: asdict(verifying.limits)} if verifying else {}
        return {"id": name, "object": "model", "created": created, "owned_by": "ssdevice", **limits}

    async def health(_: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def counted(_: HttpRequest) -> Response:
        return PlainTextResponse(counts.text(decoder.pending), media_type=metrics.TYPE)

    async def models(_: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": list(map(known, names))})

    async def model(http: HttpRequest) -> Response:
        return JSONResponse(known(http.path_params["name"]))

    def answering(
        parse: Callable[[bytes], Request],
    ) -> Callable[[HttpRequest], Awaitable[Response]]:
        async def answer(http: HttpRequest) -> Response:
            request = parse(await content_of(http))
            known(request.app)
            return _Answer(
                decoder.answers(request), Reply(request, session.tokenizer, fingerprint), http
            )

        return answer

    async def verify(http: HttpRequest) -> Response:
        if verifying is None:
            raise Refusal("this server verifies no drafts; start it with --verify", 404)
        given = http.path_params
        content = await content_of(http)
        known(given["name"])
        call = partial(verifying.answer, given["name"], given["client"], given["at"], content)
        return Response(await decoder.verified(call), media_type=BINARY)

    routes = [
        Route(HEALTH, health),
        Route("/metrics", counted),
        Route("/v1/models", models),
        Route("/v1/models/{name}", model),
        Route("/v1/chat/completions", answering(chat_request), methods=["POST"]),
        Route("/v1/completions", answering(text_request), methods=["POST"]),
        Route(VERIFY + "{name}/{client}/{at:int}", verify, methods=["POST"]),
    ]
    handlers: dict[Any, Any] = {HTTPException: _http_error, SSDeviceError: _error}
    return Guard(Starlette(routes=routes, exception_handlers=handlers), counts, hosts, key)


class _Answer(StreamingResponse):
    """An answer in one object or as server-sent events, which ends when its client leaves."""

    def __init__(
        self, answers: AsyncGenerator[Generation, None], reply: Reply, http: HttpRequest
    ) -> None:
        super().__init__(
            self._events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self.answers = answers
        self.reply = reply
        self.http = http

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self.answers):
            try:
                answer = self.first = await anext(self.answers)  # refusals come before a stream
                if self.reply.request.stream:
                    return await super().stream_response(send)
                async for each in self.answers:
                    answer = each
                response = json_response(self.reply.whole(answer))
            except SSDeviceError as error:
                response = Refusal.of(error).response
            await response(self.http.scope, self.http.receive, send)

    async def _events(self) -> AsyncIterator[bytes]:
        """An error is one of the events."""
        try:
            yield b"".join(map(event, self.reply.pieces(self.first)))
            async for answer in self.answers:
                yield b"".join(map(event, self.reply.pieces(answer)))
        except Exception as error:
            yield event(Refusal.of(error).body)
        yield DONE


async def _error(_: HttpRequest, error: Exception) -> Response:
    return Refusal.of(error).response


async def _http_error(_: HttpRequest, error: HTTPException) -> Response:
    return Refusal(str(error.detail), error.status_code, headers=error.headers).response
