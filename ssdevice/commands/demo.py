"""``ssdevice demo``: export, decode, compare, on the checkpoint that ships with the source or on SmolLM2."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from ssdevice import targets
from ssdevice.bundle.folder import check_out
from ssdevice.commands import smollm2
from ssdevice.commands.opening import add_threads, positive
from ssdevice.data import read_examples
from ssdevice.errors import InputError

MODELS = Path(__file__).resolve().parents[2] / "models"
BASE, ADAPTER, PROMPTS = "base-7m", "adapters/sql-shared", "prompts/sql.jsonl"
APP = "sql"
QUESTIONS = "prompts/general.jsonl"
CHAT = "chat-lossless"
"""The adapter of SmolLM2 for any question."""
TASKS = {CHAT: ("chat", QUESTIONS, ("--tree", "chain:2")), "sql-shared": (APP, PROMPTS, ("--tree", "chain:4"))}
"""Adapters for SmolLM2, the best for a demonstration first: the app, prompts that fit it, the tree that pays."""


@dataclass(frozen=True)
class Cast:
    """What a demo runs: ``base`` and ``adapter`` folders, the app's name, the prompts' file, and options of export."""

    base: Path
    adapter: Path
    app: str
    prompts: Path
    options: tuple[str, ...]

    def check(self) -> None:
        """Raise InputError for what is not there."""
        for part in (self.base, self.adapter, self.prompts):
            if not part.exists():
                raise InputError(f"{part} is missing: the demo runs from a checkout of the source, or --models DIR")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``ssdevice demo``."""
    add = parser.add_argument
    add("--smollm2", action="store_true", help="on SmolLM2-135M-Instruct and general questions (make demo-smollm2)")
    add("--model", type=Path, metavar="DIR", help="with --smollm2: its folder (default: made from its package, kept)")
    add("--adapter", type=Path, metavar="DIR", help="another adapter of the same base")
    add("--models", type=Path, default=MODELS, metavar="DIR", help="folder with the shipped models")
    add("--prompts", type=positive, default=20, metavar="N", help="prompts to measure (default 20)")
    add_threads(parser, "CPU threads that decode")
    add("--keep", type=Path, metavar="BUNDLE", help="keep the bundle in this folder")


def run(args: argparse.Namespace) -> int:
    """Export to ONNX, show a few answers step by step, then plain against speculative decoding."""
    if args.keep is not None:
        check_out(args.keep, overwrite=None)
    cast = _smollm2(args) if args.smollm2 else _shipped(args)
    read_examples(cast.prompts, args.prompts, require_completion=False)
    model = ("--model", str(cast.base), "--adapter", f"{cast.app}={cast.adapter}", "--target", targets.DEFAULT)
    data, threads = ("--data", str(cast.prompts)), ("--threads", str(args.threads))
    with tempfile.TemporaryDirectory(prefix="ssdevice-demo-") as folder:
        bundle = str(args.keep or Path(folder) / "bundle")
        _call(args, "export", *model, *cast.options, "--out", bundle)
        _call(args, "run", bundle, *data, "--limit", "3", "--trace", *threads)
        _call(args, "bench", bundle, *data, "--limit", str(args.prompts), "--rounds", "1", "--skip-long", *threads)
    return 0


def _call(args: argparse.Namespace, name: str, *words: str) -> None:
    """Show another command, and run it."""
    print(f"$ ssdevice {shlex.join((name, *words))}", flush=True)
    command, parser = import_module(f"ssdevice.commands.{name}"), argparse.ArgumentParser()
    command.add_arguments(parser)
    command.run(parser.parse_args(words, argparse.Namespace(quiet=args.quiet, debug=args.debug)))
    print(flush=True)


def _shipped(args: argparse.Namespace) -> Cast:
    if args.model is not None:
        raise InputError("--model is for --smollm2")
    adapter, prompts = args.adapter or args.models / ADAPTER, args.models / PROMPTS
    cast = Cast(args.models / BASE, adapter, APP, prompts, ("--quant", "int8"))
    cast.check()
    return cast


def _smollm2(args: argparse.Namespace) -> Cast:
    """The adapter for any question, or that of another task: what is there is found before anything is fetched."""
    shipped = args.models / "adapters" / smollm2.NAME
    adapter = args.adapter or next((shipped / name for name in TASKS if (shipped / name).is_dir()), None)
    if adapter is None:
        raise InputError(
            f"{shipped} holds no adapter; give --adapter DIR, or train one: "
            "ssdevice train --self-prompt 4000 --mode lossless --app chat (docs/training.md)"
        )
    if adapter.name not in TASKS:
        print(f"Streams of {adapter.name}: if they learned another task, fewer of their drafts fit general questions.")
    app, prompts, tree = TASKS.get(adapter.name, ("chat", QUESTIONS, ()))
    cast = Cast(args.model or smollm2.cached(), adapter, app, args.models / prompts, ("--quant", "int4", *tree))
    if args.model is None:
        smollm2.smollm2(cast.base)
    cast.check()
    return cast
