"""``ssdevice demo``: export, decode, compare, on the checkpoint that ships with the source or on SmolLM2."""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from ssdevice import targets
from ssdevice.bundle.folder import check_out
from ssdevice.commands import smollm2
from ssdevice.commands.opening import add_threads, positive
from ssdevice.data import Example, read_examples
from ssdevice.errors import InputError
from ssdevice.progress import count

if TYPE_CHECKING:
    from ssdevice.bundle.folder import Bundle

MODELS = Path(__file__).resolve().parents[2] / "models"
BASE, ADAPTER, PROMPTS = "base-7m", "adapters/sql-shared", "prompts/sql.jsonl"
APP = "sql"
QUESTIONS = "prompts/general.jsonl"
CHAT = "chat-lossless"
"""The adapter of SmolLM2 for any question."""
TASKS = {CHAT: ("chat", QUESTIONS, ("--tree", "chain:2")), "sql-shared": (APP, PROMPTS, ("--tree", "chain:4"))}
"""Adapters for SmolLM2, the best for a demonstration first: the app, prompts that fit it, the tree that pays."""
TRACED = 3


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
    examples = read_examples(cast.prompts, args.prompts, require_completion=False)
    with tempfile.TemporaryDirectory(prefix="ssdevice-demo-") as folder:
        bundle = _export(args, cast, args.keep or Path(folder) / "bundle")
        _show(args, bundle, examples)
    return 0


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


def _export(args: argparse.Namespace, cast: Cast, out: Path) -> Bundle:
    """The bundle as ``ssdevice export`` makes it."""
    from ssdevice.bundle.folder import Bundle
    from ssdevice.commands import export

    command = [
        "--model", str(cast.base), "--adapter", f"{cast.app}={cast.adapter}",
        "--target", targets.DEFAULT, *cast.options, "--out", str(out),
    ]  # fmt: skip
    print(f"$ ssdevice export {' '.join(command)}", flush=True)
    parser = argparse.ArgumentParser()
    export.add_arguments(parser)
    clock = perf_counter()
    export.run(parser.parse_args(command, argparse.Namespace(quiet=args.quiet, debug=args.debug)))
    bundle = Bundle.open(out)
    size = bundle.manifest.total_bytes
    print(f"{size / 1e6:.1f} MB in {perf_counter() - clock:.0f} s, compared with the torch reference.\n")
    return bundle


def _show(args: argparse.Namespace, bundle: Bundle, examples: list[Example]) -> None:
    from ssdevice.bench.runner import BenchOptions, measure
    from ssdevice.commands.progress import Progress
    from ssdevice.commands.trace import ACCEPTED, REJECTED, Trace
    from ssdevice.runtime.engine import EngineOptions
    from ssdevice.runtime.session import Session

    with Session.open(bundle, options=EngineOptions(threads=args.threads)) as session:
        print(f"Step by step ({ACCEPTED}: drafted and accepted, bold: the model's own token, {REJECTED}: rejected):")
        for example in examples[:TRACED]:
            print(f"\n> {example.prompt}")
            trace = Trace(session.tokenizer, session.engine.geometry.tree)
            for step in session.runs(session.prompt_ids(example.prompt, system=example.system)):
                trace.show(step)
        print(f"\nPlain against speculative decoding on {count(len(examples), 'prompt')}:", flush=True)
        with Progress(args.quiet) as progress:
            result = measure(session, examples, BenchOptions(rounds=1, skip_long=True), progress.report)
    for mode in result.modes.values():
        print(
            f"  {mode.name:<12} {mode.tokens_per_second.median:7.1f} tokens/s  "
            f"{mode.tokens_per_step:.2f} tokens per step"
        )
    if result.speedup is not None and result.baseline is not None:
        print(f"  {result.speedup.estimate:.2f}x the speed of the faster plain mode ({result.baseline.name})")
    same = "the same tokens" if result.equal else "DIFFERENT TOKENS (see ssdevice verify)"
    print(f"  All decoding modes gave {same}.")
    if not result.load.valid:
        others = f"{result.load.others:.0%}"
        print(f"ssdevice: other processes used {others} of this machine; the speeds do not count", file=sys.stderr)
