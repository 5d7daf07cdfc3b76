"""Clients that leave, wait, flood or stall: the server answers the others."""

from __future__ import annotations

import gc
import json
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPResponse
from threading import Semaphore, Thread
from time import monotonic, sleep
from typing import Any

import pytest

from ssdevice.runtime.session import Session
from ssdevice.serve import guard
from ssdevice.serve.decoder import COMPILERS
from ssdevice.serve.guard import MAX_BODY, Guard
from ssdevice.serve.names import LOOPBACK
from tests.serve.serving import CHAT, USER, ask, chat, served, tiny_session

HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)


@pytest.fixture(scope="module")
def opened() -> Iterator[Session]:
    with tiny_session() as session:
        yield session


@pytest.fixture
def gate(opened: Session, monkeypatch: pytest.MonkeyPatch) -> Semaphore:
    """Each call of the model waits for a release."""
    gate = Semaphore(0)
    growing = opened.growing

    def gated(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with closing(growing(*args, **kwargs)) as answers:
            for answer in answers:
                gate.acquire()
                yield answer

    monkeypatch.setattr(opened, "growing", gated)
    return gate


@pytest.fixture
def server(opened: Session) -> Iterator[tuple[int, Guard]]:
    with served(opened, waiting=1) as found:
        yield found


def until(true: Callable[[], object]) -> None:
    """Wait for something that comes soon."""
    end = monotonic() + 30
    while not true():
        assert monotonic() < end
        sleep(0.01)


def post(port: int, **more: Any) -> socket.socket:
    """A connection that has sent a request."""
    content = json.dumps(chat(**more)).encode()
    connection = socket.create_connection((LOOPBACK, port), timeout=30)
    connection.sendall(HEAD + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def metric(port: int, name: str) -> float:
    with closing(HTTPConnection(LOOPBACK, port, timeout=30)) as connection:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = response.read().decode().splitlines()
    return float(
        next(line for line in lines if line.startswith(f"ssdevice_{name} ")).rpartition(" ")[2]
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_answer(
    gate: Semaphore, server: tuple[int, Guard], stream: bool
) -> None:
    port, _ = server
    with post(port, stream=stream, max_tokens=50) as leaving:
        until(lambda: metric(port, "pending_requests") == 1)
        gate.release()
        if stream:
            assert leaving.recv(8) == b"HTTP/1.1"
    sleep(0.2)  # the server sees it go while the model works
    gate.release(3)
    until(lambda: metric(port, "pending_requests") == 0)
    until(lambda: metric(port, "cancelled_total") == 1)
    assert metric(port, "completion_tokens_total") < 20
    gate.release(100)
    assert ask(port, CHAT, chat())[0] == 200


def test_a_client_that_leaves_the_queue_is_forgotten(
    gate: Semaphore, server: tuple[int, Guard]
) -> None:
    port, _ = server
    with post(port) as first:
        until(lambda: metric(port, "pending_requests") == 1)
        with post(port):
            until(lambda: metric(port, "pending_requests") == 2)
        until(lambda: metric(port, "pending_requests") == 1)
        gate.release(100)
        with closing(HTTPResponse(first)) as answer:
            answer.begin()
            assert json.load(answer)["object"] == "chat.completion"
    assert metric(port, "answers_total") == 1


def test_a_client_that_closes_its_half_has_left(gate: Semaphore, server: tuple[int, Guard]) -> None:
    port, _ = server
    with post(port) as half:
        until(lambda: metric(port, "pending_requests") == 1)
        half.shutdown(socket.SHUT_WR)
        assert half.recv(1) == b""
    gate.release(100)
    until(lambda: metric(port, "pending_requests") == 0)


def test_clients_are_told_that_the_server_ends(
    gate: Semaphore,
    opened: Session,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(guard, "LAST_WORDS_S", 1)
    with served(opened) as (port, _):
        first = post(port, stream=True, max_tokens=50)
        until(lambda: metric(port, "pending_requests") == 1)
        gate.release()
        assert first.recv(15) == b"HTTP/1.1 200 OK"
        second = post(port)
        until(lambda: metric(port, "pending_requests") == 2)
    gate.release(100)
    with first, closing(HTTPResponse(second)) as answer:
        *_, last, done = whole(first).split(b"data: ")
        assert (
            b'"message":"the server ends"' in last
            and done.startswith(b"[DONE]")
            and done.endswith(b"0\r\n\r\n")
        )
        answer.begin()
        assert (answer.status, json.load(answer)["error"]["message"]) == (503, "the server ends")
    opened.worker.submit(int).result(30)  # what the model was at is over
    gc.collect()  # asyncio complains of a task that was left
    assert [record.getMessage()[:6] for record in caplog.records] == ["Cancel"]


def whole(connection: socket.socket) -> bytes:
    """All that comes until the other side closes the connection."""
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_more_than_may_wait_are_told_to_come_back(
    gate: Semaphore, server: tuple[int, Guard]
) -> None:
    port, _ = server
    with post(port) as first, post(port) as second:
        until(lambda: metric(port, "pending_requests") == 2)
        for stream in (False, True):
            with closing(HTTPConnection(LOOPBACK, port, timeout=30)) as connection:
                content = json.dumps(chat(stream=stream))
                connection.request("POST", CHAT, content, {"Content-Type": "application/json"})
                response = connection.getresponse()
                assert (response.status, json.loads(response.read())["error"]["code"]) == (
                    429,
                    "rate_limit_exceeded",
                )
                assert int(response.headers["Retry-After"]) >= 1
        gate.release(100)
        assert first.recv(12) == second.recv(12) == b"HTTP/1.1 200"


def test_a_flood_gets_answers_or_refusals(opened: Session) -> None:
    with served(opened, waiting=3) as (port, _):
        found: list[int] = []
        threads = [
            Thread(target=lambda: found.append(ask(port, CHAT, chat(max_tokens=2))[0]))
            for _ in range(40)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 40 and set(found) <= {200, 429} and 200 in found
        assert metric(port, "pending_requests") == 0


def test_requests_are_of_bounded_size(server: tuple[int, Guard]) -> None:
    port, _ = server
    large = chat(messages=[{**USER, "content": "a" * MAX_BODY}])
    status, answer = ask(port, CHAT, large)
    assert (status, answer["error"]["code"]) == (413, "request_too_large")
    with socket.create_connection(
        (LOOPBACK, port), timeout=30
    ) as endless:  # its length is not said
        endless.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        with suppress(ConnectionError):
            for _ in range(100):
                endless.sendall(b"100000\r\n" + bytes(1 << 20) + b"\r\n")
            endless.sendall(b"0\r\n\r\n")
        assert endless.recv(12) == b"HTTP/1.1 413"
    for length in ("-1", "1e3", "9" * 30):
        with socket.create_connection((LOOPBACK, port), timeout=30) as wrong:
            wrong.sendall(HEAD + f"Content-Length: {length}\r\n\r\n".encode())
            assert wrong.recv(12) in (b"HTTP/1.1 400", b"HTTP/1.1 413")
    assert ask(port, CHAT, chat())[0] == 200


def test_slow_clients_are_left(opened: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "IDLE_S", 0.5)
    monkeypatch.setattr(guard, "BODY_S", 0.5)
    with served(opened) as (port, _):
        with socket.create_connection((LOOPBACK, port), timeout=30) as idle:
            assert idle.recv(1) == b""
        with (
            socket.create_connection((LOOPBACK, port), timeout=30) as slow,
            suppress(ConnectionError),
        ):
            for _ in range(100):  # a byte now and then is no request
                slow.sendall(b"G")
                sleep(0.05)
            pytest.fail("the connection is still open")
        with socket.create_connection((LOOPBACK, port), timeout=30) as half:
            half.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
            assert half.recv(12) == b"HTTP/1.1 408"
        assert ask(port, CHAT, chat())[0] == 200


def test_connections_are_bounded(opened: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "CONNECTIONS", 2)
    with served(opened) as (port, _):
        idle = [socket.create_connection((LOOPBACK, port), timeout=30) for _ in range(2)]
        sleep(0.1)
        with (
            socket.create_connection((LOOPBACK, port), timeout=30) as another,
            suppress(ConnectionError),
        ):
            assert another.recv(1) == b""
        for each in idle:
            each.close()
        until(lambda: not refused(port))


def refused(port: int) -> bool:
    try:
        return ask(port, "/health")[0] != 200
    except OSError:
        return True


def test_no_part_of_an_answer_waits_for_an_acknowledgement(
    opened: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[int]()
    expect = guard.Protocol._expect_request

    def spy(self: guard.Protocol) -> None:
        seen.append(
            self.transport.get_extra_info("socket").getsockopt(
                socket.IPPROTO_TCP, socket.TCP_NODELAY
            )
        )
        expect(self)

    monkeypatch.setattr(guard.Protocol, "_expect_request", spy)
    with served(opened) as (port, _):
        assert ask(port, "/health")[0] == 200
    assert seen and all(seen)


def test_metrics_count_tokens_and_steps(server: tuple[int, Guard]) -> None:
    port, _ = server
    usage = [ask(port, CHAT, chat())[1]["usage"] for _ in range(2)]
    assert metric(port, "completion_tokens_total") == 16
    assert metric(port, "prompt_tokens_total") == sum(each["prompt_tokens"] for each in usage)
    assert metric(port, "cached_tokens_total") == sum(
        each["prompt_tokens_details"]["cached_tokens"] for each in usage
    )
    steps = metric(port, "steps_total")
    stepped = metric(port, "stepped_tokens_total")
    assert metric(port, "tokens_per_step") == pytest.approx(stepped / steps) and stepped == 14
    assert metric(port, "decode_seconds_total") > 0 and metric(port, "answers_total") == 2


STRUCTURED = {"response_format": {"type": "json_object"}}


@pytest.fixture
def compilers(opened: Session, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], Semaphore]:
    """The structures that are compiled so far, each of which then waits for a release."""
    begun: list[Any] = []
    gate = Semaphore(0)
    compile_one = opened.compile

    def gated(sampling: Any) -> None:
        begun.append(sampling)
        gate.acquire()
        compile_one(sampling)

    monkeypatch.setattr(opened, "compile", gated)
    return begun, gate


def test_others_are_answered_while_a_structure_is_compiled(
    opened: Session, compilers: tuple[list[Any], Semaphore]
) -> None:
    begun, gate = compilers
    with served(opened, waiting=2) as (port, _), post(port, **STRUCTURED) as waiting:
        until(lambda: begun)
        for _ in range(3):
            assert ask(port, CHAT, chat(max_tokens=2))[0] == 200
        assert metric(port, "pending_requests") == 1
        gate.release()
        assert waiting.recv(12) == b"HTTP/1.1 200"


def test_requests_whose_structures_are_compiled_wait_like_others(
    opened: Session, compilers: tuple[list[Any], Semaphore]
) -> None:
    """They have places in the queue, and only so many are compiled at the same time."""
    begun, gate = compilers
    most = COMPILERS + 1
    with served(opened, waiting=COMPILERS) as (port, _):
        clients = [post(port, **STRUCTURED) for _ in range(most)]
        until(lambda: metric(port, "pending_requests") == most)
        assert ask(port, CHAT, chat())[0] == 429
        assert len(begun) == COMPILERS
        clients.pop().close()  # whoever leaves gives up its place
        until(lambda: metric(port, "pending_requests") == most - 1)
        gate.release(most)
        for client in clients:
            assert client.recv(12) == b"HTTP/1.1 200"
            client.close()


def test_a_structure_that_takes_too_much_is_refused_and_the_server_goes_on(
    server: tuple[int, Guard],
) -> None:
    port, _ = server
    patterns = [{"pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(1, 14)]
    definitions = {
        f"a{i}": {"properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(1500)
    }
    for schema, reason in (
        ({"type": "string", "allOf": patterns}, "too much work|processor time|memory"),
        ({"$ref": "#/$defs/a0", "$defs": {**definitions, "a1500": {}}}, "levels deep"),
        ({"type": "string", "pattern": "(?!a)b"}, "look-around"),
    ):
        described = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        status, body = ask(port, CHAT, chat(response_format=described))
        assert status == 400
        assert re.search(reason, body["error"]["message"])
        assert "\n" not in body["error"]["message"]
        assert ask(port, CHAT, chat(max_tokens=2, **STRUCTURED))[0] == 200
