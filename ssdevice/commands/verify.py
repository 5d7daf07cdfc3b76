"""``ssdevice verify``: whether a bundle is intact and computes what it promises."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssdevice.bundle.manifest import AdapterKind, Precision
from ssdevice.commands.opening import (
    add_bundle,
    add_engine,
    engine_options,
    open_bundle,
    positive,
    prompts_of,
    refuse_ignored,
)
from ssdevice.commands.quiet import quiet_frameworks
from ssdevice.contract import VERIFY
from ssdevice.data import Example, read_examples
from ssdevice.errors import InputError, MissingExtraError, ParityError
from ssdevice.progress import count

if TYPE_CHECKING:
    from ssdevice.bench.equality import Equality
    from ssdevice.bundle.folder import Bundle
    from ssdevice.model.step import StreamModel
    from ssdevice.progress import Report
    from ssdevice.runtime.engine import Engine
    from ssdevice.runtime.session import Session

LIMIT, MAX_TOKENS = 50, 64
RUNNING = (
    "--app", "--data", "--limit", "--max-tokens", "--seeds", "--model", "--against", "--threads", "--no-spinning",
    "--no-kernels",
)  # fmt: skip
# Any text will do, because modes are compared with each other. Different lengths vary the chunks and cache sizes.
PROMPTS = (
    "Hello",
    "name[The Mill], food[English], price range[cheap], area[riverside]",
    "CREATE TABLE orders (id, customer, city, total)\nHow many orders came from Berlin?",
    "Tell a short story about a lighthouse keeper who finds a letter on the beach.",
    "Count from one to twenty.",
    "List three reasons to read old books, and then say which of them convinces you most and why. " * 3,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``ssdevice verify BUNDLE``."""
    add = parser.add_argument
    add_bundle(parser)
    add("--data", type=Path, metavar="FILE", help="prompts to compare (default: a few built-in ones)")
    add("--limit", type=positive, metavar="N", help=f"the first N prompts (default {LIMIT})")
    add("--max-tokens", type=positive, metavar="N", help=f"per answer (default {MAX_TOKENS})")
    add(
        "--seeds", type=positive, metavar="N",
        help="sample each prompt with N seeds of every sampler, where the host chooses (default: with one)",
    )  # fmt: skip
    add("--model", metavar="DIR", help="the base of the bundle: also compare with torch")
    add("--adapter", type=Path, metavar="DIR", help="the app's adapter folder, with --model")
    add("--against", type=Path, metavar="BUNDLE", help="another bundle of the same model: also compare plain answers")
    add("--integrity-only", action="store_true", help="check only the files, run nothing")
    add("--json", action="store_true", help="print the result as one JSON object")
    add_engine(parser)


def run(args: argparse.Namespace) -> int:
    """Print what was checked. Raises ParityError (exit code 1) if a number breaks the promise."""
    from ssdevice.commands.progress import Progress

    if args.integrity_only:
        refuse_ignored(args, "--integrity-only runs nothing", *RUNNING)
    if args.adapter is not None and args.model is None:
        raise InputError("--adapter is for the comparison with torch: give --model too")
    bundle = open_bundle(args)
    checks = _Checks(args, bundle)
    if not args.integrity_only:
        with Progress(args.quiet) as progress:
            checks.numbers(progress.report)
    if args.json:
        print(json.dumps({**checks.found, "faults": checks.faults}, ensure_ascii=False))
    else:
        print("\n".join(checks.lines))
    if checks.faults:
        raise ParityError("; ".join(checks.faults))
    return 0


class _Checks:
    """What was checked of a bundle: ``lines`` to print, ``found`` as JSON, and ``faults`` that break the promise."""

    def __init__(self, args: argparse.Namespace, bundle: Bundle) -> None:
        self.args, self.bundle = args, bundle
        files = len(bundle.manifest.files)
        signed = ", signature valid" if args.require_signature is not None else ""
        self.lines = [f"integrity: {count(files, 'file')}, sizes and hashes as in the manifest{signed}"]
        self.found: dict[str, Any] = {"bundle": str(args.bundle), "files": files}
        self.faults: list[str] = []

    def numbers(self, report: Report) -> None:
        """Compare all decoding modes, then the plain answers with whatever else was asked for."""
        from ssdevice.bench.equality import compare
        from ssdevice.runtime.session import Session

        args, bundle = self.args, self.bundle
        limit, most = args.limit or LIMIT, args.max_tokens or MAX_TOKENS
        examples = read_examples(args.data, limit, require_completion=False) if args.data is not None else ()
        folder, other = self._reference(), _other_bundle(args, bundle)
        with Session.open(bundle, app=args.app, options=engine_options(args)) as session:
            prompts = (
                prompts_of(session.tokenizer, session.instruction, session.engine.geometry, examples, args.data)
                if examples
                else _built_in(session, limit)
            )
            if VERIFY not in session.engine.functions:
                refuse_ignored(args, "this app's host has no choice (export --choose host) or no drafts", "--seeds")
            shown = _engine_with_logits(args, bundle)
            stops, precision = session.tokenizer.stop_ids, bundle.manifest.precision
            result = compare(session.engine, shown, prompts, stops, most, precision, report)
            self.found["equality"] = result.as_json()
            self.lines += _describe(result, shown is not None)
            if examples:
                self._quality(session, result, examples)
            self.faults += result.faults()
            if VERIFY in session.engine.functions:
                self._sampled(session, prompts, report)
            if other is not None:
                self._against(other, shown, prompts, result, stops, report)
            if folder is not None:
                model = cache(partial(self._loaded, folder))
                self._crosscheck(folder, session, model)
                self._torch(model(), prompts, result, report)
                if precision is Precision.FP32 and bundle.app(args.app).answers_as_base:
                    self._generate(prompts, result, stops, report)

    def _sampled(self, session: Session, prompts: list[list[int]], report: Report) -> None:
        """Compare sampled answers of all modes."""
        from ssdevice.bench.sampled import compare_sampled

        most, seeds = self.args.max_tokens or MAX_TOKENS, self.args.seeds or 0
        precision = self.bundle.manifest.precision
        result = compare_sampled(session.engine, session.tokenizer, prompts, most, precision, seeds, report)
        self.found["sampled"] = result.as_json()
        self.lines += result.describe()
        self.faults += result.faults()

    def _quality(self, session: Session, result: Equality, examples: Sequence[Example]) -> None:
        """Score the plain answers, if the data has something to compare them with."""
        from ssdevice.bench.quality import choose_metric, score

        metric = choose_metric(examples)
        if metric is None:
            return
        texts = []
        for tokens in result.answers:
            output = session.tokenizer.output()
            emission = output.push(tokens)
            texts.append(emission.text + ("" if emission.stopped else output.finish()))
        try:
            scores = score(metric, texts, examples)
        except MissingExtraError as error:
            self.lines.append(f"quality: not measured ({error})")
            return
        self.found["quality"] = {name: sum(values) / len(values) for name, values in scores.items()}
        self.lines.append("quality: " + ", ".join(f"{k} {value:.3f}" for k, value in self.found["quality"].items()))

    def _against(
        self,
        other: Bundle,
        shown: Engine | None,
        prompts: list[list[int]],
        result: Equality,
        stops: Sequence[int],
        report: Report,
    ) -> None:
        """Compare the plain answers with another bundle's."""
        from ssdevice.bench.against_bundle import against_bundle
        from ssdevice.runtime.engine import open_engine

        args = self.args
        agreement = against_bundle(
            shown,
            open_engine(other, args.app, engine_options(args)),
            _engine_with_logits(args, other),
            prompts,
            result.answers,
            stops,
            args.max_tokens or MAX_TOKENS,
            (result.precision, other.manifest.precision),
            report,
        )
        ties = sum(agreement.near_tie(d) for d in agreement.differences)
        equal = agreement.prompts - len(agreement.differences)
        text = f"{args.against}: {equal} of {agreement.prompts} plain answers equal"
        self.lines.append(text + (f", {count(ties, 'near-tie')} among the others" if agreement.differences else ""))
        if agreement.largest_change is not None:
            change = f"{agreement.largest_change:.3g} between the bundles (ceiling {agreement.ceiling})"
            self.lines.append(f"logits: change by at most {change}")
        self.lines += agreement.near_ties()
        self.found["against"] = {"bundle": str(args.against), **agreement.as_json()}
        self.faults += agreement.faults()

    def _reference(self) -> Path | None:
        """The folder of ``--model``, checked before anything runs; None without one."""
        args = self.args
        if args.model is None:
            return None
        try:
            from ssdevice.bench.against_torch import reference_folder
        except ModuleNotFoundError as error:
            raise MissingExtraError("export", error.name or "torch") from error
        quiet_frameworks()
        return reference_folder(self.bundle, args.app, args.model, args.adapter)

    def _loaded(self, folder: Path) -> StreamModel:
        from ssdevice.model.loading import load

        merged = self.bundle.app(self.args.app).kind is AdapterKind.MERGED
        return load(folder, self.args.adapter, self.bundle.geometry.context, merge=merged).model

    def _torch(self, model: StreamModel, prompts: list[list[int]], result: Equality, report: Report) -> None:
        """Compare the plain answers with the torch reference of ``--model`` and ``--adapter``."""
        from ssdevice.bench.against_torch import agreement

        found = agreement(self.bundle, self.args.app, model, prompts, result.answers, report)
        self.found["reference"] = {
            "tokens": found.tokens,
            "agreeing": found.agreeing,
            "near_ties": found.near_ties,
            "largest_margin": found.worst,
        }
        ties = f", {count(found.near_ties, 'near-tie')} among the others" if found.agreeing < found.tokens else ""
        self.lines.append(
            f"torch reference: {found.agreeing} of {found.tokens} tokens agree{ties}; "
            f"largest margin of another choice {found.worst:.3g}"
        )
        self.faults += found.faults()

    def _crosscheck(self, folder: Path, session: Session, model: Callable[[], StreamModel]) -> None:
        """Compare the torch reference itself with transformers and PEFT."""
        from ssdevice.export.crosscheck.check import check_model

        try:
            geometry = self.bundle.geometry
            choose = bool(geometry.hidden)
            notes = check_model(folder, self.args.adapter, session.tokenizer, geometry.context, choose, model)
        except ParityError as error:
            self.faults.append(str(error))
            return
        self.found["notes"] = list(notes)
        self.lines += ["transformers: prompt ids, logits and first tokens are those of the torch reference", *notes]

    def _generate(self, prompts: list[list[int]], result: Equality, stops: Sequence[int], report: Report) -> None:
        """Compare the plain answers with those that transformers generates with the untouched base."""
        from ssdevice.bench.against_generate import against_generate

        limits = self.args.max_tokens or MAX_TOKENS, self.bundle.geometry.context
        found = against_generate(self.args.model, prompts, result.answers, stops, *limits, report)
        equal = found.prompts - len(found.differing)
        self.found["generate"] = {"prompts": found.prompts, "differing": len(found.differing)}
        self.lines.append(
            f"transformers generate: {equal} of {found.prompts} answers equal those of the untouched base"
        )
        self.faults += found.faults()


def _other_bundle(args: argparse.Namespace, bundle: Bundle) -> Bundle | None:
    """The bundle of ``--against``. Raises InputError, before anything runs, if it has another model."""
    if args.against is None:
        return None
    from ssdevice.bench.comparable import check_same

    other = open_bundle(args, args.against)
    mine, theirs = bundle.manifest.model.sha256, other.manifest.model.sha256
    check_same(f"--against {args.against}", str(bundle.folder), ("base model", theirs, mine))
    other.app(args.app)
    return other


def _built_in(session: Session, limit: int) -> list[list[int]]:
    room = session.engine.geometry.context - 1
    return [session.prompt_ids(prompt)[-room:] for prompt in PROMPTS[:limit]]


def _engine_with_logits(args: argparse.Namespace, bundle: Bundle) -> Engine | None:
    """An engine of the bundle that also shows logits; None if the target has none, which the output then says."""
    from ssdevice.export.target import export_target

    return export_target(bundle.manifest.target).logits_engine(bundle, args.app, engine_options(args))


def _describe(result: Equality, measured: bool) -> list[str]:
    lines = [f"decoded: {count(result.prompts, 'prompt')}, {count(result.tokens, 'token')}, in plain decoding"]
    for mode in result.modes:
        differing = [d for d in result.differences if d.mode == mode]
        ties = sum(result.near_tie(d) for d in differing)
        text = f"{mode}: {result.prompts - len(differing)} of {result.prompts} answers equal to plain decoding"
        lines.append(text + (f", {count(ties, 'near-tie')}" if differing else ""))
    if result.modes:
        lines.append(f"draft tree: runs ended at {len(result.nodes_ended)} of its {count(result.nodes, 'node')}")
    if result.largest_change is not None:
        lines.append(f"logits: change by at most {result.largest_change:.3g} between modes (ceiling {result.ceiling})")
    elif result.modes and not measured:
        lines.append(
            "logits: not measured; the onnx package shows them for ONNX bundles (pip install 'ssdevice[export]'), "
            "ExecuTorch programs if they were exported with --logits"
        )
    lines += result.near_ties()
    return lines
