"""A server of a tiny model in a thread, and what talks to it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from http.client import HTTPConnection
from threading import Thread
from typing import Any

from starlette.types import ASGIApp

from ssdevice.runtime.session import Session
from ssdevice.serve.application import application
from ssdevice.serve.guard import Guard, server
from ssdevice.serve.names import HOSTS, LOOPBACK
from ssdevice.text.chat_template import ChatFormat
from ssdevice.text.tokenizer import ChatTokenizer
from tests.runtime.sampling.letters import letters
from tests.runtime.tiny_bundle import APP, tiny_bundle

TEMPLATE = """{% for tool in tools or [] %}<system>{{ tool.function.name }}</s>{% endfor %}
{%- if loud is defined and loud %}<system>LOUD</s>{% endif %}
{%- for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>\
{% endfor %}</s>{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
USER = {"role": "user", "content": "hello"}
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


@cache
def tokenizer() -> ChatTokenizer:
    """Of letters, with a template that reads tools and writes calls as Hermes does."""
    return ChatTokenizer(letters().tokenizer, ChatFormat(TEMPLATE, {"eos_token": "</s>"}, (0,)))


@contextmanager
def tiny_session(choose: bool = True) -> Iterator[Session]:
    """A session of the tiny model; ``choose``: whether the host can choose tokens."""
    with Session.open(tiny_bundle(choose=choose)) as session:
        session.tokenizer = tokenizer()
        yield session


@contextmanager
def served(
    session: Session, waiting: int = 4, key: str | None = None, devices: int = 0
) -> Iterator[tuple[int, Guard]]:
    """The port of a server while it runs, and its application."""
    app = application(session, waiting=waiting, hosts=HOSTS, key=key, devices=devices)
    with running(app) as port:
        yield port, app


@contextmanager
def running(app: ASGIApp) -> Iterator[int]:
    """The port of an application's server while it runs."""
    listening = socket.create_server((LOOPBACK, 0))
    running = server(app)
    thread = Thread(target=running.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        running.should_exit = True
        thread.join()


def ask(port: int, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Status and JSON of a response; ``body``: None for GET, bytes as they are, else JSON."""
    with closing(HTTPConnection(LOOPBACK, port, timeout=30)) as connection:
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        kind = {"Content-Type": "application/json"} if content is not None else {}
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("GET" if content is None else "POST", path, content, kind | headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def chat(**more: Any) -> dict[str, Any]:
    """A request of a short answer."""
    return {"model": APP, "messages": [USER], "max_tokens": 8, **more}


def tool(name: str = "look", **properties: Any) -> dict[str, Any]:
    """A function that takes these properties."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}
