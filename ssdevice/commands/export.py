"""``ssdevice export``: a model and its adapters to a bundle."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ssdevice.config import Schedule, Target
from ssdevice.errors import InputError, MissingExtraError
from ssdevice.export.coreml.options import ComputeUnits, CoreMLOptions, Deployment, KVWrite
from ssdevice.export.executorch.options import Delegate
from ssdevice.tree import FORMS, Tree

QUANTS = ("fp32", "fp16", "int8", "int4", "palette4")
DEFAULT_QUANT = "int8"
ADAPTER_QUANTS = ("fp32", "fp16", "int8")
TERMINATED = 143


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="Hugging Face folder or hub id of the base")
    add(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="an app's name and its trained adapter folder; several share one base where the target can",
    )
    add("--slots", action="store_true", help="keep a single adapter apart too, so that apps can be added later")
    add(
        "--adapter-precision",
        choices=ADAPTER_QUANTS,
        default="fp32",
        help="how floats of adapters that stand apart are stored (default fp32)",
    )
    add("--target", required=True, choices=[target.value for target in Target])
    add("--quant", choices=QUANTS, default=DEFAULT_QUANT, help=f"how weights are stored (default {DEFAULT_QUANT})")
    add("--tree", metavar="SPEC", help=f"draft tree: {FORMS} (default: the chain of all streams)")
    add("--schedule", choices=[s.value for s in Schedule], help="when streams run (default: the target's)")
    add("--context", type=int, default=512, metavar="N", help="tokens a conversation may hold (default 512)")
    add("--chunk", type=int, default=64, metavar="C", help="prompt tokens per prefill call (default 64)")
    add("--out", type=Path, metavar="BUNDLE", help="bundle folder to write (default: MODEL-APP-TARGET-QUANT here)")
    add(
        "--delegate",
        choices=[delegate.value for delegate in Delegate],
        default=Delegate.XNNPACK.value,
        help="what runs an ExecuTorch program; coreml is Apple's alone (default xnnpack)",
    )
    add("--logits", action="store_true", help="an ExecuTorch program that shows `verify` its logits, for development")
    coreml = parser.add_argument_group("Core ML alone, as a target or as a delegate")
    coreml.add_argument(
        "--kv-write",
        choices=[write.value for write in KVWrite],
        default=CoreMLOptions.kv_write.value,
        help="how rows enter the cache: slice at an offset, or mask, which asks less of compilers (default slice)",
    )
    coreml.add_argument(
        "--per-channel", action="store_true", help="int4 with a scale per channel, which the Neural Engine asks for"
    )
    coreml.add_argument(
        "--compute-units",
        choices=[units.value for units in ComputeUnits],
        default=CoreMLOptions.compute_units.value,
        help=f"what hosts let Core ML use (default {CoreMLOptions.compute_units.value})",
    )
    coreml.add_argument(
        "--deployment-target",
        default=CoreMLOptions.deployment.value,
        metavar="SYSTEM",
        help=f"oldest system it runs on: {', '.join(Deployment)} (default {CoreMLOptions.deployment.value})",
    )
    add("--overwrite", action="store_true", help="replace the bundle if it exists")
    add("--dry-run", action="store_true", help="print the plan and the estimated size, write nothing")
    add("--threads", type=int, default=0, metavar="N", help="CPU threads of the export (default: all cores)")


def run(args: argparse.Namespace) -> int:
    """Export, then print the bundle's path, size and what the parity gate saw; with ``--dry-run`` the plan."""
    adapters = tuple(_adapter(text) for text in args.adapter)
    tree = Tree.parse(args.tree) if args.tree is not None else None
    try:
        import torch

        from ssdevice.export.plan import ExportOptions, Quant, make_plan
        from ssdevice.export.stages import export_bundle
        from ssdevice.export.targets import exporter
    except ModuleNotFoundError as error:
        raise MissingExtraError("export", error.name or "torch") from error
    from ssdevice.bundle.folder import check_out
    from ssdevice.commands.progress import Progress

    if args.threads:
        torch.set_num_threads(args.threads)
    options = ExportOptions(
        model=args.model,
        target=Target(args.target),
        quant=Quant(args.quant),
        out=args.out or _default_out(args.model, adapters, args.target, args.delegate, args.quant),
        adapters=adapters,
        tree=tree,
        schedule=Schedule(args.schedule) if args.schedule else None,
        context=args.context,
        chunk=args.chunk,
        coreml=CoreMLOptions(
            KVWrite(args.kv_write),
            args.per_channel,
            ComputeUnits(args.compute_units),
            Deployment.parse(args.deployment_target),
        ),
        delegate=Delegate(args.delegate),
        logits=args.logits,
        slots=args.slots,
        adapter_precision=Quant(args.adapter_precision),
        overwrite=args.overwrite,
        dry_run=args.dry_run,
    )
    check_out(options.out, options.overwrite)
    _quiet_frameworks()
    if options.dry_run:
        print(json.dumps(make_plan(options, exporter(options.target, options.delegate)).describe(), indent=2))
        return 0
    with terminable(), Progress(args.quiet) as progress:
        bundle = export_bundle(options, progress.report)
    manifest = bundle.manifest
    summary = {
        "bundle": str(bundle.folder),
        "bytes": sum(entry.size for entry in manifest.files.values()),
        "functions": [spec.name for spec in manifest.functions],
        "parity": manifest.parity,
        "notes": list(manifest.notes),
    }
    print(json.dumps(summary))
    return 0


def _adapter(text: str) -> tuple[str, Path]:
    name, separator, folder = text.partition("=")
    if not separator or not name or not folder:
        raise InputError(f"--adapter {text}: expected NAME=DIR, the app's name and its adapter folder")
    return name, Path(folder)


def _default_out(model: str, adapters: tuple[tuple[str, Path], ...], target: str, delegate: str, quant: str) -> Path:
    special = (delegate,) if delegate != Delegate.XNNPACK else ()
    return Path("-".join([Path(model).name, *(name for name, _ in adapters), target, *special, quant]))


def _quiet_frameworks() -> None:
    """transformers draws bars of its own, whoever watches."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]


@contextmanager
def terminable() -> Iterator[None]:
    """Within this context SIGTERM ends the process through its cleanup, as Ctrl-C does."""

    def stop(_: int, __: FrameType | None) -> None:
        sys.exit(TERMINATED)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
