"""EAGLE-2's dynamic tree (2406.16858) beside static trees of as many nodes, on the EAGLE that ``rivals.py`` trained.

    python -m research.dynamic OUT --breadth 8 --sizes 4,8,16,32

At each step the tree follows the drafter's confidence: of every level the ``breadth`` drafts with the highest product
of probabilities along their paths are drafted after, each with as many candidates, and the best of all candidates are
verified, whatever their level. OUT is that of a run of ``rivals.py``: half of the dev answers choose the static trees
(``Tree.from_counts``, as ``tune`` chooses), the other half is what all are counted on. No engine: a static step would
need the tree's shape and mask as inputs.
"""

from __future__ import annotations

import argparse
import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch

from research import rivals
from research.trained import Base, Drafter, Eagle
from ssdevice.bench import report
from ssdevice.commands.opening import prepare_frameworks
from ssdevice.model import loading
from ssdevice.model.attention import KeyValue
from ssdevice.model.tokenizer import open_tokenizer
from ssdevice.text.tokenizer import Sample
from ssdevice.train.batches import collate
from ssdevice.train.loss import completion_rows
from ssdevice.train.optimization import Run
from ssdevice.tree import MISS, AnswerRanks, Tree, count_paths, tokens_per_step


@torch.no_grad()
def places(drafter: Eagle, sample: Sample, breadth: int) -> AnswerRanks:
    """For each completion token: the places of the right drafts after it among all candidates, by confidence.

    They are those of the tokens 1, 2, .. places later; MISS for what is no candidate. A tree of m drafts has those
    with places below m, for a candidate is never before its parent.
    """
    base, gamma = drafter.base, drafter.base.gamma
    batch = collate([sample], 0)
    main, nodes = base.main(batch.tokens), completion_rows(batch.prompts, batch.lengths)[0]
    count, width = len(nodes), batch.tokens.shape[1]
    made, row = drafter.next_states(batch.tokens, main.states)
    seen: KeyValue = (
        row[0].expand(count * breadth, -1, -1, -1),
        row[1].expand(count * breadth, -1, -1, -1),
    )
    at, runs = nodes.repeat_interleave(breadth)[:, None], [seen]
    right = [batch.tokens[0][(nodes + 2 + j).clamp(max=width - 1)] for j in range(gamma)]

    scores, tokens = torch.log_softmax(base.logits(made[0, nodes]), -1).topk(breadth, sorted=True)
    states = made[0, nodes].repeat_interleave(breadth, 0)
    every, hits = [scores], [tokens == right[0][:, None]]  # by level, [count, candidates]
    on_path = hits[
        0
    ]  # which of the drafts that are drafted after are the right ones, [count, breadth]
    for j in range(1, gamma):
        embedded = base.backbone.embed(tokens.reshape(-1, 1), at + j)
        start = drafter.fc(torch.cat([embedded, states[:, None]], -1))
        state, new = base.layer(drafter.layer, start, at + j, drafter._masks(at, j, width), runs)
        after, following = torch.log_softmax(base.logits(state[:, 0]), -1).topk(
            breadth, sorted=True
        )
        joint = (scores.reshape(-1, 1) + after).view(count, -1)
        hit = (
            on_path.reshape(-1, 1) & (following == right[j].repeat_interleave(breadth)[:, None])
        ).view(count, -1)
        every.append(joint)
        hits.append(hit)
        scores, best = joint.sort(dim=-1, descending=True, stable=True)
        scores, best = scores[:, :breadth], best[:, :breadth]
        tokens, on_path = following.view(count, -1).gather(1, best), hit.gather(1, best)
        parent = (torch.arange(count)[:, None] * breadth + best // breadth).flatten()
        states = state[parent, 0]
        runs = [seen, *((keys[parent], values[parent]) for keys, values in [*runs[1:], new])]
    order = torch.cat(every, 1).sort(dim=-1, descending=True, stable=True)[1].argsort(-1)
    found = [
        torch.where(hit, place, MISS).min(-1)[0]
        for hit, place in zip(hits, _levels(order, every), strict=True)
    ]
    inside = [nodes + 2 + j < batch.lengths for j in range(gamma)]
    each = [torch.where(keep, place, MISS) for keep, place in zip(inside, found, strict=True)]
    return torch.stack(each, 1).tolist()  # type: ignore[no-any-return]


def _levels(order: torch.Tensor, every: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return order.split([level.shape[1] for level in every], 1)


def dynamic(answers: Sequence[AnswerRanks], size: int, gamma: int) -> float:
    """β of dynamic trees of ``size`` drafts."""
    kept = [
        [[0 if place < size else MISS for place in row] for row in answer] for answer in answers
    ]
    return tokens_per_step(kept, Tree.chain(gamma))


def restored(out: Path, name: str) -> tuple[Drafter, Namespace]:
    """A drafter of a run of ``rivals.py`` and the run's options. Raises SystemExit if it is not trained to the end."""
    args = Namespace(**json.loads((out / "options.json").read_text()), out=out)
    prepare_frameworks(args.threads)
    base = Base(
        loading.build(loading.load_hf(Path(args.base)), None, args.max_length).backbone, args.gamma
    )
    run = Run(rivals.new(name, base, args.seed), args, args.steps)
    run.resume(rivals.folder(args, name))
    if run.step != args.steps or args.draft_vocabulary:
        raise SystemExit(
            f"{out}: {name} is at step {run.step} of {args.steps}; its drafts must be of all tokens"
        )
    return run.loss, args


def opened(out: Path, prompts: int) -> tuple[Eagle, list[Sample]]:
    """The EAGLE of a run of ``rivals.py``, and the base's answers to its first dev prompts."""
    drafter, args = restored(out, "EAGLE")
    assert isinstance(drafter, Eagle)
    args.dev_limit = prompts
    return drafter, rivals.answers(drafter.base, args, open_tokenizer(Path(args.base)))


def main(words: Sequence[str] | None = None) -> None:
    """Print β by the number of drafts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--dev-limit", type=int, default=200)
    parser.add_argument("--breadth", type=int, default=8)
    parser.add_argument("--sizes", default="4,8,16,32")
    args = parser.parse_args(words)
    drafter, samples = opened(args.out, args.dev_limit)
    ranks, half = rivals.counted(drafter.base, [drafter], samples)[0][0], len(samples) // 2
    found, gamma = (
        [places(drafter, sample, args.breadth) for sample in samples[half:]],
        drafter.base.gamma,
    )
    rows = []
    for size in map(int, args.sizes.split(",")):
        static = Tree.from_counts(
            count_paths(ranks[:half]), size + 1
        )  # with the row of the token that was chosen
        rows.append(
            [
                str(size),
                f"{dynamic(found, size, gamma):.2f}",
                f"{tokens_per_step(ranks[half:], static):.2f}",
            ]
        )
    chain = tokens_per_step(ranks[half:], Tree.chain(gamma))
    print("\n".join(report.table(["drafts", "dynamic", "static"], *rows)).strip())
    print(f"chain:{gamma}: {chain:.2f}")


if __name__ == "__main__":
    main()
