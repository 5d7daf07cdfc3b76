"""``ssdevice demo``: export, decode and compare with the checkpoint that ships with the source."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from ssdevice import targets
from ssdevice.commands.opening import positive
from ssdevice.data import Example, read_examples
from ssdevice.errors import InputError

if TYPE_CHECKING:
    from ssdevice.bundle.folder import Bundle

MODELS = Path(__file__).resolve().parents[2] / "models"
BASE, ADAPTER, PROMPTS = "base-7m", "adapters/sql-shared", "prompts/sql.jsonl"
APP = "sql"
TRACED = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``ssdevice demo``."""
    parser.add_argument("--models", type=Path, default=MODELS, metavar="DIR", help="folder with the shipped models")
    parser.add_argument("--prompts", type=positive, default=20, metavar="N", help="prompts to measure (default 20)")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="CPU threads (default: all cores)")
    parser.add_argument("--keep", type=Path, metavar="BUNDLE", help="keep the bundle in this folder")


def run(args: argparse.Namespace) -> int:
    """Export to ONNX INT8, show a few answers step by step, then plain against speculative decoding."""
    for part in (BASE, ADAPTER, PROMPTS):
        if not (args.models / part).exists():
            raise InputError(
                f"{args.models / part} is missing: run the demo from a checkout of the source, or with --models DIR"
            )
    prompts = read_examples(args.models / PROMPTS, args.prompts)
    with tempfile.TemporaryDirectory(prefix="ssdevice-demo-") as folder:
        bundle = _export(args, args.keep or Path(folder) / "bundle")
        _show(args, bundle, prompts)
    return 0


def _export(args: argparse.Namespace, out: Path) -> Bundle:
    """The bundle as ``ssdevice export`` makes it."""
    from ssdevice.bundle.folder import Bundle
    from ssdevice.commands import export

    command = [
        "--model", str(args.models / BASE), "--adapter", f"{APP}={args.models / ADAPTER}",
        "--target", targets.DEFAULT, "--quant", "int8", "--out", str(out),
    ]  # fmt: skip
    print(f"$ ssdevice export {' '.join(command)}", flush=True)
    parser = argparse.ArgumentParser()
    export.add_arguments(parser)
    clock = perf_counter()
    export.run(parser.parse_args(command, argparse.Namespace(quiet=args.quiet, debug=args.debug)))
    bundle = Bundle.open(out)
    size = sum(entry.size for entry in bundle.manifest.files.values())
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
        print(f"\nPlain against speculative decoding on {len(examples)} prompts:", flush=True)
        with Progress(args.quiet) as progress:
            result = measure(session, examples, BenchOptions(rounds=1, skip_long=True), progress.report)
    for mode in result.modes.values():
        print(
            f"  {mode.name:<12} {mode.tokens_per_second.median:7.1f} tokens/s  "
            f"{mode.tokens_per_step:.2f} tokens per step"
        )
    if result.speedup is not None and result.baseline is not None:
        print(f"  {result.speedup.estimate:.2f}x faster than the faster plain mode ({result.baseline.name})")
    same = "the same tokens" if result.equal else "DIFFERENT TOKENS (see ssdevice verify)"
    print(f"  All decoding modes gave {same}.")
    if not result.load.valid:
        others = f"{result.load.others:.0%}"
        print(f"ssdevice: other processes used {others} of this machine; the speeds do not count", file=sys.stderr)
