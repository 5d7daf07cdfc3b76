"""The command line: finds a command's module, runs it, and turns errors into one line and an exit
code.
"""

import argparse
import difflib
import importlib
import io
import itertools
import logging
import os
import signal
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import ssdevice
from ssdevice.errors import InputError, SSDeviceError, is_out_of_memory

COMMANDS = {
    "train": "train an app's adapter: LoRA and streams",
    "export": "export a model and its adapters to a bundle for Core ML, ExecuTorch or ONNX",
    "run": "decode prompts with a bundle",
    "chat": "talk with a bundle in the terminal",
    "bench": "measure a bundle: speed, acceptance, equality, quality",
    "peers": "measure bundles beside other engines on the same weights",
    "verify": "check a bundle: integrity, then numbers against the reference",
    "inspect": "show what is in a bundle, its sizes and its memory",
    "tune": "choose the draft tree and schedule for this device",
    "kernels": "compile faster kernels for ONNX bundles on this machine",
    "bundle": "change a bundle: sign it, add and remove apps",
    "web": "run a bundle in a browser: serve the page, or write it for a static host",
    "serve": "answer requests in OpenAI's form on this machine",
    "demo": "export, decode and compare with the shipped checkpoint",
}
OWN_FOLDER = {"peers": "ssdevice.peers.command"}
"""Commands outside ``ssdevice.commands``."""
INTERRUPTED = 130
TERMINATED = 143
MAX_MESSAGE = 1000
CHATTER = ("torchao", "torch.utils._pytree")
"""Loggers of other packages that warn, on import, about parts that this product does not use."""

DEPRECATED = "`is_gradient_checkpointing` is deprecated"
"""A warning of one of these packages about another."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 1 (failure), 2 (bad input), 130 (Ctrl-C) or 143
    (SIGTERM).

    What the caller or the machine can cause is a line on stderr; ``--debug`` shows where it came
    from instead.
    """
    args = sys.argv[1:] if argv is None else list(argv)
    debug = "--debug" in args
    _write_any_text()
    try:
        with terminable():
            code = _run(args)
            print(end="", flush=True)  # here, where its errors are told
            return code
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        if debug:
            raise
        print("ssdevice: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        found = _message(error)
        if debug or found is None:
            raise
        print(f"ssdevice: error: {one_line(found)}", file=sys.stderr)
        return error.exit_code if isinstance(error, SSDeviceError) else 1


def _write_any_text() -> None:
    """UTF-8 for files and pipes, whatever the locale; escapes for what a terminal cannot show.

    A stream that the caller closed takes everything: without one, what is said on stderr would be
    printed on stdout, and the next file that is opened would get what libraries say there.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                encoding=None if stream.isatty() else "utf-8", errors="backslashreplace"
            )


def _message(error: Exception) -> str | None:
    """What to say of an error; None for one that nobody foresaw, whose traceback is wanted."""
    if isinstance(error, SSDeviceError):
        return str(error)
    if is_out_of_memory(error):
        return "out of memory: close other programs, use a larger machine, or a smaller model"
    if not isinstance(error, OSError):
        return None
    if error.errno is None:
        return str(error)
    if error.filename:
        return f"{error.filename}: {error.strerror}"
    # What writes files names them, see ``staging.disk_errors``.
    where = "standard output" if _output_fails() else "a file (--debug shows which)"
    return f"{where}: {error.strerror}"


def _output_fails() -> bool:
    """Whether standard output takes no more text, as a trial shows; if so, Python must not try
    again at the end.
    """
    try:
        print(flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are those of any other input: one line, without the list of all
    options, with the nearest name for one that is misspelled.
    """

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse an option that does not exist before anything else, such as another one that is
        missing because it was misspelled.
        """
        words = itertools.takewhile(lambda each: each != "--", args)
        if self._subparsers is not None:  # what follows the action is known to its parser
            words = itertools.takewhile(lambda each: each.startswith("-"), words)
        for word in words:
            self._check_option(word)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def _check_option(self, word: str) -> None:
        name = word.partition("=")[0]
        known = [each for each in self._option_string_actions if each.startswith("--")]
        # A text with spaces is a value, as argparse sees it.
        if not name.startswith("--") or " " in word or any(each.startswith(name) for each in known):
            return
        self.error(f"unrecognized arguments: {name}{suggestion(name, known)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse does, for commands, actions and choices alike, with the nearest one."""
        if action.choices is None or value in action.choices:
            return
        known = [str(each) for each in action.choices]
        hint = suggestion(str(value), known) or f" (choose from {', '.join(known)})"
        raise argparse.ArgumentError(action, f"invalid choice: {value!r}{hint}")


def suggestion(name: str, known: Collection[str]) -> str:
    """`` (did you mean --sample?)``, or nothing if no known name is near."""
    near = difflib.get_close_matches(name, known, 1)
    return f" (did you mean {near[0]}?)" if near else ""


@contextmanager
def terminable() -> Iterator[None]:
    """In this context SIGTERM ends the process with its cleanup, as Ctrl-C does."""
    before = None
    with suppress(ValueError):  # only the main thread may set handlers
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _run(args: Sequence[str]) -> int:
    parser = _Parser(prog="ssdevice", description=ssdevice.__doc__)
    parser.add_argument("--version", action="version", version=f"ssdevice {ssdevice.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((a for a in args if not a.startswith("-")), None)
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(
            name, help=summary, description=summary[0].upper() + summary[1:] + "."
        )
        sub.add_argument("--debug", action="store_true", help="show tracebacks")
        sub.add_argument("--quiet", action="store_true", help="no progress on stderr")
        if name == chosen:
            module = command_module(name)
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    options = parser.parse_args(args)
    options.words = ("ssdevice", *args)
    if not options.debug:
        for name in CHATTER:
            logging.getLogger(name).setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", DEPRECATED)
    return int(options.run(options))


def command_module(name: str) -> Any:
    """The module of a command: its ``add_arguments`` and ``run``."""
    return importlib.import_module(OWN_FOLDER.get(name, f"ssdevice.commands.{name}"))


def one_line(text: str) -> str:
    """A message for a terminal: one line of bounded length, without control characters.

    Messages contain names and texts from files and bundles, and errors of other libraries, which
    can be pages long.
    """
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))
    return shown if len(shown) <= MAX_MESSAGE else f"{shown[: MAX_MESSAGE - 3]}..."
