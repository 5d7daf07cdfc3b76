"""Arguments that several commands share, and the bundle or session that they open."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from ssdevice.adapters.settings import SETTINGS, read_settings
from ssdevice.adapters.storage import PRECISIONS
from ssdevice.bundle.folder import Bundle
from ssdevice.bundle.manifest import LONGER, NOT_APPLIED, Precision
from ssdevice.bundle.staging import check_writable
from ssdevice.errors import InputError, reading
from ssdevice.runtime.engine import EngineOptions, open_engine
from ssdevice.runtime.session import Session
from ssdevice.runtime.split import DRAFTED, VerifyAt
from ssdevice.strict_json import utf8

MAX_THREADS = 1024
LEAST_KEY = 16
"""Characters of a server's key."""
QUANTS = tuple(precision.value for precision in Precision)
DEFAULT_QUANT = Precision.INT8.value


def add_bundle(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="bundle folder")
    parser.add_argument(
        "--app", metavar="NAME", help="app of the bundle (default: its default app)"
    )
    add_signature(parser)


def add_signature(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--require-signature",
        type=Path,
        metavar="PUBLIC.pem",
        help="refuse what this ed25519 key has not signed",
    )


def add_adapter_precision(parser: argparse.ArgumentParser) -> None:
    default = Precision.FP32.value
    parser.add_argument(
        "--adapter-precision",
        choices=[each.value for each in PRECISIONS],
        default=default,
        help=f"how adapters outside the graphs store their floats (default {default})",
    )


def named_folder(text: str, option: str = "") -> tuple[str, Path]:
    """``NAME=DIR`` as a pair; a ``DIR`` alone names the app it was trained for.

    Raises InputError, which names ``option``.
    """
    name, separator, folder = text.partition("=")
    if not separator and (Path(text) / SETTINGS).is_file():
        return read_settings(Path(text)).app, Path(text)
    if name and folder:
        return name, Path(folder)
    given = f"{option} {text}".strip()
    if not separator and Path(text).is_dir():
        raise InputError(
            f"{given}: no {SETTINGS} names its app; expected NAME=DIR, the app's name and its "
            "adapter folder"
        )
    if not separator:
        raise InputError(
            f"{given}: no such folder; expected NAME=DIR, the app's name and its adapter folder"
        )
    raise InputError(f"{given}: expected NAME=DIR, the app's name and its adapter folder")


def add_threads(parser: argparse.ArgumentParser, text: str = "CPU threads") -> None:
    parser.add_argument(
        "--threads",
        type=whole(0, MAX_THREADS),
        default=0,
        metavar="N",
        help=f"{text} (default 0: all cores)",
    )


def prepare_frameworks(threads: int = 0) -> None:
    """Limit torch to ``threads`` CPU threads (0: all cores) and turn off transformers' progress
    bars, which ignore whether stderr is a terminal.
    """
    import torch
    from transformers.utils import logging

    if threads:
        torch.set_num_threads(threads)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def add_engine(parser: argparse.ArgumentParser) -> None:
    add_threads(parser)
    parser.add_argument(
        "--no-spinning",
        action="store_true",
        help="threads sleep while they wait: slower on an idle machine, kinder to other programs",
    )
    parser.add_argument(
        "--no-kernels", action="store_true", help="do not use what `ssdevice kernels` built"
    )


def add_special_tokens(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--special-tokens",
        action="store_true",
        help="read special tokens that are written in messages as such, as transformers does "
        "(default: they are text)",
    )


def engine_options(args: argparse.Namespace, profile: bool = False) -> EngineOptions:
    """The options that ``add_engine`` declared."""
    return EngineOptions(
        threads=args.threads,
        spinning=not args.no_spinning,
        profile=profile,
        kernels=not args.no_kernels,
    )


def open_bundle(args: argparse.Namespace, folder: Path | None = None) -> Bundle:
    """The checked bundle of ``add_bundle``, or the one in ``folder``."""
    return Bundle.open(folder or args.bundle, require_signature=args.require_signature)


def open_session(args: argparse.Namespace, profile: bool = False) -> Session:
    """The session of ``add_bundle`` and ``add_engine``.

    Tells stderr which settings of the model's ``generate`` the bundle does not apply, and whether
    its context is longer than the model was made for.
    """
    at = verify_at(args)
    opener = open_engine if at is None else at.open_engine
    bundle = open_bundle(args)
    for note in bundle.manifest.notes:
        if note.startswith((LONGER, NOT_APPLIED)) and not args.quiet:
            print(f"ssdevice: {note}", file=sys.stderr)
    options = engine_options(args, profile)
    session = Session.open(bundle, app=args.app, options=options, opener=opener)
    session.special_tokens = getattr(args, "special_tokens", False)
    return session


def add_verify_at(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("a model on a server").add_argument
    add(
        "--verify-at",
        metavar="URL",
        help="this bundle drafts, and a server (serve --verify) chooses; while it is away, this "
        "bundle goes on alone",
    )
    add("--verify-key-file", type=Path, metavar="FILE", help="a file with the server's key")
    add(
        "--verify-drafts",
        type=whole(1, 32),
        metavar="N",
        help=f"tokens to draft for a call (default {DRAFTED})",
    )


def verify_at(args: argparse.Namespace) -> VerifyAt | None:
    """The server that verifies. Raises InputError for options that would have no effect."""
    if getattr(args, "verify_at", None) is None:
        if hasattr(args, "verify_at"):
            refuse_ignored(args, "it goes with --verify-at", "--verify-key-file", "--verify-drafts")
        return None
    refuse_ignored(args, "the server verifies every draft", "--no-speculate")
    return VerifyAt(
        args.verify_at,
        key_in(args.verify_key_file, "--verify-key-file"),
        args.verify_drafts or DRAFTED,
    )


def key_in(file: Path | None, option: str) -> str | None:
    """The key of a server in a file.

    Raises InputError for one that headers cannot hold, or that is soon guessed.
    """
    if file is None:
        return None
    with reading(file):
        key = utf8(file.read_bytes(), str(file)).strip()
    if len(key) < LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise InputError(
            f"{option} {file}: a key has {LEAST_KEY} or more ASCII characters, no spaces among them"
        )
    return key


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """An argparse type: a whole number of ``least`` or more, and at most ``most``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if most is None and value < least:
            raise argparse.ArgumentTypeError(f"{text}, expected {least} or more")
        if most is not None and not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text}, expected {least} to {most}")
        return value

    return parse


positive = whole(1)


def check_new_file(path: Path | None, option: str) -> None:
    """Raise InputError, before any work, for an output file that cannot be written."""
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise InputError(f"{option} {path}: its folder does not exist")
    if path.is_dir():
        raise InputError(f"{option} {path}: this is a folder, expected a file name")
    check_writable(path, option)


def refuse_ignored(args: argparse.Namespace, why: str, *options: str) -> None:
    """Raise InputError for the first of these options that was given: it would have no effect, and
    ``why``.

    Given means neither None, False nor empty, so their defaults must be one of these.
    """
    for option in options:
        if getattr(args, option.lstrip("-").replace("-", "_")) not in (None, False, [], ()):
            raise InputError(f"{option} has no effect: {why}")
