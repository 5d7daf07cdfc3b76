"""Arguments of conversations, for the commands that hold or answer one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ssdevice import strict_json
from ssdevice.config import read_json
from ssdevice.errors import InputError


def add_template(parser: argparse.ArgumentParser) -> None:
    """Declare ``--template-arg``."""
    parser.add_argument(
        "--template-arg",
        type=_named,
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="argument of the chat template, such as enable_thinking=false; may be repeated",
    )


def template_of(args: argparse.Namespace) -> dict[str, Any] | None:
    """The arguments of ``add_template``; None for none. Raises InputError for one that is given twice."""
    names = [name for name, _ in args.template_arg]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"--template-arg {name} is given twice")
    return dict(args.template_arg) or None


def read_messages(file: Path) -> list[Any]:
    """The list of messages in a JSON file, not checked further. Raises InputError."""
    found = read_json(file)
    if not isinstance(found, list):
        raise InputError(f"{file}: expected a list of messages with 'role' and 'content'")
    return found


def _named(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=JSON")
    try:
        return name, strict_json.parse(value, name)
    except InputError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: {value!r} is not JSON; write a text as {name}='\"text\"'"
        ) from None
