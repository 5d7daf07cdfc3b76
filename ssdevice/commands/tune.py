"""``ssdevice tune``: find the draft tree and schedule for a device, by its measured costs."""

import argparse
import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

from ssdevice import targets
from ssdevice.adapters.settings import read_settings
from ssdevice.bench.runner import fitting
from ssdevice.bench.tuning import Choice, CostTable, check_same, choices, measure_costs, observe
from ssdevice.bundle.folder import Bundle
from ssdevice.bundle.staging import write_text
from ssdevice.commands import opening
from ssdevice.commands.opening import DEFAULT_QUANT, QUANTS
from ssdevice.commands.progress import Progress
from ssdevice.commands.shown import show
from ssdevice.config import Schedule, to_json
from ssdevice.data import Example, read_examples
from ssdevice.errors import InputError, needs_extra
from ssdevice.export.plan import ExportOptions, Quant, make_plan
from ssdevice.export.target import exporter
from ssdevice.progress import Report
from ssdevice.runtime.session import Session
from ssdevice.tree import Tree

WIDEST = 16
WIDTH = 4
"""Candidates per stream in trial bundles: a tree of up to 16 nodes rarely uses more."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("bundle", type=Path, nargs="?", metavar="BUNDLE", help="bundle folder")
    add("--app", metavar="NAME", help="app of the bundle (default: its default app)")
    opening.add_signature(parser)
    trial = parser.add_argument_group("without a bundle: trial exports are made, timed and deleted")
    trial.add_argument("--model", metavar="DIR", help="Hugging Face folder or hub id of the base")
    trial.add_argument(
        "--adapter", metavar="[NAME=]DIR", help="the app's name and its adapter folder"
    )
    trial.add_argument("--target", choices=targets.names(), help=f"(default {targets.DEFAULT})")
    trial.add_argument(
        "--quant", choices=QUANTS, help=f"how weights are stored (default {DEFAULT_QUANT})"
    )
    trial.add_argument(
        "--sizes",
        type=_sizes,
        metavar="N,N,..",
        help="nodes of the trees to export and time, which are those to choose from (default: 3, "
        "γ + 1, 8, 16)",
    )
    add("--data", type=Path, required=True, metavar="FILE", help="prompts: use training rows")
    add(
        "--limit",
        type=opening.positive,
        default=50,
        metavar="N",
        help="the first N prompts (default 50)",
    )
    add(
        "--max-tokens",
        type=opening.positive,
        default=64,
        metavar="N",
        help="per answer (default 64)",
    )
    add(
        "--cost-of",
        type=Path,
        action="append",
        default=[],
        metavar="BUNDLE",
        help="also time the steps of this bundle: the same model with another tree or schedule; "
        "may be repeated",
    )
    add(
        "--cost-table",
        type=Path,
        metavar="FILE",
        help="choose with the costs that another device wrote; time nothing",
    )
    add(
        "--write-cost-table",
        type=Path,
        metavar="FILE",
        help="write the measured costs, for --cost-table elsewhere",
    )
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the fastest tree, for: ssdevice export --tree FILE",
    )
    add("--json", action="store_true", help="print one JSON object")
    opening.add_engine(parser)


def run(args: argparse.Namespace) -> int:
    """Print the best tree of each size with its schedule, the fastest first."""
    _check_options(args)
    table = CostTable.read(args.cost_table) if args.cost_table is not None else None
    examples = read_examples(args.data, args.limit, require_completion=False)
    options = opening.engine_options(args)
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(args.quiet))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ssdevice-tune-")))
        bundles = _bundles(args, table, examples, folder, progress.report)
        # Other bundles run their default app: only the cost of their steps is measured.
        sessions = [
            stack.enter_context(
                Session.open(bundle, app=None if number else args.app, options=options)
            )
            for number, bundle in enumerate(bundles)
        ]
        first = sessions[0]
        context = bundles[0].geometry.context
        _, prompts = fitting(examples, first.tokenizer, first.instruction, context, file=args.data)
        ranks = observe(
            first.engine, prompts, first.tokenizer.stop_ids, args.max_tokens, progress.report
        )
        if table is None:
            table = measure_costs(sessions, prompts, args.max_tokens, options, progress.report)
    if args.write_cost_table is not None:
        table.write(args.write_cost_table)
    found = choices(ranks, table.steps)
    if args.out is not None:
        write_text(args.out, json.dumps(found[0].tree.to_json()) + "\n")
    show(_found(found, table, narrow=bundles[0].geometry.k == 1), args.json)
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Raise InputError for options that exclude each other or cannot be carried out, before any
    work.
    """
    opening.check_new_file(args.out, "--out")
    opening.check_new_file(args.write_cost_table, "--write-cost-table")
    if args.cost_table is not None:
        opening.refuse_ignored(
            args, "--cost-table times nothing", "--cost-of", "--write-cost-table", "--sizes"
        )
    if (args.bundle is None) == (args.model is None):
        raise InputError("give a BUNDLE, or --model DIR with --adapter NAME=DIR")
    if args.bundle is not None:
        opening.refuse_ignored(
            args, "a BUNDLE is tuned as it is", "--adapter", "--sizes", "--target", "--quant"
        )
        return
    opening.refuse_ignored(args, "trial bundles have only the app of --adapter", "--app")
    if not args.cost_of:
        opening.refuse_ignored(args, "no signed bundle is opened", "--require-signature")


def _bundles(
    args: argparse.Namespace,
    table: CostTable | None,
    examples: Sequence[Example],
    folder: Path,
    report: Report,
) -> list[Bundle]:
    """The bundles to time; the first is the one whose drafts are observed.

    ``folder``: for trials. Raises InputError for a bundle without streams, or one whose steps cost
    something else than the first one's would.
    """
    others = [opening.open_bundle(args, other) for other in args.cost_of]
    if args.bundle is not None:
        own = [opening.open_bundle(args)]
    else:
        own = _trials(args, table, examples, folder, report)
    first = own[0].manifest
    for bundle in [*own, *others]:
        found = bundle.manifest
        if found.mode is None:
            raise InputError(f"{bundle.folder} has no streams, so there is no tree to choose")
        facts = [
            (name, getattr(found, name), getattr(first, name)) for name in ("target", "precision")
        ]
        layers = ("number of MSA layers", found.msa_layers, first.msa_layers)
        base = ("base model", found.model.sha256, first.model.sha256)
        check_same(f"--cost-of {bundle.folder}", "the first bundle", base, *facts, layers)
    if table is not None:
        table.check(
            str(args.cost_table), first.model.sha256, first.geometry.gamma, first.msa_layers
        )
    return [*own, *others]


def _trials(
    args: argparse.Namespace,
    table: CostTable | None,
    examples: Sequence[Example],
    folder: Path,
    report: Report,
) -> list[Bundle]:
    """Exports of a tree of each size in each schedule that the streams allow, the widest first;
    only that one with a cost table.

    Raises InputError, before the first export, if the table or an example does not fit them.
    """
    with needs_extra("export"):
        from ssdevice.export.stages import export_plan
    if args.adapter is None:
        raise InputError(
            "--model needs --adapter NAME=DIR: without streams there is no tree to choose"
        )
    opening.prepare_frameworks(args.threads)
    app = opening.named_folder(args.adapter, "--adapter")
    streams = read_settings(app[1]).streams
    gamma = streams.gamma
    sizes = sorted(args.sizes or {3, gamma + 1, 8, WIDEST}, reverse=True)
    schedules = [Schedule.DEFERRED]
    if table is not None:
        sizes = [WIDEST]
    elif not streams.waits:
        schedules.append(Schedule.FUSED)
    trees: dict[int, Tree] = {}
    for size in sizes:
        tree = _tree(gamma, size)
        trees[tree.size] = tree
    plans = []
    for schedule, tree in product(schedules, trees.values()):
        options = ExportOptions(
            model=args.model,
            target=args.target or targets.DEFAULT,
            quant=Quant(args.quant or DEFAULT_QUANT),
            out=folder / f"{schedule}-{tree.size}",
            adapters=(app,),
            tree=tree,
            schedule=schedule,
        )
        target = exporter(options)
        plans.append((make_plan(options, target), target))
    plan = plans[0][0]
    if table is not None:
        table.check(
            str(args.cost_table), plan.identity.sha256, plan.geometry.gamma, plan.apps[0].msa_layers
        )
    fitting(
        examples, plan.tokenizer, plan.apps[0].instruction, plan.geometry.context, file=args.data
    )
    return [export_plan(plan, target, report) for plan, target in plans]


def _tree(gamma: int, size: int) -> Tree:
    """A tree of ``size`` nodes, or all there are: the best candidate of each stream, then more from
    the first on.
    """
    depths = range(1, gamma + 1)
    best = ((0,) * depth for depth in depths)
    others = (path for depth in depths for path in product(range(WIDTH), repeat=depth) if any(path))
    return Tree.of(islice(chain(best, others), size - 1))


def _sizes(text: str) -> list[int]:
    sizes = [opening.positive(part) for part in text.split(",")]
    if min(sizes) < 2 or max(sizes) > WIDEST:
        raise argparse.ArgumentTypeError(f"{text}, expected sizes of 2..{WIDEST}")
    return sorted(set(sizes))


def _found(choices: list[Choice], table: CostTable, narrow: bool) -> dict[str, Any]:
    """What to print: measured costs, and the trees with what is predicted from these and the
    observed drafts.
    """
    plain = 1e3 / table.plain_ms if table.plain_ms is not None else None
    lost = plain is not None and choices[0].tokens_per_second <= plain
    notes = ["no tree is faster than plain decoding on these prompts"] if lost else []
    if narrow:
        notes += [
            "this bundle drafts one candidate per stream; export with --tree full:k=3,depth=2 for "
            "wider trees"
        ]
    return {
        "costs": to_json(table),
        "plain_tokens_per_second": plain,
        "choices": [
            {
                "nodes": choice.tree.size,
                "schedule": choice.cost.schedule.value,
                "tokens_per_step": choice.tokens_per_step,
                "ms_per_step": choice.cost.ms,
                "predicted_tokens_per_second": choice.tokens_per_second,
                "over_plain": choice.tokens_per_second / plain if plain is not None else None,
                "tree": choice.tree.to_json(),
            }
            for choice in choices
        ],
        "notes": notes,
    }
