"""``chat``, and conversations in ``run``, as a user calls them."""

from __future__ import annotations

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ssdevice.commands import chat
from ssdevice.runtime.session import Session
from tests.commands.test_run import call
from tests.runtime import tiny_bundle as tiny

GREEN = b"\x1b[32m"


@pytest.fixture(scope="module")
def bundle() -> str:
    return str(tiny.tiny_bundle().folder)


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def talk(
    monkeypatch: pytest.MonkeyPatch,
    bundle: str,
    *lines: str,
    end: str = "\n",
    options: tuple[str, ...] = (),
) -> int:
    """The exit code of a chat that gets these lines from a pipe."""
    said = end.join(lines).encode() + end.encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(said)))
    return call("chat", bundle, "--quiet", "--max-tokens", "9", *options)


def answers(*messages: dict[str, Any]) -> list[str]:
    """What a session says to each message of the user, given what was said before."""
    with Session.open(tiny.tiny_bundle()) as session:
        asked: list[dict[str, Any]] = []
        said = []
        for message in messages:
            asked.append(message)
            if message["role"] == "user":
                said.append("".join(session.chat(messages=asked, max_tokens=9)))
                asked.append({"role": "assistant", "content": said[-1]})
    return said


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_pipe_gives_a_message_a_line(
    bundle: str, end: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, bundle, "hello", "", "  ", "//b", end=end) == 0
    said = capsys.readouterr()
    assert (
        said.out == "".join(f"{answer}\n" for answer in answers(user("hello"), user("/b")))
        and said.err == ""
    )


LINES = [
    (['"""', "hello", "  b", '"""'], "hello\n  b"),
    (['"""hello', 'b"""'], "hello\nb"),
    (['"""hello"""'], "hello"),
    (['"""', "/save a.json", "", "> x", '"""  '], "/save a.json\n\n> x"),
    (["hello\nb"], "hello\nb"),  # as a terminal gives what is pasted
    (["/usr/bin\n/etc"], "/usr/bin\n/etc"),
    (['say """', "never"], 'say """'),
]


@pytest.mark.parametrize(("lines", "message"), LINES)
def test_lines_between_quotes_and_pasted_lines_are_one_message(
    lines: list[str], message: str
) -> None:
    found = chat.messages((line, "here") for line in lines)
    assert next(found) == message


def test_a_message_of_several_lines_comes_from_a_pipe(
    bundle: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = ("hello", '"""', "b", "", "/reset", '"""', "/save a.json")
    assert talk(monkeypatch, bundle, *said) == 0
    saved = json.loads(Path("a.json").read_text())
    assert [each["content"] for each in saved[::2]] == ["hello", "b\n\n/reset"]
    capsys.readouterr()
    assert talk(monkeypatch, bundle, "hello", '"""', "b") == 2
    wrong = 'standard input, line 2: the message that begins with """ has no end'
    assert wrong in capsys.readouterr().err


def test_a_conversation_is_saved_reset_and_loaded(
    bundle: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    system = {"role": "system", "content": "Be."}
    one, two = answers(system, user("hello"), user("b"))
    assert (
        talk(
            monkeypatch,
            bundle,
            "/system Be.",
            "hello",
            "/save a.json",
            "/reset",
            "hello",
            "/load a.json",
            "b",
        )
        == 0
    )
    assert capsys.readouterr().out == f"{one}\n{one}\n{two}\n"
    saved = json.loads(Path("a.json").read_text())
    assert saved == [system, user("hello"), {"role": "assistant", "content": one}]
    Path("b.json").write_text(json.dumps([*saved, user("b")]))
    assert talk(monkeypatch, bundle, "/load a.json", "b", "/quit", "never said") == 0
    assert capsys.readouterr().out == f"{two}\n"
    assert call("run", bundle, "--messages", "b.json", "--max-tokens", "9", "--json") == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["prompt"], row["text"]) == ("b", two)
    assert (
        talk(
            monkeypatch,
            bundle,
            "/system",
            "hello",
            "/app letters",
            "hello",
            options=("--system", "Be."),
        )
        == 0
    )
    assert capsys.readouterr().out == f"{answers(user('hello'))[0]}\n" * 2


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["/nonsense"], "unknown command /nonsense; /help lists them"),
        (["/app"], "/app: a name is missing; /help says what it names"),
        (["/app sql"], "has no app 'sql'; it has letters"),
        (["/save"], "/save: a name is missing"),
        (["/save there.json"], "there.json: it exists; choose another name"),
        (["/save no/folder.json"], "its folder does not exist"),
        (["/load none.json"], "none.json: no such file"),
        (["/load ."], "cannot be read"),
        (["/load there.json"], "messages is dict ({}), expected a list of objects"),
        (
            ["/load asked.json"],
            "messages ends with 'user'; the last one must be of role system or assistant",
        ),
        (["/load wrong.json"], "role 'assistant' cannot be the first"),
        (["/load text.json"], "not JSON"),
        (["/load a\0b"], "/load is str ('a\\x00b'), expected a path"),
        (["/save a\0b"], "/save is str ('a\\x00b'), expected a path"),
        (["x" * 200], "context of 96"),
        (["\udcff"], "standard input, line 1: not UTF-8 text (byte 0)"),
    ],
)
def test_what_is_wrong_in_a_pipe_ends_it_with_a_line(
    lines: list[str],
    message: str,
    bundle: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("there.json").write_text("{}")
    Path("wrong.json").write_text('[{"role": "assistant", "content": "x"}]')
    Path("text.json").write_text("hello")
    Path("asked.json").write_text(json.dumps([user("x")]))
    said = "\n".join(lines).encode("utf-8", "surrogateescape")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(said)))
    assert call("chat", bundle, "--quiet") == 2
    found = capsys.readouterr()
    assert message in found.err and found.err.count("\n") == 1 and found.out == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--messages", "none.json"], "none.json: no such file"),
        (["--messages", "said.json"], "messages ends with 'assistant'"),
        (
            ["--messages", "whole.json", "--system", "x"],
            "the messages have a system message of their own",
        ),
        (
            ["--messages", "whole.json", "--limit", "3"],
            "--limit has no effect: it goes with --data",
        ),
        (["--messages", "whole.json", "--prompt", "x"], "not allowed with argument"),
        (["--prompt", "x", "--template-arg", "x"], "'x' is not NAME=JSON"),
        (["--prompt", "x", "--template-arg", "x=no"], "not JSON; write a text as x='\"text\"'"),
        (
            ["--prompt", "x", "--template-arg", "x=1"],
            "there are no tools and no template arguments",
        ),
    ],
)
def test_what_is_wrong_with_a_conversation_is_one_line(
    options: list[str], message: str, bundle: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("said.json").write_text(json.dumps([user("a"), {"role": "assistant", "content": "b"}]))
    Path("whole.json").write_text(json.dumps([{"role": "system", "content": "Be."}, user("a")]))
    assert call("run", bundle, *options) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_turns_that_do_not_fit_are_forgotten_and_it_is_said(
    bundle: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"message {number} of twenty letters" for number in range(3)]
    assert talk(monkeypatch, bundle, *lines) == 0
    assert "oldest turn forgotten: the context is full]" in capsys.readouterr().err
    assert talk(monkeypatch, bundle, *lines, options=("--overflow", "error")) == 2
    assert "context of 96" in capsys.readouterr().err


def test_an_interrupted_answer_counts_and_the_conversation_goes_on(
    bundle: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show = chat._Talk._show
    shown = list[str]()

    def interrupted(self: chat._Talk, piece: str) -> None:
        show(self, piece)
        shown.append(piece)
        if len(shown) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(chat._Talk, "_show", interrupted)
    assert talk(monkeypatch, bundle, "hello", "b", "/save a.json") == 0
    saved = json.loads(Path("a.json").read_text())
    assert (
        saved[1]["content"] == "".join(shown[:2])
        and saved[2] == user("b")
        and len(saved[3]["content"]) > 0
    )


def accepts(session: Session, prompt: str) -> bool:
    list(session.runs(session.prompt_ids(prompt), max_tokens=30, mode="speculative"))
    # Its first step: in adaptive mode plain calls follow, to measure what it costs.
    return session.last.accepted[:1] > [1]


@pytest.mark.parametrize("colours", [True, pytest.param(False, marks=pytest.mark.wide)])
def test_at_a_terminal_accepted_drafts_are_coloured_and_errors_end_nothing(
    bundle: str, colours: bool
) -> None:
    with Session.open(bundle) as session:
        prompts = ("".join(letters) for letters in product("abcdef", repeat=3))
        prompt = next(text for text in prompts if accepts(session, text))
    pty = pytest.importorskip("pty", reason="terminals of Unix")
    user_end, terminal = pty.openpty()
    environment = {
        name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")
    }
    environment |= {"TERM": "xterm"} if colours else {"TERM": "xterm", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "ssdevice", "chat", bundle, "--max-tokens", "30"]
    with (
        subprocess.Popen(
            command,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=environment,
            # A shell lets what runs in the background ignore Ctrl-C, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as process,
        ExitStack() as stack,
    ):
        stack.callback(process.kill)  # one that goes on would be waited for
        os.close(terminal)
        screen = b""

        def until(text: bytes) -> bytes:
            nonlocal screen
            while not re.search(text, screen):
                assert select.select([user_end], [], [], 60)[0], screen
                screen += os.read(user_end, 1 << 16)
            before, screen = screen, b""
            return before

        begun = until(rb"> $")
        assert b"/help lists the commands" in begun
        assert b"\x1b[?2004h" in begun, "the terminal is asked to mark what is pasted"
        os.write(user_end, b"/nonsense\n")
        assert b"error: unknown command /nonsense" in until(rb"> $")
        os.write(user_end, b"/save " + b"x" * 300 + b"\n")
        assert b"File name too long" in until(rb"> $")
        os.write(user_end, prompt.encode() + b"\n")
        assert (GREEN in until(rb"; \w+\]\s+(\x1b\S+)?> $")) == colours
        os.write(user_end, b"/reset\r")
        until(rb"reset\s+(\x1b\S+\s*)?(\x1b\S+)?> $")
        os.write(user_end, b"\x1b[200~/x\rhello\nb\x1b[201~")
        until(rb"hello")
        os.write(user_end, b"\r")
        until(rb"; \w+\]\s+(\x1b\S+)?> $")
        os.write(user_end, b"/save pasted.json\r")
        until(rb"pasted.json\s+(\x1b\S+\s*)?(\x1b\S+)?> $")
        pasted, _ = json.loads(Path("pasted.json").read_text())
        assert pasted == user("/x\nhello\nb")
        for _ in range(
            6
        ):  # readline does not see Ctrl-C between its prompt and its wait; a user presses again
            if colours:
                os.write(user_end, b"\x04")
            else:
                process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
                break
        assert process.poll() == (0 if colours else 130)
    os.close(user_end)
