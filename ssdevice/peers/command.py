"""``ssdevice peers``: measure bundles beside other engines on the same weights."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ssdevice.adapters.base_files import weights_sha256
from ssdevice.bench.runner import fitting
from ssdevice.bundle.folder import Bundle
from ssdevice.bundle.manifest import App
from ssdevice.bundle.staging import check_writable
from ssdevice.commands.bench import add_measuring, bench_options, check_measuring, finish
from ssdevice.commands.opening import (
    add_engine,
    add_signature,
    engine_options,
    open_bundle,
    positive,
    refuse_ignored,
)
from ssdevice.commands.progress import Progress
from ssdevice.commands.sampling import HELP, flag
from ssdevice.data import read_examples
from ssdevice.errors import InputError
from ssdevice.peers import ours
from ssdevice.peers.arm import PEERS, SAMPLING, Arm, Setup, Skip
from ssdevice.peers.compare import as_json, as_markdown, compare, offers
from ssdevice.runtime.opened import tokenizer_of
from ssdevice.runtime.sampling.options import Sampling

GGUF = "model.gguf"
LOOKUP = (2, 10)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``ssdevice peers BUNDLE.. [--model MODEL] --data FILE``."""
    add = parser.add_argument
    add("bundles", type=Path, nargs="+", metavar="BUNDLE", help="bundle folders")
    add(
        "--model",
        type=Path,
        metavar="MODEL",
        help="their base, a Hugging Face folder: also measure other engines",
    )
    add("--app", metavar="NAME", help="app of the bundles (default: the default app)")
    add_signature(parser)
    add_measuring(parser)
    for name in SAMPLING:
        kind, text = HELP[name]
        add(flag(name), type=kind, metavar="N" if kind is int else "X", help=text)
    add_engine(parser)
    group = parser.add_argument_group(
        "other engines", "these need the extra 'peers'; what is missing is skipped"
    )
    add = group.add_argument
    add("--gguf", type=Path, metavar="FILE", help=f"weights for llama.cpp (default: MODEL/{GGUF})")
    add("--genai", type=Path, metavar="DIR", help="keeps the models built for onnxruntime-genai")
    add(
        "--lookup",
        type=positive,
        nargs="+",
        metavar="N",
        help="tokens of prompt lookup (default 2 and 10)",
    )
    add(
        "--draft-model",
        type=Path,
        metavar="BUNDLE",
        help="a smaller model that drafts for bundles without streams",
    )
    add(
        "--without",
        action="append",
        default=[],
        metavar="PEER",
        help="leave out a peer; repeatable",
    )
    add(
        "--python",
        action="append",
        default=[],
        metavar="PEER=FILE",
        help="interpreter of a peer; repeatable",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, and print Markdown on standard output.

    Prompts are those of the first bundle's app: its chat template and its instruction, for every
    engine alike. Raises InputError for bundles of other weights, ContextOverflowError for a prompt
    whose answer may not fit.
    """
    pythons = _check_options(args)
    examples = read_examples(args.data, args.limit, require_completion=False)
    options = bench_options(args)
    bundles = [open_bundle(args, folder) for folder in args.bundles]
    _check_weights(bundles, args.model)
    drafter = open_bundle(args, args.draft_model) if args.draft_model is not None else None
    first = bundles[0]
    if drafter is not None:
        found = drafter.manifest.model.vocab
        expected = first.manifest.model.vocab
        if found != expected:
            raise InputError(
                f"--draft-model {args.draft_model} has {found} tokens, the bundle {expected}"
            )
    tokenizer = tokenizer_of(first)
    context = min(bundle.geometry.context for bundle in bundles)
    instruction = first.app(args.app).instruction
    most = context - options.max_tokens
    _, prompts = fitting(examples, tokenizer, instruction, most, options.skip_long)
    model = args.model or first.folder
    setup = Setup(
        model=model,
        gguf=args.gguf or model / GGUF,
        genai=args.genai,
        threads=args.threads or os.cpu_count() or 1,
        context=context,
        stops=tokenizer.stop_ids,
        lookup=tuple(dict.fromkeys(args.lookup or LOOKUP)),
        sampling=_given_sampling(args) if args.temperature else {},
        pythons=pythons,
    )
    offered: list[Arm | Skip] = []
    notes = ["all engines are given the same ids"]
    for label, bundle in zip(_labels(args.bundles), bundles, strict=True):
        offered += ours.offers(bundle, args.app, engine_options(args), setup, label)
        if drafter is not None:
            offered += ours.drafted_offers(bundle, drafter, engine_options(args), setup, label)
        notes.append(_answers_note(label, bundle.app(args.app)))
    with Progress(args.quiet) as progress:
        if args.model is not None:
            offered += offers(setup, args.without, progress.report)
            notes.append("other engines run the base model only")
            if setup.gguf.is_file() and "llama.cpp" not in args.without:
                notes.append(
                    f"{setup.gguf} is taken to hold the weights of {setup.model}: "
                    "its tensors are not compared"
                )
        comparison = compare(offered, prompts, options, progress.report)
    left_out = len(examples) - len(prompts)
    report = as_json(comparison, setup, options, str(args.data), left_out, notes)
    finish(args, report, as_markdown(report))
    return 0


def _given_sampling(args: argparse.Namespace) -> dict[str, float]:
    """The values of SAMPLING that the user gave."""
    values = {name: getattr(args, name) for name in SAMPLING}
    return {name: value for name, value in values.items() if value is not None}


def _labels(folders: Sequence[Path]) -> list[str]:
    """What bundles are called in the table: by the names of their folders, if these differ."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    return [f"ssdevice {name}" for name in names]


def _check_options(args: argparse.Namespace) -> dict[str, str]:
    """The interpreters by peer.

    Raises InputError, before any work, for options that cannot be carried out.
    """
    check_measuring(args)
    given: dict[str, Any] = _given_sampling(args)
    Sampling(**given)
    if args.model is None:
        others = ("--gguf", "--genai", "--lookup", "--without", "--python")
        refuse_ignored(args, "other engines are measured with --model", *others)
    if args.genai is not None:
        check_writable(args.genai, "--genai")
    if not args.temperature:
        refuse_ignored(
            args, "without --temperature tokens are chosen greedily", *map(flag, SAMPLING[1:])
        )
    if args.draft_model is not None:
        refuse_ignored(
            args, "a model that drafts for another is measured greedily", "--temperature"
        )
    pythons = dict(_named_python(text) for text in args.python)
    for name in (*args.without, *pythons):
        if name not in PEERS:
            raise InputError(f"no peer {name[:60]!r}; there are {', '.join(PEERS)}")
    return pythons


def _named_python(text: str) -> tuple[str, str]:
    """The peer and its interpreter in ``PEER=FILE``; raises InputError."""
    name, _, python = text.partition("=")
    if not name or not python:
        raise InputError(f"--python {text}: expected PEER=FILE, such as genai=/usr/bin/python3")
    return name, python


def _check_weights(bundles: Sequence[Bundle], model: Path | None) -> None:
    """Raise InputError unless all bundles have one base, that in the folder ``model`` if given."""
    what = f"the base of {bundles[0].folder}"
    sha256 = bundles[0].manifest.model.sha256
    if model is not None:
        if not model.is_dir():
            raise InputError(
                f"--model {model}: no such folder; expected a Hugging Face model folder"
            )
        what = f"--model {model}"
        sha256 = weights_sha256(model)
    for bundle in bundles:
        bundle.check_base(what, sha256)


def _answers_note(label: str, app: App) -> str:
    """Whether the tokens of a bundle's app are those of the peers."""
    if app.answers_as_base:
        return f"{label}: app {app.name!r} gives the answers of the base model"
    return (
        f"{label}: app {app.name!r} has an adapter that changes the answers, "
        "so its tokens are not those of the peers"
    )
