"""The option for arguments of the chat template."""

from __future__ import annotations

import argparse
from typing import Any

from ssdevice import strict_json
from ssdevice.errors import InputError


def add_template(parser: argparse.ArgumentParser) -> None:
    """Declare ``--template-arg``, whose values are pairs of a name and a JSON value."""
    what = "argument of the chat template, such as enable_thinking=false; may be repeated"
    parser.add_argument("--template-arg", type=_named, action="append", default=[], metavar="NAME=JSON", help=what)


def _named(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=JSON")
    try:
        return name, strict_json.parse(value, name)
    except InputError:
        raise argparse.ArgumentTypeError(f"{text!r}: not JSON; write a text as {name}='\"text\"'") from None
