"""The papers' pruning of draft trees by early exit, beside trees that are as small from the start.

    python -m research.pruning --model MODEL --adapter ADAPTER --data train.jsonl.gz --dev dev.jsonl.gz

Trains o, a term of low rank, on states of layer N - N_s along the model's own answers, so that the shared head
reads the next token from M + o(M). A step then verifies the m nodes of its tree that are likeliest by it. β is counted
along answers to other prompts, beside the whole tree, the m nodes that the streams themselves find likeliest, which
costs no rows, and the tree of m nodes that ``ssdevice tune`` would choose. ``rows.py`` measures what rows cost.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from research.answers import answered
from ssdevice.bench import report
from ssdevice.commands.opening import prepare_frameworks
from ssdevice.data import read_examples
from ssdevice.export.parity.reference import int32
from ssdevice.model import loading
from ssdevice.model.attention import KeyValue
from ssdevice.model.step import StreamModel, TreeModule
from ssdevice.model.streams import LowRank
from ssdevice.model.tokenizer import open_tokenizer
from ssdevice.model.visibility import causal
from ssdevice.text.tokenizer import Sample
from ssdevice.train.batches import collate
from ssdevice.train.loss import LossWeights, StreamingLoss, completion_rows
from ssdevice.tree import MISS, Tree, count_paths, tokens_per_step

PAIRS = ("full:k=3,depth=2:5", "13:5", "full:k=2,depth=4:8", "32:8", "full:k=3,depth=4:32")
"""Trees, as ``Tree.parse`` reads them or by the size of a counted one, each with the nodes that pruning leaves (m)."""
TRAINED = {"rows": 256, "lr": 2e-3}
"""Of o: rows of a step, and the learning rate at first, which falls to 0."""


def kept(chances: Sequence[float], parents: Sequence[int], m: int) -> list[int]:
    """The m nodes with the largest products of ``chances`` along their paths, ascending; ties to the lowest node.

    ``chances [T]``: of each node's token after its parent's; the root's is not read. Products never rise along a path
    and a parent comes before its children, so the ancestors of a kept node are kept.
    """
    product = [1.0] * len(parents)
    for node in range(1, len(parents)):
        product[node] = product[parents[node]] * chances[node]
    return sorted(sorted(range(len(parents)), key=lambda node: (-product[node], node))[:m])


@dataclass(frozen=True)
class Answer:
    """An answer of the model to a prompt, and what streams drafted along it.

    For each of its n tokens, the streams of the row that chose it: ``candidates [n, γ, k]``, with their ``chances``
    among all drafts, and the ``ranks`` among them of the γ tokens that follow. ``states [n, D]``: those rows at layer
    N - N_s. ``past``: rows of the layers below, for each position.
    """

    sample: Sample
    candidates: Tensor
    chances: Tensor
    ranks: list[list[int]]
    states: Tensor
    past: list[KeyValue]


Chooser = Callable[[Answer, int], Sequence[int]]
"""The nodes that a step after token i of an answer verifies."""


@torch.no_grad()
def read(model: StreamModel, sample: Sample, k: int) -> Answer:
    """Run a whole answer at once. Streams must not see tokens or drafts (g, ``follow``)."""
    backbone, probe = model.backbone, StreamingLoss(model, LossWeights(0.0, 1.0))
    data = collate([sample], 0)
    positions = torch.arange(data.tokens.shape[1], dtype=torch.int32)
    masks = backbone.masks(lambda window: causal(positions, window)[None, None])
    h, states, past = model.run_main_layers(
        backbone.embed(data.tokens, positions[None]), positions[None], masks, []
    )
    _, rows = model.run_top_layers(h, states, positions[None], masks, [])
    nodes = completion_rows(data.prompts, data.lengths)
    logits = model.draft_logits(model.finish(probe.run_streams(states, nodes, data.tokens, rows)))[
        0
    ].float()
    best = torch.softmax(logits, -1).topk(k, -1)
    candidates = model.draft_tokens(best.indices).reshape(-1, model.gamma, k)
    answer = sample.ids[sample.prompt :]
    ranks = [
        [
            row.index(token) if token in row else MISS
            for row, token in zip(drafts, answer[at + 1 :], strict=False)
        ]
        for at, drafts in enumerate(candidates.tolist())
    ]
    ranks = [row + [MISS] * (model.gamma - len(row)) for row in ranks]
    return Answer(
        sample, candidates, best.values.reshape(candidates.shape), ranks, states[0, nodes[0]], past
    )


class Exit(nn.Module):
    """Chances of the next token from states of layer N - N_s, among those that streams choose from.

    ``rank``: 0 for the states as they are. ``alone``: UVM in place of M + UVM, as the papers' equation reads.
    """

    def __init__(self, model: StreamModel, rank: int, alone: bool = False) -> None:
        super().__init__()
        width = int(model.backbone.config.hidden_size)
        self.term, self.alone = LowRank(width, width, rank) if rank else None, alone
        if alone and self.term is not None:  # a norm of zeros has no direction
            nn.init.orthogonal_(self.term.down.weight)
            self.term.up.weight.data.copy_(self.term.down.weight.T)
        self.logits = lambda h: model.draft_logits(model.backbone.finish(h)).float()
        self.place = StreamingLoss(model, LossWeights(0.0, 1.0)).place

    def forward(self, states: Tensor) -> Tensor:
        """Logits ``[.., n]`` of ``states [.., D]``."""
        if self.term is None:
            return self.logits(states)
        moved: Tensor = self.term(states)
        return self.logits(moved if self.alone else states + moved)

    def loss(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Of the next token, in nats, where it is one that streams choose from."""
        wanted = self.place[tokens]
        return cross_entropy(self(states)[wanted >= 0], wanted[wanted >= 0])


def trained(found: Exit, answers: Sequence[Answer], steps: int, seed: int) -> Exit:
    """Train o on the next tokens of answers."""
    states = torch.cat([answer.states for answer in answers])
    tokens = torch.tensor(
        [token for answer in answers for token in answer.sample.ids[answer.sample.prompt :]]
    )
    optimizer = torch.optim.AdamW(found.parameters(), lr=TRAINED["lr"], weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        some = torch.randint(len(states), (int(TRAINED["rows"]),), generator=draw)
        optimizer.zero_grad()
        found.loss(states[some], tokens[some]).backward()
        optimizer.step()
        schedule.step()
    return found


def by_exit(model: StreamModel, tree: Tree, k: int, found: Exit, m: int) -> Chooser:
    """Pruning as the papers have it: the T nodes pass the layers below N - N_s, where their chances are read."""
    module = TreeModule(model, tree, k)

    @torch.no_grad()
    def choose(answer: Answer, at: int) -> list[int]:
        ids, prompt = answer.sample.ids, answer.sample.prompt
        drafts, length = answer.candidates[at].int(), int32(prompt + at)
        seen = module.main_rows(int32(ids[prompt + at]), drafts, length, answer.past)
        chances = torch.softmax(found(seen.states[0]), -1)
        return kept(chances[module.parents, found.place[seen.tokens]].tolist(), tree.parents, m)

    return choose


def by_streams(tree: Tree, m: int) -> Chooser:
    """The nodes whose candidates the streams find likeliest, which is known before the step."""

    def choose(answer: Answer, at: int) -> list[int]:
        chances = answer.chances[at].tolist()
        return kept(
            [chances[len(path) - 1][path[-1]] if path else 1.0 for path in tree.paths],
            tree.parents,
            m,
        )

    return choose


def tokens_a_step(answers: Sequence[Answer], tree: Tree, choose: Chooser) -> float:
    """β of steps that verify the chosen nodes; see ``ssdevice.tree.tokens_per_step``."""
    emitted = steps = 0
    for answer in answers:
        at, last = 0, len(answer.ranks) - 1
        while at < last:
            known = {tree.paths[node] for node in choose(answer, at)}
            depth = 0
            while depth < tree.depth and tuple(answer.ranks[at][: depth + 1]) in known:
                depth += 1
            taken = min(depth + 1, last - at)
            at, emitted, steps = at + taken, emitted + taken, steps + 1
    return emitted / max(steps, 1)


def count(args: argparse.Namespace) -> None:
    """Print how well exits know the next token, and a row for each of the pairs."""
    model = loading.load(args.model, args.adapter, args.context).model.eval().requires_grad_(False)
    tokenizer = open_tokenizer(args.model, args.adapter)
    both: list[list[Answer]] = []
    for files, limit in ((args.data, args.limit), (args.dev, args.dev_limit)):
        prompts = [
            tokenizer.prompt_ids(each.prompt, instruction=args.instruction)
            for each in read_examples(files, limit)
        ]
        samples = answered(
            model.backbone, tokenizer.stop_ids, prompts, [args.max_tokens] * len(prompts)
        )
        both.append([read(model, sample, args.k) for sample in samples])
    train, dev = both
    counts = count_paths([answer.ranks for answer in train])
    torch.manual_seed(args.seed)
    exits = {"M": Exit(model, 0)}
    for name, alone in ((f"M + o(M), rank {args.rank}", False), (f"o(M), rank {args.rank}", True)):
        exits[name] = trained(Exit(model, args.rank, alone), train, args.steps, args.seed)
    states = torch.cat([answer.states for answer in dev])
    tokens = torch.tensor(
        [token for answer in dev for token in answer.sample.ids[answer.sample.prompt :]]
    )
    for name, found in exits.items():
        with torch.no_grad():
            right = (model.draft_tokens(found(states).argmax(-1)) == tokens).float().mean().item()
            print(
                f"exit {name}: {right:.1%} of the next tokens, {found.loss(states, tokens).item():.3f} nats",
                flush=True,
            )
    if not args.all_exits:
        exits = {
            name: found
            for name, found in exits.items()
            if found.term is not None and not found.alone
        }
    ranks, rows = [answer.ranks for answer in dev], []
    for pair in args.pairs:
        name, _, nodes = pair.rpartition(":")
        m = int(nodes)
        tree = Tree.from_counts(counts, int(name)) if name.isdigit() else Tree.parse(name)
        pruned = [
            tokens_a_step(dev, tree, by_exit(model, tree, args.k, found, m))
            for found in exits.values()
        ]
        before = tokens_a_step(dev, tree, by_streams(tree, m))
        static = tokens_per_step(ranks, Tree.from_counts(counts, m))
        betas = [tokens_per_step(ranks, tree), *pruned, before, static]
        rows.append([name, str(tree.size), str(m), *(f"{beta:.3f}" for beta in betas)])
        print(*rows[-1], flush=True)
    head = ["tree", "T", "m", "whole", *exits, "by the streams", "counted tree of m"]
    print("\n".join(report.table(head, *rows)).strip())


def main(words: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    for name in ("--model", "--adapter", "--dev"):
        add(name, type=Path, required=True)
    add("--data", type=Path, nargs="+", required=True)
    add("--instruction", default="")
    add("--pairs", nargs="+", default=PAIRS, help="TREE:m")
    add("--all-exits", action="store_true", help="count β for M and o(M), too")
    numbers = {
        "limit": 200,
        "dev-limit": 100,
        "max-tokens": 64,
        "context": 512,
        "k": 16,
        "rank": 8,
        "steps": 400,
    }
    for name, default in {**numbers, "seed": 0, "threads": 1}.items():
        add(f"--{name}", type=int, default=default)
    args = parser.parse_args(words)
    prepare_frameworks(args.threads)
    count(args)


if __name__ == "__main__":
    main()
