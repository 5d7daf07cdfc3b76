"""``ssdevice chat``: a conversation with a bundle in the terminal."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import closing, suppress

from ssdevice import arguments
from ssdevice.bundle.staging import write_json
from ssdevice.commands.opening import add_bundle, check_new_file, open_session, refuse_ignored
from ssdevice.commands.run import summary
from ssdevice.commands.sampling import add_answers, sampling_of
from ssdevice.config import read_json
from ssdevice.errors import InputError, SSDeviceError
from ssdevice.progress import count
from ssdevice.runtime.session import Session
from ssdevice.runtime.split import on_stderr
from ssdevice.strict_json import utf8
from ssdevice.text.messages import DROP_OLDEST, OVERFLOWS, SYSTEM

PROMPT = "> "
DRAFTED = "green"
HELP = '''\
/app NAME     switch to another app of the bundle; the conversation starts over
/system TEXT  another system message, from now on; without TEXT none
/save FILE    write the messages to a new JSON file
/load FILE    go on with the messages of a JSON file
/reset        start over, with the same system message
/help         this text
/quit         end, as Ctrl-D does
A message that begins with / is written with //. A message of several lines is pasted, or written
between two lines of """. Ctrl-C ends an answer. Accepted drafts are green.'''
BLOCK = '"""'
"""What begins and ends a message of several lines."""
Lines = Iterator[tuple[str, str]]
"""Lines, each with where it is, for messages of errors."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_bundle(parser)
    add("--system", metavar="TEXT", help="system message of the conversation")
    add(
        "--overflow",
        choices=OVERFLOWS,
        default=DROP_OLDEST,
        help=f"when the context is full: an error, or forget the oldest turns (default "
        f"{DROP_OLDEST})",
    )
    add_answers(parser, 1024)


def run(args: argparse.Namespace) -> int:
    """Answer messages of standard input until it ends: at a terminal, or one a line from a pipe or
    file; lines between two of BLOCK are one message.
    """
    refuse_ignored(args, "it goes with ssdevice run --json", "--logprobs")
    sampling_of(args)
    with open_session(args) as session:
        _Talk(args, session).hold()
    return 0


class _Talk:
    """The lines of a user: messages to the session, and commands that change its conversation."""

    def __init__(self, args: argparse.Namespace, session: Session) -> None:
        from rich.console import Console

        self._args = args
        self._session = session
        self._sampling = sampling_of(args, session.bundle)
        self._console = Console(highlight=False)  # heeds NO_COLOR, and a file gets no colours
        self._interactive = sys.stdin is not None and sys.stdin.isatty()
        self._command("system", args.system or "")

    def hold(self) -> None:
        """Take messages and commands until there are no more.

        An error ends what comes from a pipe; at a terminal the user goes on.
        """
        if self._interactive and not self._args.quiet:
            on_stderr(f"{self._args.bundle}: /help lists the commands")
        for said in messages(_typed() if self._interactive else _piped()):
            try:
                if said == "/quit":
                    return
                if "\n" in said or not said.startswith("/"):
                    self._answer(said)
                elif said.startswith("//"):
                    self._answer(said.removeprefix("/"))
                else:
                    name, _, argument = said[1:].partition(" ")
                    self._command(name, argument.strip())
            except (SSDeviceError, OSError) as error:  # a full disk loses no conversation
                if not self._interactive:
                    raise
                on_stderr(f"error: {error}")

    def _answer(self, prompt: str) -> None:
        session = self._session
        args = self._args
        pieces = session.chat(
            prompt,
            template=dict(args.template_arg),
            overflow=args.overflow,
            max_tokens=args.max_tokens,
            stop=args.stop,
            speculate=not args.no_speculate,
            sampling=self._sampling,
        )
        with closing(pieces), suppress(KeyboardInterrupt):  # type: ignore[type-var]
            for piece in pieces:
                self._show(piece)
        print(flush=True)
        dropped = session.last.dropped
        if dropped:
            on_stderr(f"[{count(dropped, 'oldest turn')} forgotten: the context is full]")
        if not args.quiet:
            on_stderr(summary(session.last))

    def _show(self, piece: str) -> None:
        """Print a piece; what comes before the last token of a step are accepted drafts."""
        answer = self._session.last
        own = piece
        if answer.accepted and answer.accepted[-1] > 1:
            last = str(self._session.tokenizer.tokenizer.decode([answer.tokens[-1]]))
            own = last if piece.endswith(last) else ""
        self._console.out(piece.removesuffix(own), style=DRAFTED, end="")
        self._console.out(own, end="")

    def _command(self, name: str, argument: str) -> None:
        session = self._session
        system = [message for message in session.messages if message["role"] == SYSTEM]
        if name == "help":
            on_stderr(HELP)
        elif name == "reset":
            session.messages = system
        elif name == "system":
            new = [{"role": SYSTEM, "content": argument}] if argument else []
            session.messages = [*new, *session.messages[len(system) :]]
        elif name not in ("app", "save", "load"):
            raise InputError(
                f"unknown command /{name}; /help lists them, and // begins a message with /"
            )
        elif not argument:
            raise InputError(f"/{name}: a name is missing; /help says what it names")
        elif name == "app":
            session.use(argument)
            session.messages = system
        elif name == "save":
            file = arguments.path("/save", os.path.expanduser(argument))
            check_new_file(file, "/save")
            if file.exists():
                raise InputError(f"/save {file}: it exists; choose another name")
            write_json(file, session.messages)
        else:
            session.messages = read_json(arguments.path("/load", os.path.expanduser(argument)))


def messages(lines: Lines) -> Iterator[str]:
    """The messages and commands in lines: one a line, or the lines between two of BLOCK, whose
    first and last may stand beside it. A pasted text is a line with line breaks in it.

    Raises InputError for a block without an end.
    """
    for line, where in lines:
        said = line.strip()
        if said.startswith(BLOCK):
            said = _block(said.removeprefix(BLOCK), lines, where)
        if said:
            yield said


def _block(first: str, lines: Lines, where: str) -> str:
    """The lines up to the one that ends with BLOCK, as one text."""
    block = [first]
    while not block[-1].rstrip().endswith(BLOCK):
        try:
            block.append(next(lines)[0])
        except StopIteration:
            raise InputError(f"{where}: the message that begins with {BLOCK} has no end") from None
    block[-1] = block[-1].rstrip().removesuffix(BLOCK)
    return "\n".join(block).strip("\n")


def _typed() -> Lines:
    """What a user enters at a terminal; a paste is one line with line breaks in it.

    Without readline, or with editline, every pasted line is one of its own.
    """
    with suppress(ImportError):
        import readline  # input() then edits lines and remembers them

        # Python turns it off. The terminal then marks what is pasted, and only Enter ends a line.
        readline.parse_and_bind("set enable-bracketed-paste on")
    with suppress(EOFError):
        while True:
            yield input(PROMPT), "standard input"
    print()


def _piped() -> Lines:
    if sys.stdin is None:
        raise InputError("standard input is closed")
    for number, line in enumerate(sys.stdin.buffer, 1):
        where = f"standard input, line {number}"
        yield utf8(line, where).rstrip("\r\n"), where
