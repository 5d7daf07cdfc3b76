"""Streams that are trained to see the p best positions of their main row only, beside streams that see all of them.

    python -m research.top_trained --base models/base-7m --data train.jsonl.gz --dev dev.jsonl.gz --out OUT --best 8,64

``ssdevice train --mode lossless`` with the mask of ``top_attention.py`` and without it, on the same batches with the
same seed. Each arm is then counted with and without the mask, along the base's own answers, as ``rivals.py`` counts. A
run that was stopped goes on. On the CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from research import rivals
from research.answers import mean_losses
from research.top_attention import limited
from ssdevice.bench import report
from ssdevice.commands.opening import prepare_frameworks
from ssdevice.model import loading
from ssdevice.model.tokenizer import open_tokenizer
from ssdevice.text.tokenizer import Sample
from ssdevice.train.evaluation import stream_ranks
from ssdevice.tree import Tree, tokens_per_step

ALL = "all"


def name_of(p: int | None) -> str:
    """Of an arm, and of its folder."""
    return ALL if p is None else f"p = {p}"


@torch.no_grad()
def row(
    args: argparse.Namespace, trained: int | None, seen: int | None, samples: Sequence[Sample]
) -> list[str]:
    """What streams that were trained with ``trained`` positions draft when they see ``seen``."""
    model = loading.load(
        Path(args.base), rivals.folder(args, name_of(trained)), args.max_length
    ).model.eval()
    with limited(seen):
        ranks, nats = stream_ranks(model, samples), mean_losses(model, samples)[1:]
    beta = [tokens_per_step(ranks, Tree.chain(depth)) for depth in range(1, model.gamma + 1)]
    numbers = ", ".join(f"{each:.2f}" for each in beta), ", ".join(f"{each:.2f}" for each in nats)
    return [name_of(trained), name_of(seen), *numbers]


def main(words: Sequence[str] | None = None) -> None:
    """Train the arms that are not there yet, and print a row for each arm and what it sees."""
    options = rivals.parser(__doc__)
    options.add_argument("--best", default="8,64", help="p")
    args = options.parse_args(words)
    rivals.begin(args, "best")
    prepare_frameworks(args.threads)
    best = [None, *map(int, args.best.split(","))]
    for p in best:
        with limited(p):
            rivals.train_ours(name_of(p), args, rivals.OURS["streams"])
    tokenizer = open_tokenizer(Path(args.base))
    backbone = loading.build(loading.load_hf(Path(args.base)), None, args.max_length).backbone
    dev = rivals.answers(rivals.Base(backbone, args.gamma), args, tokenizer)
    print(
        f"context at each step: {sum(len(s.ids) + s.prompt for s in dev) / 2 / len(dev):.0f} tokens on average"
    )
    seen = [(None, each) for each in best] + [(p, each) for p in best[1:] for each in (p, None)]
    head = [
        "trained with",
        "seen",
        f"β, chain:1 to {args.gamma}",
        f"loss of streams 1 to {args.gamma}, nats",
    ]
    print("\n".join(report.table(head, *(row(args, p, each, dev) for p, each in seen))).strip())


if __name__ == "__main__":
    main()
