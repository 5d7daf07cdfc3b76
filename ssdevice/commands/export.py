"""``ssdevice export``: turn a model and its adapters into a bundle."""

import argparse
import json
from dataclasses import fields
from pathlib import Path

from ssdevice import targets
from ssdevice.bundle.folder import check_out
from ssdevice.commands import opening
from ssdevice.commands.opening import DEFAULT_QUANT, QUANTS, positive
from ssdevice.commands.progress import Progress
from ssdevice.config import Schedule
from ssdevice.errors import ConfigError, needs_extra
from ssdevice.export.plan import ExportOptions, Quant, make_plan
from ssdevice.export.target import all_options, export_target, exporter
from ssdevice.memory import keep_no_large_blocks
from ssdevice.tree import FORMS, Tree

TO_NEAREST = "none"
"""Instead of a file for ``--calibrate``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="Hugging Face folder or hub id of the base")
    add(
        "--adapter",
        action="append",
        default=[],
        metavar="[NAME=]DIR",
        help="an app's name (default: that of its training) and its trained adapter folder; "
        "several share one base if the target can",
    )
    add(
        "--slots",
        action="store_true",
        help="keep even a single adapter separate, so that apps can be added later",
    )
    opening.add_adapter_precision(parser)
    add("--target", required=True, choices=targets.names())
    add(
        "--quant",
        choices=QUANTS,
        default=DEFAULT_QUANT,
        help=f"how weights are stored (default {DEFAULT_QUANT})",
    )
    add(
        "--calibrate",
        action="append",
        type=Path,
        default=[],
        metavar="FILE",
        help="rows of the app's data (JSON Lines) with which int4 weights are rounded; default: "
        f"text that the model writes; {TO_NEAREST}: each weight to nearest, which is worse",
    )
    add(
        "--tree",
        metavar="SPEC",
        help=f"draft tree: {FORMS} (default: the chain of all streams; without streams chain:4 "
        "for ONNX, whose drafts repeat the text, and [] elsewhere, for plain decoding only)",
    )
    add(
        "--phrases",
        action="append",
        type=Path,
        default=[],
        metavar="FILE",
        help="rows of the model's own answers (JSON Lines): what they say often is drafted where "
        "the text does not repeat itself; or phrases.bin of another bundle of the model; without "
        "streams",
    )
    add(
        "--schedule",
        choices=[s.value for s in Schedule],
        help="when streams run (default: the target's)",
    )
    add(
        "--context",
        type=positive,
        default=512,
        metavar="N",
        help="tokens a conversation may hold (default 512)",
    )
    add(
        "--chunk",
        type=positive,
        metavar="C",
        help="prompt tokens per prefill call (default 32 for ONNX, else 64)",
    )
    add(
        "--out",
        type=Path,
        metavar="BUNDLE",
        help="bundle folder to write (default: MODEL-APP-TARGET-QUANT here)",
    )
    add(
        "--choose",
        choices=("graph", "host"),
        default="graph",
        help="who chooses tokens: the graph, greedily, or also the host, for sampling and "
        "penalties (default graph)",
    )
    for options in all_options():
        options.add_arguments(parser)
    add(
        "--no-cross-check",
        action="store_false",
        dest="cross_check",
        help="do not compare with transformers first, for models of which no second one fits into "
        "memory",
    )
    add("--overwrite", action="store_true", help="replace the bundle if it exists")
    add("--dry-run", action="store_true", help="print the plan, write nothing")
    opening.add_threads(parser, "CPU threads of the export")


def run(args: argparse.Namespace) -> int:
    """Export, then print the bundle's path, size and parity; with ``--dry-run`` print only the
    plan.
    """
    with needs_extra("export"):
        from ssdevice.export.stages import export_plan
    options = _options(args)
    check_out(options.out, options.overwrite)
    opening.prepare_frameworks(args.threads)
    target = exporter(options)
    plan = make_plan(options, target)
    if options.dry_run:
        print(json.dumps(plan.describe(), indent=2))
        return 0
    keep_no_large_blocks()
    with Progress(args.quiet) as progress:
        bundle = export_plan(plan, target, progress.report)
    manifest = bundle.manifest
    summary = {
        "bundle": str(bundle.folder),
        "bytes": manifest.total_bytes,
        "functions": list(bundle.functions),
    }
    print(json.dumps({**summary, "parity": manifest.parity, "notes": list(manifest.notes)}))
    return 0


def _options(args: argparse.Namespace) -> ExportOptions:
    adapters = tuple(opening.named_folder(text, "--adapter") for text in args.adapter)
    parsed = [kind.parse(args) for kind in all_options()]
    chosen = tuple(options for options in parsed if options is not None)
    form = export_target(args.target).form(chosen)
    to_nearest = Path(TO_NEAREST) in args.calibrate
    if to_nearest and len(args.calibrate) > 1:
        raise ConfigError(f"--calibrate {TO_NEAREST} goes with no file")
    names = [Path(args.model).resolve().name, *(name for name, _ in adapters), form, args.quant]
    given = {
        each.name: getattr(args, each.name) for each in fields(ExportOptions) if each.name in args
    }
    made = {
        "quant": Quant(args.quant),
        "out": args.out or Path("-".join(names)),
        "adapters": adapters,
        "tree": Tree.parse(args.tree) if args.tree is not None else None,
        "schedule": Schedule(args.schedule) if args.schedule else None,
        "target_options": chosen,
        "adapter_precision": Quant(args.adapter_precision),
        "calibrate": () if to_nearest else tuple(args.calibrate),
        "own_text": not to_nearest,
        "phrases": tuple(args.phrases),
        "choose": args.choose == "host",
    }
    return ExportOptions(**given | made)
