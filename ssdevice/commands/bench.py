"""``ssdevice bench``: measure a bundle on this machine."""

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ssdevice.bench.machine import installed
from ssdevice.bench.memory import measure_memory
from ssdevice.bench.quality import METRICS, check_metric
from ssdevice.bench.report import as_json, as_markdown, quality_of, write_page
from ssdevice.bench.runner import BenchOptions, BenchResult, measure
from ssdevice.bundle.staging import check_writable, write_json
from ssdevice.commands import opening
from ssdevice.commands.progress import Progress
from ssdevice.commands.sampling import HELP, STRUCTURES, add_sampling, flag, sampling_of
from ssdevice.commands.shown import show
from ssdevice.config import to_json
from ssdevice.contract import STEP
from ssdevice.data import Example, read_examples
from ssdevice.errors import InputError
from ssdevice.export.target import export_target
from ssdevice.runtime.engine import Kernel
from ssdevice.runtime.sampling.options import Sampling
from ssdevice.runtime.session import Session

ROUNDS = 3
PROFILE_PROMPTS = 5
OTHER = "other"
"""Nodes of a step that the target counts to no part of the method."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    opening.add_bundle(parser)
    add_measuring(parser)
    parser.add_argument("--metric", choices=METRICS, help="of quality (default: by the data)")
    parser.add_argument(
        "--profile", action="store_true", help="instead, show where the time of a call goes"
    )
    add_sampling(parser)
    opening.add_engine(parser)


def add_measuring(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="FILE", help="JSON Lines of prompts")
    add("--limit", type=opening.positive, metavar="N", help="the first N prompts")
    add(
        "--rounds",
        type=opening.positive,
        metavar="R",
        help=f"runs of each prompt (default {ROUNDS})",
    )
    add(
        "--max-tokens",
        type=opening.positive,
        default=128,
        metavar="N",
        help="end an answer here (default 128)",
    )
    add("--skip-long", action="store_true", help="leave out prompts that exceed the context")
    add("--json", type=Path, metavar="FILE", help="write the report as JSON")
    add(
        "--report",
        type=Path,
        metavar="DIR",
        help="write index.html, a page that needs no network, and report.json",
    )


def check_measuring(args: argparse.Namespace) -> None:
    """Raise InputError, before any work, for a report that cannot be written."""
    opening.check_new_file(args.json, "--json")
    if args.report is not None:
        if args.report.exists() and not args.report.is_dir():
            raise InputError(f"--report {args.report}: this is a file, expected a folder")
        check_writable(args.report, "--report")


def bench_options(args: argparse.Namespace) -> BenchOptions:
    """The options that ``add_measuring`` declared."""
    return BenchOptions(args.rounds or ROUNDS, args.max_tokens, args.skip_long)


def run(args: argparse.Namespace) -> int:
    """Measure, and print Markdown on standard output."""
    sampling_of(args)
    check_measuring(args)
    if args.profile:
        measuring = ("--json", "--report", "--metric", "--rounds", "--skip-long")
        opening.refuse_ignored(
            args, "--profile shows where time goes and measures nothing", *measuring
        )
        choices = map(flag, (*HELP, *STRUCTURES, "logit_bias", "sample"))
        opening.refuse_ignored(args, "--profile chooses tokens greedily", *choices)
    examples = read_examples(args.data, args.limit, require_completion=False)
    if args.profile:
        with opening.open_session(args, profile=True) as session:
            show(profile(session, examples[:PROFILE_PROMPTS], args.max_tokens), as_json=False)
        return 0
    check_metric(examples, args.metric)
    with opening.open_session(args) as session, Progress(args.quiet) as progress:
        options = replace(bench_options(args), sampling=sampling_of(args, session.bundle))
        report = _report(
            args, session, measure(session, examples, options, progress.report), options
        )
    finish(args, report, as_markdown(report))
    return 0


def finish(args: argparse.Namespace, report: dict[str, Any], text: str) -> None:
    """Write the report, print it as Markdown, and say if it does not count."""
    if args.report is not None:
        write_page(report, args.report, args.words)
    if args.json is not None:
        write_json(args.json, report)
    print(text)
    if not report["valid"] and not args.quiet:
        print("ssdevice: the machine was loaded; run again when it is quiet", file=sys.stderr)


def _report(
    args: argparse.Namespace, session: Session, result: BenchResult, options: BenchOptions
) -> dict[str, Any]:
    manifest = session.bundle.manifest
    first = session.prompt_ids(result.examples[0].prompt, system=result.examples[0].system)
    opened = (args.bundle, args.app, opening.engine_options(args))
    most = options.max_tokens
    memory = {name: measure_memory(*opened, name, first, most) for name in result.modes}
    chosen = None
    if options.sampling is not None:
        plain = to_json(Sampling())
        asked = to_json(options.sampling)
        chosen = {name: value for name, value in asked.items() if value != plain[name]}
    files = session.bundle.app(args.app).files  # none if it is merged
    setting = {
        "bundle": str(args.bundle),
        "app": args.app or manifest.default_app,
        **{
            name: to_json(getattr(manifest, name))
            for name in ("target", "precision", "schedule", "mode")
        },
        "parameters": manifest.model.parameters,
        "sampling": chosen,
        "threads": args.threads,
        "kernels": session.engine.kernels is not None,
        "data": str(args.data),
        "app_bytes": sum(manifest.files[path].size for path in files),
        "model_mb": round(manifest.total_bytes / 1e6, 3),
        "versions": installed(["numpy", *manifest.tools]),
    }
    return as_json(
        setting, session.engine.geometry, options, result, quality_of(result, args.metric), memory
    )


def profile(session: Session, examples: Sequence[Example], max_tokens: int) -> dict[str, Any]:
    """Decode a few prompts in every mode: the host's share of a step, and the time by operator.

    Profiling slows calls down, so trust the shares rather than the times.
    """
    result = measure(
        session, examples, BenchOptions(rounds=1, max_tokens=max_tokens), lambda *_: None
    )
    found: dict[str, Any] = {"modes": []}
    for name, mode in result.modes.items():
        inside = mode.native_ms_per_step.median
        host = mode.host_us_per_step.median
        row = {
            "mode": name,
            "steps": sum(answer.steps for answer in mode.answers),
            "inside_ms_per_step": inside,
        }
        found["modes"].append(row | {"host_us_per_step": host})
    target = export_target(session.bundle.manifest.target)
    parts = target.parts(session.engine) if STEP in session.engine.functions else {}
    for function, kernels in session.engine.profile().items():
        found[f"{function}: kernels"] = _shares(kernels, lambda kernel: kernel.operator)
        if function == STEP and parts:
            found[f"{function}: parts"] = _shares(
                kernels, lambda kernel: parts.get(kernel.node, OTHER)
            )
    return found


def _shares(kernels: Sequence[Kernel], key: Callable[[Kernel], str]) -> list[dict[str, Any]]:
    """The time of kernels grouped by ``key``, largest first."""
    times: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        times[key(kernel)] += kernel.microseconds
    total = sum(times.values()) or 1.0
    rows = [*sorted(times.items(), key=lambda row: -row[1]), ("all", total)]
    return [
        {"name": name, "share": f"{us / total:.1%}", "us_per_call": round(us)} for name, us in rows
    ]
