"""``ssdevice tune``: the draft tree for this device."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ssdevice.commands.opening import add_bundle, add_engine, check_new_file, engine_options, open_bundle, positive
from ssdevice.data import read_examples
from ssdevice.errors import InputError

if TYPE_CHECKING:
    from ssdevice.bench.tuning import Choice, Cost

SIZES = range(2, 17)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``ssdevice tune BUNDLE --data FILE``."""
    add_bundle(parser)
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="prompts: use training rows")
    parser.add_argument("--limit", type=positive, default=50, metavar="N", help="the first N prompts (default 50)")
    parser.add_argument("--max-tokens", type=positive, default=64, metavar="N", help="per answer (default 64)")
    parser.add_argument(
        "--cost-of", type=Path, action="append", default=[], metavar="BUNDLE",
        help="time the steps of this bundle too: the same model with another tree or schedule; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the fastest tree, for: ssdevice export --tree FILE"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine(parser)


def run(args: argparse.Namespace) -> int:
    """Print the best tree of each size, the fastest first."""
    from ssdevice.bench.tuning import choices, measure_costs, observe
    from ssdevice.bundle import Bundle
    from ssdevice.commands.progress import Progress
    from ssdevice.contract import STEP
    from ssdevice.runtime.engines import open_engine
    from ssdevice.runtime.session import Session

    check_new_file(args.out, "--out")
    options = engine_options(args)
    others = [Bundle.open(folder) for folder in args.cost_of]
    with Session.open(open_bundle(args), app=args.app, options=options) as session, Progress(args.quiet) as progress:
        geometry = session.engine.geometry
        for bundle in (session.bundle, *others):
            assert bundle is not None
            if STEP not in bundle.functions:
                raise InputError(f"{bundle.folder} has no streams, so there is no tree to choose")
        examples = read_examples(args.data, args.limit, require_completion=False)
        prompts = [session.prompt_ids(example.prompt, system=example.system) for example in examples]
        ranks = observe(session.engine, prompts, session.tokenizer.stop_ids, args.max_tokens, progress.report)
        engines = [session.engine, *[open_engine(bundle, None, options) for bundle in others]]
        costs = measure_costs(engines, progress.report)
    found = choices(ranks, SIZES, costs)
    if args.out is not None:
        args.out.write_text(json.dumps(found[0].tree.to_json()) + "\n", "utf-8")
    if args.json:
        print(json.dumps(_as_json(found, costs)))
        return 0
    sizes = ((f"{cost.size} nodes" if cost.size > 1 else "plain", cost.milliseconds) for cost in costs)
    print("measured steps: " + ", ".join(f"{name} {milliseconds:.2f} ms" for name, milliseconds in sizes))
    print(f"{'nodes':>5} {'tokens/step':>12} {'ms/step':>8} {'tokens/s':>9}  tree")
    for choice in found:
        print(
            f"{choice.tree.size:>5} {choice.tokens_per_step:>12.2f} {choice.milliseconds:>8.2f} "
            f"{choice.tokens_per_second:>9.1f}  {json.dumps(choice.tree.to_json(), separators=(',', ':'))}"
        )
    if geometry.k == 1:
        print("this bundle drafts one candidate a stream; export one with --tree full:k=3,depth=2 to see wider trees")
    return 0


def _as_json(found: list[Choice], costs: list[Cost]) -> dict[str, object]:
    return {
        "costs": [{"nodes": cost.size, "ms": cost.milliseconds} for cost in costs],
        "choices": [
            {
                "tree": choice.tree.to_json(),
                "nodes": choice.tree.size,
                "tokens_per_step": choice.tokens_per_step,
                "ms_per_step": choice.milliseconds,
                "tokens_per_second": choice.tokens_per_second,
            }
            for choice in found
        ],
    }
