"""``ssdevice bench``: measure a bundle on this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssdevice.bench.quality import METRICS
from ssdevice.bundle.staging import check_writable, write_json
from ssdevice.commands.opening import (
    add_bundle,
    add_engine,
    check_new_file,
    engine_options,
    open_session,
    positive,
    refuse_ignored,
)
from ssdevice.commands.sampling import HELP, STRUCTURES, add_sampling, flag, sampling_of
from ssdevice.commands.shown import show
from ssdevice.config import to_json
from ssdevice.data import read_examples
from ssdevice.errors import InputError

if TYPE_CHECKING:
    from ssdevice.bench.runner import BenchOptions, BenchResult
    from ssdevice.data import Example
    from ssdevice.runtime.sampling.options import Sampling
    from ssdevice.runtime.session import Session

ROUNDS = 3
PROFILE_PROMPTS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``ssdevice bench BUNDLE [BESIDE] --data FILE``."""
    add = parser.add_argument
    add_bundle(parser)
    add("beside", type=Path, nargs="?", metavar="BESIDE", help="another bundle, measured in turn with the first")
    add_measuring(parser)
    add("--metric", choices=METRICS, help="of quality (default: by the data)")
    add("--profile", action="store_true", help="instead, show where the time of a call goes")
    add_sampling(parser)
    add_engine(parser)


def add_measuring(parser: argparse.ArgumentParser) -> None:
    """Declare what is measured and where the report goes."""
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="FILE", help="JSON Lines of prompts")
    add("--limit", type=positive, metavar="N", help="the first N prompts")
    add("--rounds", type=positive, metavar="R", help=f"runs of each prompt (default {ROUNDS})")
    add("--max-tokens", type=positive, default=128, metavar="N", help="end an answer here (default 128)")
    add("--skip-long", action="store_true", help="leave out prompts that exceed the context")
    add("--json", type=Path, metavar="FILE", help="write the report as JSON")
    add("--report", type=Path, metavar="DIR", help="write index.html, a page that needs no network, and report.json")


def check_measuring(args: argparse.Namespace) -> None:
    """Raise InputError, before any work, for a report that cannot be written."""
    check_new_file(args.json, "--json")
    if args.report is not None:
        if args.report.exists() and not args.report.is_dir():
            raise InputError(f"--report {args.report}: this is a file, expected a folder")
        check_writable(args.report, "--report")


def bench_options(args: argparse.Namespace) -> BenchOptions:
    """The options that ``add_measuring`` declared."""
    from ssdevice.bench.runner import BenchOptions

    return BenchOptions(args.rounds or ROUNDS, args.max_tokens, args.skip_long)


def run(args: argparse.Namespace) -> int:
    """Measure, and print Markdown on standard output."""
    sampling_of(args)
    _check_options(args)
    examples = read_examples(args.data, args.limit, require_completion=False)
    if args.profile:
        from ssdevice.commands.profile import profile

        with open_session(args, profile=True) as session:
            show(profile(session, examples[:PROFILE_PROMPTS], args.max_tokens), as_json=False)
        return 0
    folders = [args.bundle] if args.beside is None else [args.bundle, args.beside]
    finish(args, *_measure(args, folders, examples, bench_options(args)))
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Raise InputError for options that exclude each other or cannot be carried out, before any work."""
    check_measuring(args)
    if args.profile and args.beside is not None:
        raise InputError(f"--profile takes one bundle; leave out {args.beside}")
    if args.profile:
        measuring = ("--json", "--report", "--metric", "--rounds", "--skip-long")
        refuse_ignored(args, "--profile shows where time goes and measures nothing", *measuring)
        choices = map(flag, (*HELP, *STRUCTURES, "logit_bias", "sample"))
        refuse_ignored(args, "--profile chooses tokens greedily", *choices)


def _measure(
    args: argparse.Namespace, folders: Sequence[Path], examples: Sequence[Example], options: BenchOptions
) -> tuple[dict[str, Any], str]:
    """The report of one bundle, or of two beside each other, and the same as Markdown."""
    from ssdevice.bench import beside
    from ssdevice.bench.quality import check_metric
    from ssdevice.bench.report import as_markdown
    from ssdevice.bench.runner import measure_beside
    from ssdevice.commands.progress import Progress

    check_metric(examples, args.metric)
    with ExitStack() as stack:
        sessions = [stack.enter_context(open_session(args, folder=folder)) for folder in folders]
        options = replace(options, sampling=sampling_of(args, sessions[0].bundle))
        progress = stack.enter_context(Progress(args.quiet))
        results = measure_beside(sessions, examples, options, progress.report)
        reports = [_report(args, *measured, options) for measured in zip(folders, sessions, results, strict=True)]
    report, texts = reports[0], [as_markdown(one) for one in reports]
    if len(reports) > 1:
        report["beside"] = beside.compare(*results) | {"report": reports[1]}
        texts[-1] += "\n\n" + beside.as_markdown(report["beside"], *map(str, folders))
    return report, "\n\n".join(texts)


def finish(args: argparse.Namespace, report: dict[str, Any], text: str) -> None:
    """Write the report, print it as Markdown, and say if it does not count."""
    if args.report is not None:
        from ssdevice.bench.page import write_page

        write_page(report, args.report, args.words)
    if args.json is not None:
        write_json(args.json, report)
    print(text)
    if not report["valid"] and not args.quiet:
        print("ssdevice: the machine was loaded; run again when it is quiet", file=sys.stderr)


def _asked(sampling: Sampling | None) -> dict[str, Any] | None:
    """What was asked for of the choice of tokens, without defaults; None: greedy."""
    from ssdevice.runtime.sampling.options import Sampling

    plain = to_json(Sampling())
    return {name: value for name, value in to_json(sampling).items() if value != plain[name]} if sampling else None


def _report(
    args: argparse.Namespace, folder: Path, session: Session, result: BenchResult, options: BenchOptions
) -> dict[str, Any]:
    from ssdevice.bench.machine import installed
    from ssdevice.bench.memory import measure_memory
    from ssdevice.bench.report import as_json, quality_of

    assert session.bundle is not None
    manifest = session.bundle.manifest
    first = session.prompt_ids(result.examples[0].prompt, system=result.examples[0].system)
    engine = engine_options(args)
    memory = {name: measure_memory(folder, args.app, name, engine, first, options.max_tokens) for name in result.modes}
    setting = {
        "bundle": str(folder),
        "app": args.app or manifest.default_app,
        "target": manifest.target,
        "precision": manifest.precision.value,
        "schedule": manifest.schedule.value,
        "mode": manifest.mode.value if manifest.mode else None,
        "parameters": manifest.model.parameters,
        "sampling": _asked(options.sampling),
        "threads": args.threads,
        "kernels": session.engine.kernels is not None,
        "data": str(args.data),
        "app_bytes": sum(manifest.files[path].size for path in session.bundle.app(args.app).files),  # 0 if merged
        "model_mb": round(manifest.total_bytes / 1e6, 3),
        "versions": installed(["numpy", *manifest.tools]),
    }
    return as_json(setting, session.engine.geometry, options, result, quality_of(result, args.metric), memory)
