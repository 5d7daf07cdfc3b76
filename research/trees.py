"""Which chooser of draft trees emits most tokens a step, at equal size: ours, Sequoia's or SpecInfer's.

    python -m research.trees BUNDLE --data rows.jsonl

The bundle has an app with streams. How good its drafts are is observed on the rows; the first half chooses the trees,
the second half is what they are counted on. Ours (``Tree.from_counts``) takes the most frequent paths of ranks, Sequoia
(2402.12374) the best tree if the rank of a right child depended on nothing above it, SpecInfer (2305.09781) the best of
the trees whose nodes of a depth all have the same number of children.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from research.methods import lines
from research.shapes import sequoia
from ssdevice.bench.tuning import observe
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.session import Session
from ssdevice.tree import AnswerRanks, Tree, count_paths, tokens_per_step


def rates(answers: Sequence[AnswerRanks], gamma: int, k: int, by_depth: bool) -> list[list[float]]:
    """``[γ, k]``: how often each rank was right at each depth, where the ranks above it were candidates.

    Without ``by_depth`` all depths are counted together, as Sequoia has one rate for each rank.
    """
    reached, right = Counter[int](), Counter[tuple[int, int]]()
    for path, times in count_paths(answers).items():
        for depth in range(min(len(path) + 1, gamma)):
            at = depth if by_depth else 0
            reached[at] += times
            if depth < len(path):
                right[at, path[depth]] += times
    rows = [
        [right[at, rank] / max(1, reached[at]) for rank in range(k)]
        for at in range(gamma if by_depth else 1)
    ]
    return rows if by_depth else rows * gamma


def expansions(size: int, gamma: int, k: int, wide: int = 1) -> Iterator[tuple[int, ...]]:
    """The numbers of children by depth, of all such trees of at most ``size`` nodes; ``wide``: nodes of a depth."""
    yield ()
    for children in range(1, k + 1) if gamma else ():
        left = size - wide * children
        if left > 0:
            for rest in expansions(left, gamma - 1, k, wide * children):
                yield (children, *rest)


def expanded(children: Sequence[int]) -> Tree:
    """The tree whose nodes at depth d all have ``children[d]`` children."""
    paths: list[tuple[int, ...]] = [()]
    level = paths
    for count in children:
        level = [(*path, rank) for path in level for rank in range(count)]
        paths = [*paths, *level]
    return Tree.of(paths)


def compared(answers: Sequence[AnswerRanks], gamma: int, k: int, size: int) -> list[float]:
    """β of each chooser's tree of ``size`` nodes on the second half of the answers, chosen on the first half."""
    first, second = answers[: len(answers) // 2], answers[len(answers) // 2 :]
    trees = (
        Tree.from_counts(count_paths(first), size),
        sequoia(rates(first, gamma, k, by_depth=False), size),
        sequoia(rates(first, gamma, k, by_depth=True), size),
        max(
            map(expanded, expansions(size, gamma, k)), key=lambda tree: tokens_per_step(first, tree)
        ),
        Tree.chain(min(gamma, size - 1)),
    )
    return [tokens_per_step(second, tree) for tree in trees]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--data", type=Path, required=True, help='JSON Lines with "prompt"')
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--sizes", default="3,5,8,16,32")
    args = parser.parse_args()
    with Session.open(args.bundle, options=EngineOptions(threads=1)) as session:
        tokenizer, geometry = session.tokenizer, session.engine.geometry
        prompts = [
            session.prompt_ids(line["prompt"]) for line in islice(lines(args.data), args.limit)
        ]
        answers = observe(
            session.engine, prompts, tokenizer.stop_ids, args.max_tokens, lambda *_: None
        )
    print(
        "| nodes | ours | Sequoia | Sequoia, rates by depth | SpecInfer | chain |\n"
        + "|---" * 6
        + "|"
    )
    for size in map(int, args.sizes.split(",")):
        print(
            f"| {size} |",
            *(f"{each:.3f} |" for each in compared(answers, geometry.gamma, geometry.k, size)),
        )


if __name__ == "__main__":
    main()
