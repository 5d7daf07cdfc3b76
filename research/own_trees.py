"""Each trained drafter with trees of its own: β by the number of drafts, and tokens/s from measured parts.

    python -m research.own_trees OUT --bundles BUNDLES

OUT is that of a run of ``rivals.py``. For each method half of its dev answers choose static trees (``Tree.from_counts``,
as ``tune``), the other half is what they are counted on; beside them EAGLE-2's dynamic trees (``dynamic.py``). Where a
guess reads the drafts before it, as EAGLE's does, the ranks are those along the right drafts, which are all that count:
such a drafter guesses after each draft of its tree that has children.

With ``--bundles``, a folder, tokens/s are composed as in ``composed.py``, of a step of as many rows without streams,
INT4, and of the products of a draft: of each level as many rows as are drafted after. A dynamic tree's step is a static
one's here, though it would have to take its tree and mask as inputs. Our streams run whole in the engine, with the same
trees. Bundles that are not there are exported first.
"""

from __future__ import annotations

import argparse
import json
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from research import bundles, dynamic, rivals
from research.composed import DRAFTS, Draft, Sizes, draft_ms
from research.methods import lines
from research.rows import timed
from research.shapes import bushy
from ssdevice.bench import report
from ssdevice.tree import AnswerRanks, Tree, count_paths, tokens_per_step

DYNAMIC = "EAGLE-2, dynamic"
STREAMS, LAYERS = rivals.OURS


def draft_layers(s: Sizes) -> Draft:
    """Ours: states of three layers and a layer for verified rows, then the layer on each draft."""
    first = [(s.verified, 3 * s.width, s.width), *s.layer(s.verified)]
    later = [size for rows in s.levels for size in ((rows, s.width, s.width), *s.layer(rows))]
    return [*first, *later], s.heads()


def levels(tree: Tree) -> list[int]:
    """By level, how many nodes have children."""
    parents = set(tree.parents[1:])
    by_depth = Counter(tree.depths[node] for node in parents)
    return [by_depth[depth] for depth in range(tree.depth)]


def chosen(ranks: Sequence[AnswerRanks], sizes: Sequence[int]) -> list[Tree]:
    """The chain, and the best trees of so many drafts on these answers."""
    counts = count_paths(ranks)
    return [Tree.chain(len(ranks[0][0])), *(Tree.from_counts(counts, size + 1) for size in sizes)]


def step_bundles(
    args: Namespace, base: str, trees: Sequence[Tree], own: Sequence[Tree]
) -> list[Path]:
    """Bundles of the base without streams with trees of these sizes, and of our streams with their ``own`` trees."""
    found = []
    for tree in trees:
        found.append(args.bundles / f"rows-{tree.size}")
        if not found[-1].is_dir():
            bundles.export(base, None, "int4", args.context, bushy(tree.size), found[-1])
    for tree in own:
        found.append(args.bundles / f"streams-{tree.size}-{'chain' if tree.is_chain else 'own'}")
        if not found[-1].is_dir():
            adapter = f"sql={rivals.folder(args, STREAMS)}"
            bundles.export_streams(
                base, adapter, "int4", args.context, json.dumps(tree.to_json()), found[-1]
            )
    return found


def speeds(
    args: Namespace, base: str, trees: dict[str, list[Tree]], betas: dict[str, list[float]]
) -> tuple[list[list[float]], dict[str, list[float]], dict[str, list[float]]]:
    """The plain call and the step by number of drafts; a draft's milliseconds, and tokens/s, by method and tree."""
    sizes, gamma = [tree.size for tree in next(iter(trees.values()))], trees[STREAMS][0].depth
    calls = timed(
        step_bundles(args, base, trees[STREAMS], trees[STREAMS]), args.length, args.rounds
    )
    plain, ours = calls[: len(sizes)], calls[len(sizes) :]
    config = json.loads((Path(base) / "config.json").read_text())
    made: dict[str, list[Draft]] = {}
    for name in (name for name in betas if name != STREAMS):
        for at, tree in enumerate(trees.get(name, trees["EAGLE"])):
            shape = Sizes(config, args.length, gamma)
            wide = name == DYNAMIC and at  # beside its trees EAGLE's chain
            shape.drafted = [1, *[args.breadth] * (gamma - 1)] if wide else levels(tree)
            draft = DRAFTS["EAGLE"] if name == DYNAMIC else {**DRAFTS, LAYERS: draft_layers}[name]
            made.setdefault(name, []).append(draft(shape))
    every = [draft for drafts in made.values() for draft in drafts]
    apart = [draft for at, draft in enumerate(every) if draft not in every[:at]]
    spent = draft_ms(apart, True, args.rounds)
    ms = {name: [spent[apart.index(draft)] for draft in drafts] for name, drafts in made.items()}
    ms |= {STREAMS: [own[1] - base_step[1] for own, base_step in zip(ours, plain, strict=True)]}
    rate = {
        name: [
            1e3 * beta / (step[1] + own)
            for beta, step, own in zip(beta_of, plain, ms[name], strict=True)
        ]
        for name, beta_of in betas.items()
    }
    return plain, ms, rate


def main(words: Sequence[str] | None = None) -> None:
    """Print β by tree, and with ``--bundles`` milliseconds and tokens/s."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--sizes", default="4,8,16,32", help="drafts")
    parser.add_argument("--bundles", type=Path)
    for name, default in {"breadth": 8, "length": 128, "context": 512, "rounds": 100}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args(words)
    sizes = [int(size) for size in args.sizes.split(",")]
    methods = [each["method"] for each in lines(args.out / "results.jsonl")]
    ranks = {
        name: json.loads((rivals.folder(args, name) / rivals.RANKS).read_text()) for name in methods
    }
    half = len(next(iter(ranks.values()))) // 2
    trees = {name: chosen(each[:half], sizes) for name, each in ranks.items()}
    betas = {
        name: [tokens_per_step(each[half:], tree) for tree in trees[name]]
        for name, each in ranks.items()
    }
    options = json.loads((args.out / "options.json").read_text())
    gamma = options["gamma"]
    if "EAGLE" in ranks and not options["draft_vocabulary"]:
        drafter, samples = dynamic.opened(args.out, options["dev_limit"])
        found = [dynamic.places(drafter, sample, args.breadth) for sample in samples[half:]]
        betas[DYNAMIC] = [
            betas["EAGLE"][0],
            *(dynamic.dynamic(found, size, gamma) for size in sizes),
        ]
    head = ["method", f"chain:{gamma}", *map(str, sizes)]
    print(
        "\n".join(
            report.table(
                head, *([name, *(f"{b:.2f}" for b in each)] for name, each in betas.items())
            )
        ).strip()
    )
    if args.bundles is None:
        return
    plain, ms, rate = speeds(args, options["base"], trees, betas)
    print(
        f"\na plain call {min(call for call, _ in plain):.2f} ms; steps",
        *(f"{step:.2f}" for _, step in plain),
        "ms",
    )
    rows = [
        [name, *(f"{a:.2f}: {b:,.0f}" for a, b in zip(ms[name], rate[name], strict=True))]
        for name in betas
    ]
    print(
        "\n".join(
            report.table([head[0], *(f"{each}, draft ms: tokens/s" for each in head[1:])], *rows)
        ).strip()
    )


if __name__ == "__main__":
    main()
