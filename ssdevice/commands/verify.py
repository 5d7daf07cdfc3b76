"""``ssdevice verify``: whether a bundle is intact and computes what it promises."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ssdevice.bench.equality import Asked, coarser
from ssdevice.bench.modes import against_bundle, compare_modes
from ssdevice.bench.runner import fitting
from ssdevice.bench.sampled import compare_sampled
from ssdevice.bundle.folder import Bundle
from ssdevice.bundle.manifest import AdapterKind
from ssdevice.commands import opening
from ssdevice.commands.progress import Progress
from ssdevice.commands.shown import show
from ssdevice.config import to_json
from ssdevice.contract import VERIFY
from ssdevice.data import Example, read_examples
from ssdevice.errors import InputError, ParityError, needs_extra
from ssdevice.export.target import export_target
from ssdevice.progress import Report, count
from ssdevice.runtime.engine import Engine, open_engine
from ssdevice.runtime.session import Session

LIMIT = 50
MAX_TOKENS = 64
RUNNING = (
    "--app",
    "--data",
    "--limit",
    "--max-tokens",
    "--seeds",
    "--model",
    "--against",
    "--threads",
    "--no-spinning",
    "--no-kernels",
)
# Any text will do, because modes are compared with each other. Different lengths vary the chunks
# and cache sizes.
PROMPTS = (
    "Hello",
    "name[The Mill], food[English], price range[cheap], area[riverside]",
    "CREATE TABLE orders (id, customer, city, total)\nHow many orders came from Berlin?",
    "Tell a short story about a lighthouse keeper who finds a letter on the beach.",
    "Count from one to twenty.",
    "List three reasons to read old books, and then say which of them convinces you most and why. "
    * 3,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    opening.add_bundle(parser)
    add(
        "--data",
        type=Path,
        metavar="FILE",
        help="prompts to compare (default: a few built-in ones)",
    )
    add(
        "--limit", type=opening.positive, metavar="N", help=f"the first N prompts (default {LIMIT})"
    )
    add(
        "--max-tokens",
        type=opening.positive,
        metavar="N",
        help=f"per answer (default {MAX_TOKENS})",
    )
    add(
        "--seeds",
        type=opening.positive,
        metavar="N",
        help="sample each prompt with N seeds of every sampler, where the host chooses (default: "
        "with one)",
    )
    add("--model", metavar="DIR", help="the base of the bundle: also compare with torch")
    add("--adapter", type=Path, metavar="DIR", help="the app's adapter folder, with --model")
    add(
        "--against",
        type=Path,
        metavar="BUNDLE",
        help="another bundle of the same model: also compare plain answers",
    )
    add("--integrity-only", action="store_true", help="check only the files, run nothing")
    add("--json", action="store_true", help="print the result as one JSON object")
    opening.add_engine(parser)


def run(args: argparse.Namespace) -> int:
    """Print what was checked. Raises ParityError (exit code 1) if a number breaks the promise."""
    if args.integrity_only:
        opening.refuse_ignored(args, "--integrity-only runs nothing", *RUNNING)
    if args.adapter is not None and args.model is None:
        raise InputError("--adapter is for the comparison with torch: give --model too")
    bundle = opening.open_bundle(args)
    signed = "; signature valid" if args.require_signature is not None else ""
    said = (
        f"{count(len(bundle.manifest.files), 'file')}, sizes and hashes as in the manifest{signed}"
    )
    found: dict[str, Any] = {"bundle": str(args.bundle), "integrity": said}
    faults: list[str] = []
    if not args.integrity_only:
        with Progress(args.quiet) as progress:
            for key, shown, wrong in _comparisons(args, bundle, progress.report):
                found[key] = shown
                faults += wrong
    show(found | {"faults": faults}, args.json)
    if faults:
        raise ParityError("; ".join(faults))
    return 0


def _comparisons(
    args: argparse.Namespace, bundle: Bundle, report: Report
) -> Iterator[tuple[str, Any, list[str]]]:
    """Compare all decoding modes, then the plain answers with whatever else was asked for.

    For each comparison: its key and value in the output, and what breaks the promise.
    """
    limit = args.limit or LIMIT
    options = opening.engine_options(args)
    examples: Sequence[Example] = ()
    if args.data is not None:
        examples = read_examples(args.data, limit, require_completion=False)
    folder = _reference(args, bundle)
    other = _other_bundle(args, bundle)

    def with_logits(bundle: Bundle) -> Engine | None:
        return export_target(bundle.manifest.target).logits_engine(bundle, args.app, options)

    with Session.open(bundle, app=args.app, options=options) as session:
        engine = session.engine
        tokenizer = session.tokenizer
        context = session.engine.geometry.context
        session.special_tokens = True  # the ids of transformers
        prompts = [session.prompt_ids(prompt)[1 - context :] for prompt in PROMPTS[:limit]]
        if examples:
            _, prompts = fitting(examples, tokenizer, session.instruction, context, file=args.data)
        if VERIFY not in engine.functions:
            opening.refuse_ignored(
                args, "this app's host has no choice (export --choose host) or no drafts", "--seeds"
            )
        shown = with_logits(bundle)
        precision = bundle.manifest.precision
        asked = Asked(prompts, tokenizer.stop_ids, args.max_tokens or MAX_TOKENS, precision, report)
        result = compare_modes(engine, shown, asked)
        yield "equality", result.as_json(), result.faults()
        if VERIFY in engine.functions:
            sampled = compare_sampled(engine, tokenizer, asked, args.seeds or 0)
            yield "sampled", sampled.as_json(), sampled.faults()
        if other is not None:
            asked = replace(asked, precision=coarser(precision, other.manifest.precision))
            engines = open_engine(other, args.app, options), with_logits(other)
            against = against_bundle(shown, *engines, asked, result.answers)
            yield "against", {**against.as_json(), "bundle": str(args.against)}, against.faults()
        if folder is not None:
            yield from _torch(args, folder, session, prompts, result.answers, report)


def _reference(args: argparse.Namespace, bundle: Bundle) -> Path | None:
    """The folder of ``--model``, checked before anything runs; None without one."""
    if args.model is None:
        return None
    with needs_extra("export"):
        from ssdevice.bench.against_torch import reference_folder
    opening.prepare_frameworks()
    return reference_folder(bundle, args.app, args.model, args.adapter)


def _torch(
    args: argparse.Namespace,
    folder: Path,
    session: Session,
    prompts: list[list[int]],
    answers: list[list[int]],
    report: Report,
) -> Iterator[tuple[str, Any, list[str]]]:
    """Compare the torch reference with transformers and PEFT, and the plain answers with the
    reference.
    """
    from ssdevice.bench.against_torch import agreement
    from ssdevice.export.crosscheck.check import check_model
    from ssdevice.model.loading import load

    bundle = session.bundle
    geometry = session.bundle.geometry
    merged = bundle.app(args.app).kind is AdapterKind.MERGED
    model = cache(lambda: load(folder, args.adapter, geometry.context, merge=merged).model)
    try:
        notes = check_model(
            folder, args.adapter, session.tokenizer, geometry.context, bool(geometry.hidden), model
        )
        yield "notes", list(notes), []
        yield (
            "transformers",
            "prompt ids, logits and first tokens are those of the torch reference",
            [],
        )
    except ParityError as error:
        yield "notes", [], [str(error)]
    result = agreement(bundle, args.app, model(), prompts, answers, report)
    yield "reference", to_json(result), result.faults()


def _other_bundle(args: argparse.Namespace, bundle: Bundle) -> Bundle | None:
    """The bundle of ``--against``.

    Raises InputError, before anything runs, if it has another model.
    """
    if args.against is None:
        return None
    other = opening.open_bundle(args, args.against)
    bundle.check_base(f"the base of --against {args.against}", other.manifest.model.sha256)
    other.app(args.app)
    return other
