"""``ssdevice chat``: a conversation with a bundle in the terminal."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssdevice.bundle.staging import write_json
from ssdevice.commands.conversation import add_template, read_messages, template_of
from ssdevice.commands.opening import add_bundle, add_engine, open_session, positive, refuse_ignored
from ssdevice.commands.run import summary
from ssdevice.commands.sampling import add_sampling, sampling_of
from ssdevice.errors import InputError
from ssdevice.progress import count
from ssdevice.runtime.overflow import DROP_OLDEST, OVERFLOWS
from ssdevice.text.messages import ASSISTANT, SYSTEM, USER, waiting

if TYPE_CHECKING:
    from ssdevice.runtime.sampling.options import Sampling
    from ssdevice.runtime.session import Session

PROMPT, DRAFTED = "> ", "green"
HELP = """\
/app NAME     switch to another app of the bundle; the conversation starts over
/system TEXT  another system message, from now on; without TEXT none
/save FILE    write the messages to a new JSON file
/load FILE    go on with the messages of a JSON file
/reset        start over, with the same system message
/help         this text
/quit         end, as Ctrl-D does
A message that begins with / is written with //. Ctrl-C ends an answer. Accepted drafts are green."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``ssdevice chat BUNDLE``."""
    add = parser.add_argument
    add_bundle(parser)
    add("--system", metavar="TEXT", help="system message of the conversation")
    add_template(parser)
    add("--max-tokens", type=positive, default=1024, metavar="N", help="end an answer here (default 1024)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end an answer before this text; may be repeated")
    add(
        "--overflow",
        choices=OVERFLOWS,
        default=DROP_OLDEST,
        help=f"if the conversation outgrows the context: an error, or forget the oldest turns (default {DROP_OLDEST})",
    )
    add("--no-speculate", action="store_true", help="plain decoding: the same answers, token by token")
    add_sampling(parser)
    add_engine(parser)


def run(args: argparse.Namespace) -> int:
    """Answer lines of standard input until it ends: at a terminal, or one message a line from a pipe or file."""
    refuse_ignored(args, "it goes with ssdevice run --json", "--logprobs")
    sampling_of(args)
    template = template_of(args)
    with open_session(args) as session:
        _Talk(args, session, sampling_of(args, session.bundle), template).hold()
    return 0


class _Talk:
    """A conversation, whose messages are kept here: commands change them between answers."""

    def __init__(
        self, args: argparse.Namespace, session: Session, sampling: Sampling | None, template: dict[str, Any] | None
    ) -> None:
        from rich.console import Console

        self._args, self._session, self._sampling, self._template = args, session, sampling, template
        self._console = Console(highlight=False)  # heeds NO_COLOR, and a file gets no colours
        self._interactive = sys.stdin is not None and sys.stdin.isatty()
        self._messages: list[dict[str, Any]] = []
        self._commands: dict[str, Callable[[str], None]] = {
            "app": self._app, "system": self._system, "save": self._save, "load": self._load, "reset": self._reset,
            "help": lambda _: self._say(HELP),
        }  # fmt: skip
        if args.system is not None:
            self._system(args.system)

    def hold(self) -> None:
        """Take lines until there are no more. An error ends what comes from a pipe; at a terminal the user goes on."""
        if self._interactive and not self._args.quiet:
            self._say(f"{self._args.bundle}: /help lists the commands")
        for line in self._lines():
            command, _, argument = line.removeprefix("/").partition(" ")
            try:
                if line == "/quit":
                    return
                if not line.startswith("/") or line.startswith("//"):
                    self._answer([*self._messages, {"role": USER, "content": line.removeprefix("/")}])
                elif command in self._commands:
                    self._commands[command](argument.strip())
                else:
                    raise InputError(f"unknown command /{command}; /help lists them, and // begins a message with /")
            except InputError as error:
                if not self._interactive:
                    raise
                self._say(f"error: {error}")

    def _answer(self, messages: list[dict[str, Any]]) -> None:
        session, args = self._session, self._args
        pieces = session.chat(
            messages=messages, template=self._template, overflow=args.overflow, max_tokens=args.max_tokens,
            stop=args.stop, speculate=not args.no_speculate, sampling=self._sampling,
        )  # fmt: skip
        with closing(pieces), suppress(KeyboardInterrupt):  # type: ignore[type-var]
            for piece in pieces:
                self._show(piece)
        print(flush=True)
        self._messages = session.messages or self._messages  # none if it was interrupted before its first token
        if dropped := session.last.dropped:
            self._say(f"[{count(dropped, 'oldest turn')} forgotten: the context is full]")
        if not args.quiet:
            self._say(summary(session.last))

    def _show(self, piece: str) -> None:
        """Print a piece; what comes before the last token of a step are accepted drafts."""
        answer = self._session.last
        own = piece
        if answer.accepted and answer.accepted[-1] > 1:
            last = str(self._session.tokenizer.tokenizer.decode([answer.tokens[-1]]))
            own = last if piece.endswith(last) else ""
        self._console.out(piece.removesuffix(own), style=DRAFTED, end="")
        self._console.out(own, end="")

    def _lines(self) -> Iterator[str]:
        """Lines that are not blank, without the blanks around them."""
        with suppress(EOFError):
            while True:
                if line := self._line().strip():
                    yield line
        if self._interactive:
            print()

    def _line(self) -> str:
        if sys.stdin is None:
            raise InputError("standard input is closed")
        if not self._interactive:
            raw = sys.stdin.buffer.readline()
            if not raw:
                raise EOFError
            return self._decoded(raw)
        with suppress(ImportError):
            import readline  # noqa: F401  # input() then edits lines and remembers them
        return input(PROMPT)

    def _decoded(self, raw: bytes) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"standard input is not UTF-8 text (byte {error.start} of a line)") from error

    def _app(self, name: str) -> None:
        bundle = self._session.bundle
        assert bundle is not None
        if not name:
            raise InputError(f"/app NAME: the apps are {', '.join(app.name for app in bundle.manifest.apps)}")
        self._session.use(name)
        self._reset()

    def _system(self, text: str) -> None:
        rest = [message for message in self._messages if message["role"] != SYSTEM]
        self._messages = [*([{"role": SYSTEM, "content": text}] if text else []), *rest]

    def _save(self, name: str) -> None:
        file = _file("/save", name)
        if file.exists():
            raise InputError(f"/save {file}: it exists; choose another name")
        if not file.absolute().parent.is_dir():
            raise InputError(f"/save {file}: its folder does not exist")
        try:
            write_json(file, self._messages)
        except OSError as error:
            raise InputError(f"/save {file}: cannot be written ({error.strerror})") from error

    def _load(self, name: str) -> None:
        messages = read_messages(_file("/load", name))
        if messages and isinstance(messages[-1], dict) and messages[-1].get("role") != ASSISTANT:
            return self._answer(messages)
        self._messages = [dict(message) for message in waiting(messages)]

    def _reset(self, _: str = "") -> None:
        self._messages = [message for message in self._messages if message["role"] == SYSTEM]

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def _file(command: str, name: str) -> Path:
    if not name:
        raise InputError(f"{command} FILE: give the name of a JSON file")
    return Path(os.path.expanduser(name))
