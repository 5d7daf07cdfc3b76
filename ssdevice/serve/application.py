"""OpenAI's endpoints over one session."""

from collections.abc import AsyncGenerator, AsyncIterator, Collection
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

    ``waiting``: requests that may wait while one is decoded.
    ``devices``: how many may have their drafts verified.
    ``hosts``, ``key``: see Guard.
    """
    counts = metrics.Metrics()
    verifying = Verifying(session, devices) if devices else None
    answers = _Endpoints(session, Decoder(session, counts, waiting), verifying)
    routes = [
        Route(HEALTH, answers.health),
        Route("/metrics", answers.metrics),
        Route("/v1/models", answers.models),
        Route("/v1/models/{name}", answers.model),
        Route("/v1/chat/completions", answers.chat, methods=["POST"]),
        Route("/v1/completions", answers.completion, methods=["POST"]),
        Route(VERIFY + "{name}/{client}/{at:int}", answers.verified, methods=["POST"]),
    ]
    handlers: dict[Any, Any] = {HTTPException: _http_error, SSDeviceError: _error}
    return Guard(Starlette(routes=routes, exception_handlers=handlers), counts, hosts, key)


class _Endpoints:
    """What is answered at each path. ``verifying``: None for a server that verifies no drafts."""

    def __init__(self, session: Session, decoder: Decoder, verifying: Verifying | None) -> None:
        bundle = session.bundle
        self.session = session
        self.decoder = decoder
        self.verifying = verifying
        self.names = [app.name for app in bundle.manifest.apps]
        self.created = int(bundle.folder.stat().st_mtime)
        self.fingerprint = f"fp_{bundle.manifest.model.sha256[:12]}"

    async def health(self, _: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(self, _: HttpRequest) -> Response:
        page = self.decoder.metrics.text(self.decoder.pending)
        return PlainTextResponse(page, media_type=metrics.TYPE)

    async def models(self, _: HttpRequest) -> Response:
        found = [self._model(name) for name in self.names]
        return JSONResponse({"object": "list", "data": found})

    async def model(self, http: HttpRequest) -> Response:
        return JSONResponse(self._model(http.path_params["name"]))

    async def chat(self, http: HttpRequest) -> Response:
        return self._answer(http, chat_request(await content_of(http)))

    async def completion(self, http: HttpRequest) -> Response:
        return self._answer(http, text_request(await content_of(http)))

    async def verified(self, http: HttpRequest) -> Response:
        if self.verifying is None:
            raise Refusal("this server verifies no drafts; start it with --verify", 404)
        name = http.path_params["name"]
        client = http.path_params["client"]
        at = http.path_params["at"]
        content = await content_of(http)
        self._model(name)
        call = partial(self.verifying.answer, name, client, at, content)
        return Response(await self.decoder.verified(call), media_type=BINARY)

    def _answer(self, http: HttpRequest, request: Request) -> Response:
        self._model(request.app)
        reply = Reply(request, self.session.tokenizer, self.fingerprint)
        return _Answer(self.decoder.answers(request), reply, http)

    def _model(self, name: str) -> dict[str, Any]:
        """OpenAI's object of an app. Raises Refusal for an unknown one."""
        if name not in self.names:
            raise Refusal(
                f"there is no model {name[:100]!r}; the bundle's apps are {', '.join(self.names)}",
                404,
                code="model_not_found",
                param="model",
            )
        found = {"id": name, "object": "model", "created": self.created, "owned_by": "ssdevice"}
        if self.verifying is not None:
            found[VERIFIES] = asdict(self.verifying.limits)
        return found


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
                    await super().stream_response(send)
                    return
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
