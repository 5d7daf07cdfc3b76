"""The command line: finds a command's module, runs it, and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence

from ssdevice import __version__
from ssdevice.errors import SSDeviceError

COMMANDS = {
    "train": "train an app's adapter: LoRA and streams",
    "export": "export a model and its adapters to a bundle for Core ML, ExecuTorch or ONNX",
    "run": "decode prompts with a bundle",
    "bench": "measure a bundle: speed, acceptance, equality, quality",
    "verify": "check a bundle: integrity, then numbers against the reference",
    "inspect": "show what is in a bundle, its sizes and its memory",
    "tune": "choose the draft tree and schedule for this device",
    "bundle": "list and remove apps of a bundle; pack, unpack, sign and check it",
    "demo": "export, decode and compare with the shipped checkpoint",
}
INTERRUPTED = 130
MAX_MESSAGE = 1000
CHATTER = ("torchao", "torch.utils._pytree")
"""Loggers of other packages that warn, on import, about parts that this product does not use."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 1 (failure), 2 (bad input) or 130 (Ctrl-C)."""
    args = sys.argv[1:] if argv is None else list(argv)
    debug = "--debug" in args
    for name in () if debug else CHATTER:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        options = _parse(args)
        return int(options.run(options))
    except SSDeviceError as error:
        if debug:
            raise
        print(f"ssdevice: error: {one_line(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        if debug:
            raise
        print("ssdevice: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return 0


def _parse(args: list[str]) -> argparse.Namespace:
    """The options of the chosen command, whose module is the only one imported."""
    parser = argparse.ArgumentParser(
        prog="ssdevice",
        description="Speculative Streaming on devices: train, export and run stream-fused language models.",
    )
    parser.add_argument("--version", action="version", version=f"ssdevice {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((a for a in args if not a.startswith("-")), None)
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        sub.add_argument("--debug", action="store_true", help="show tracebacks")
        sub.add_argument("--quiet", action="store_true", help="no progress on stderr")
        if name == chosen:
            module = importlib.import_module(f"ssdevice.commands.{name}")
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    return parser.parse_args(args)


def one_line(text: str) -> str:
    """A message for a terminal: one line of bounded length, without control characters.

    Messages contain file names and texts from bundles, and errors of other libraries, which can be pages long.
    """
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))
    return shown if len(shown) <= MAX_MESSAGE else f"{shown[: MAX_MESSAGE - 3]}..."


if __name__ == "__main__":
    sys.exit(main())
