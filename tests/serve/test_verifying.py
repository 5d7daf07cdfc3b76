"""A device drafts and a server verifies: the server's tokens while it answers, the device's own
while it does not.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection
from itertools import islice
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdevice.cli import main
from ssdevice.errors import InputError
from ssdevice.runtime.session import Session
from ssdevice.runtime.split import (
    BINARY,
    Link,
    SplitEngine,
    VerifyAt,
    packed,
    packed_answer,
    unpacked,
)
from ssdevice.serve.names import LOOPBACK
from ssdevice.serve.verifying import Verifying
from ssdevice.tree import Tree
from tests.runtime.scripted import ScriptedEngine, make_geometry, random_drafter
from tests.runtime.tiny_bundle import APP, CONTEXT, TREE, tiny_bundle
from tests.serve.serving import served, tiny_session, tokenizer

KEY = "a-long-enough-key"
PROMPTS = [[5, 9, 12], [7] * 9, list(range(3, 33))]
CLIENT = "a" * 32


@pytest.fixture(scope="module")
def large() -> Iterator[Session]:
    """What the server should answer is asked of another session."""
    with tiny_session(choose=False) as session:
        yield session


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with tiny_session(choose=False) as session, served(session, key=KEY, devices=2) as (port, _):
        yield port


@contextmanager
def device(port: int, **more: Any) -> Iterator[Session]:
    """A session of the same model in INT8, which drafts for the server at a port."""
    at = VerifyAt(f"http://{LOOPBACK}:{port}/v1", **{"key": KEY, **more})
    with Session.open(tiny_bundle("int8"), threads=1, opener=at.open_engine) as session:
        session.tokenizer = tokenizer()
        yield session


def plainly(session: Session, ids: list[int], most: int = 80) -> list[int]:
    """The greedy tokens after a prompt, one call each."""
    return [
        token for run in session.runs(ids, max_tokens=most, mode="plain") for token in run.tokens
    ]


def tokens(session: Session, ids: list[int], most: int = 80) -> list[int]:
    return [token for run in session.runs(ids, max_tokens=most) for token in run.tokens]


class Cable:
    """A way to a port that can be cut: ``dead`` connections take everything and give nothing,
    others are closed.
    """

    def __init__(self, port: int) -> None:
        self.to = port
        self.listening = socket.create_server((LOOPBACK, 0))
        self.port = self.listening.getsockname()[1]
        self.dead = Event()
        self.joined = Event()
        self.joined.set()
        self.ends: list[socket.socket] = []
        Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self.listening.accept()
                if not self.joined.is_set():
                    near.close()
                    continue
                far = socket.create_connection((LOOPBACK, self.to))
                self.ends += [near, far]
                for pair in ((near, far), (far, near)):
                    Thread(target=self.carry, args=pair, daemon=True).start()

    def carry(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                if not self.dead.is_set():
                    other.sendall(data)
            other.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        self.joined.clear()
        for end in self.ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def test_tokens_are_those_of_the_server_s_plain_decoding(port: int, large: Session) -> None:
    seen = set()
    with device(port) as session:
        for ids in PROMPTS:
            assert tokens(session, ids) == plainly(large, ids)
            assert session.last.alone == 0
            seen |= set(session.last.accepted)
    assert len(seen) > 1 and max(seen) == TREE.emitted, "drafts were accepted and rejected"


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_a_device_with_short_steps_drafts_as_many_tokens_as_it_is_told(drafts: int) -> None:
    mine = ScriptedEngine(make_geometry(Tree.chain(4), short=2), random_drafter(0, 0.0))
    link = SimpleNamespace(
        at=VerifyAt("http://localhost:1", drafts=drafts), limits=lambda: None, tokenizer=""
    )
    engine = SplitEngine(mine, cast(Link, link))
    assert engine.geometry.tree == Tree.chain(drafts) and not engine.new_conversation().short


def test_an_answer_ends_with_the_context_and_chats_go_on(port: int, large: Session) -> None:
    ids = list(range(3, CONTEXT - 4))
    with device(port, drafts=8) as session:
        assert session.engine.geometry.gamma == TREE.depth
        assert tokens(session, ids, 99) == plainly(large, ids, 99)
        assert session.last.reason == "context"
        for prompt in ("one", "two"):
            said = "".join(session.chat(prompt, max_tokens=9))
            assert said == "".join(large.chat(prompt, max_tokens=9))
        assert session.last.cached_tokens > 0


def test_devices_take_turns(port: int, large: Session) -> None:
    with ExitStack() as stack:
        sessions = [stack.enter_context(device(port)) for _ in range(2)]
        found: list[Any] = [None, None]
        threads = [
            Thread(target=lambda i=i: found.__setitem__(i, tokens(sessions[i], PROMPTS[i])))
            for i in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [plainly(large, ids) for ids in PROMPTS[:2]]


def test_a_third_device_takes_the_place_of_one_whose_text_is_then_sent_again(
    port: int, large: Session
) -> None:
    with ExitStack() as stack:
        sessions = [stack.enter_context(device(port)) for _ in range(3)]
        runs = [
            session.runs(ids, max_tokens=9) for session, ids in zip(sessions, PROMPTS, strict=True)
        ]
        found: list[list[int]] = [[], [], []]
        for _ in range(9):
            for i, each in enumerate(runs):
                found[i] += [token for run in islice(each, 1) for token in run.tokens]
    assert found == [plainly(large, ids, 9) for ids in PROMPTS]
    assert all(session.last.alone == 0 for session in sessions)


@pytest.mark.parametrize("dead", [False, True])
def test_without_the_server_the_device_goes_on_alone_says_so_and_resumes(
    port: int, large: Session, dead: bool
) -> None:
    cable = Cable(port)
    told = list[str]()
    ids = PROMPTS[0]
    with device(cable.port, tell=told.append, patience=1.0) as session, tiny_int8() as small:
        assert isinstance(session.engine, SplitEngine)
        runs = session.runs(ids, max_tokens=70)
        verified = [token for run in islice(runs, 3) for token in run.tokens]
        assert verified == plainly(large, ids, len(verified)) and not told
        if dead:
            cable.dead.set()
        else:
            cable.cut()
        alone = [token for run in islice(runs, 5) for token in run.tokens]
        assert alone == plainly(small, ids + verified, 5) and session.last.alone == 5
        assert len(told) == 1 and told[0].endswith("; this device goes on alone")
        cable.dead.clear()
        cable.joined.set()
        assert session.engine.link.back.wait(30)
        rest = [token for run in runs for token in run.tokens]
        text = ids + verified + alone
        assert rest == plainly(large, text, 70 - len(text) + len(ids))
        assert told[1:] == [f"ssdevice: the server is back; it verifies from token {len(text)} on"]
        assert session.last.alone == 5 and len(session.last.accepted) < session.last.steps + 1
        cable.listening.close()


@contextmanager
def tiny_int8() -> Iterator[Session]:
    with Session.open(tiny_bundle("int8"), threads=1) as session:
        yield session


def test_a_device_may_begin_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        nobody = taken.getsockname()[1]
    with device(nobody) as session, tiny_int8() as small:
        assert tokens(session, PROMPTS[0], 12) == plainly(small, PROMPTS[0], 12)
        assert session.last.alone == 12
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "this device goes on alone" in said


def post(
    port: int, at: int | str, content: bytes, client: str = CLIENT, app: str = APP, **headers: str
) -> Any:
    """Status and content of a request to verify."""
    connection = HTTPConnection(LOOPBACK, port, timeout=30)
    given = {"Content-Type": BINARY, "Authorization": f"Bearer {KEY}"} | headers
    connection.request("POST", f"/v1/verify/{app}/{client}/{at}", content, given)
    response = connection.getresponse()
    found = response.read()
    connection.close()
    return (
        (response.status, found)
        if response.status == 200
        else (response.status, json.loads(found)["error"])
    )


def test_what_is_misplaced_too_long_or_no_token_is_refused_and_changes_nothing(
    port: int, large: Session
) -> None:
    ids = PROMPTS[0]
    expected = plainly(large, ids, 2 + TREE.depth)
    assert post(port, 0, packed(ids, ())) == (200, packed_answer(expected[:1]))
    step = packed(expected[:1], expected[1:-1])
    vocab = large.engine.geometry.vocab
    for at, content, status, words in (
        (len(ids) + 1, step, 409, "3 tokens of this client are held, not 4"),
        (
            len(ids),
            packed([1], [1] * (TREE.depth + 1)),
            400,
            "4 drafts after 1 tokens at 3, expected at most 3",
        ),
        (0, packed([1], [1]), 400, "after one token that follows a text"),
        (len(ids), packed([1, 2], [1]), 400, "1 drafts after 2 tokens"),
        (len(ids), packed([vocab], ()), 400, f"token {vocab} is not one of"),
        (len(ids), packed([1], [vocab]), 400, f"draft {vocab} is not one of"),
        (0, packed([1] * (CONTEXT + 1), ()), 400, "context"),
        (10**40, step, 400, "context"),
        (len(ids), b"", 400, "0 bytes, expected four"),
        (len(ids), b"abc", 400, "3 bytes, expected four"),
        (len(ids), b'{"tokens": [1]} ', 400, "the places of tokens"),
        (len(ids), np.array([1 << 24 | 1], "<u4").tobytes(), 400, "the places of tokens"),
        (len(ids), bytes(1 << 21), 413, "at most"),
        ("-1", step, 404, ""),
        ("x", step, 404, ""),
    ):
        found, error = post(port, at, content)
        assert (found, words in error["message"]) == (status, True), error
    assert post(port, len(ids), step) == (200, packed_answer(expected[1:]))
    assert post(port, len(ids), step) == (200, packed_answer(expected[1:])), (
        "a lost answer is asked for again"
    )
    assert post(port, len(ids) + 3, step, client="b" * 32)[0] == 409, "of another device"


def test_no_more_tokens_are_answered_than_drafts_were_sent_and_one(large: Session) -> None:
    ids = PROMPTS[0]
    expected = plainly(large, ids, 2 + TREE.depth)
    with tiny_session(choose=False) as session:
        verifying = Verifying(session, 1)
        verifying.answer(APP, CLIENT, 0, packed(ids, ()))
        (held,) = verifying._held.values()
        for count in (0, 1, TREE.depth):
            held.drafts[:, 0] = expected[1 : 1 + TREE.depth]  # the server's own streams are right
            found = verifying.answer(
                APP, CLIENT, len(ids), packed(expected[:1], expected[1 : 1 + count])
            )
            assert found == packed_answer(expected[1 : 2 + count])


def test_who_may_ask(port: int) -> None:
    content = packed([1], ())
    assert post(port, 0, content, Authorization="Bearer another-long-key")[0] == 401
    assert post(port, 0, content, Host="evil.example")[0] == 421
    assert post(port, 0, content, **{"Content-Type": "application/json"})[0] == 415
    assert post(port, 0, content, app="another")[0] == 404
    for client in ("b" * 31, "b" * 300, "B" * 32):
        assert post(port, 0, content, client=client)[0] == 400
    with pytest.raises(InputError, match="a key is needed"), device(port, key="another-long-key"):
        pass


def test_a_server_that_verifies_nothing_or_another_vocabulary_is_refused(port: int) -> None:
    with tiny_session(choose=False) as session, served(session) as (other, _):
        assert post(other, 0, packed([1], ()))[0] == 404
        with (
            pytest.raises(InputError, match="start it with ssdevice serve --verify"),
            device(other),
        ):
            pass
    with pytest.raises(InputError, match="another tokenizer"):
        Link(VerifyAt(f"http://{LOOPBACK}:{port}/v1", KEY), APP, "0" * 64).limits()
    with tiny_session(choose=False) as session:
        session.engine.functions -= {"step"}
        with (
            pytest.raises(InputError, match="has no step that verifies drafts"),
            served(session, devices=1),
        ):
            pass


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"junk\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n<ht>",
        b"HTTP/1.1 302 Found\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (1 << 17),
    ],
)
def test_something_else_in_the_server_s_place_is_no_server(answer: bytes) -> None:
    with socket.create_server((LOOPBACK, 0)) as listening:

        def reply() -> None:
            with suppress(OSError):
                while True:
                    end, _ = listening.accept()
                    with end:
                        end.recv(1 << 16)
                        end.sendall(answer)

        Thread(target=reply, daemon=True).start()
        told = list[str]()
        with device(listening.getsockname()[1], tell=told.append) as session:
            tokens(session, PROMPTS[0], 3)
            assert session.last.alone == 3 and len(told) == 1


@given(
    st.lists(st.integers(0, (1 << 24) - 1), min_size=1),
    st.lists(st.integers(0, (1 << 24) - 1), max_size=32),
)
def test_a_request_has_four_bytes_for_each_token(text: list[int], drafts: list[int]) -> None:
    content = packed(text, drafts)
    assert len(content) == 4 * (len(text) + len(drafts)) and unpacked(content) == (text, drafts)


@given(st.binary(max_size=64))
def test_any_other_content_is_refused_in_words(content: bytes) -> None:
    try:
        text, drafts = unpacked(content)
    except InputError:
        return
    assert packed(text, drafts) == content


def test_the_command_says_what_it_did_alone(
    port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text(KEY)
    folder = str(tiny_bundle("int8").folder)
    key = str(tmp_path / "key")
    command = ["run", folder, "--prompt", "hello", "--max-tokens", "6", "--json"]
    assert (
        main([*command, "--verify-at", f"http://{LOOPBACK}:{port}/v1", "--verify-key-file", key])
        == 0
    )
    there = json.loads(capsys.readouterr().out)
    assert "alone" not in there and len(there["tokens"]) == 6
    assert main([*command, "--verify-at", f"http://{LOOPBACK}:9/v1"]) == 0
    assert json.loads(capsys.readouterr().out)["alone"] == 6
    for more, words in (
        (["--verify-at", "ftp://x"], "expected the address of a server"),
        (["--verify-at", "http://x", "--temperature", "1"], "leave out how tokens are chosen"),
        (["--verify-at", "http://x", "--no-speculate"], "--no-speculate has no effect"),
        (["--verify-drafts", "2"], "--verify-drafts has no effect"),
    ):
        assert main([*command, *more]) == 2
        assert words in capsys.readouterr().err
