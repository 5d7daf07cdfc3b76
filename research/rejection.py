"""How far each rule of acceptance at T > 0 moves the distribution of the text: ``python -m research.rejection``.

A model of random conditional probabilities over four tokens verifies one step's draft tree. Stream j drafts k tokens,
drawn from its own distribution q_j, which knows the root only; every path over them is a path of the tree, as in
2402.11131 section 3.2.2. The text then goes on as the model does, so rules are compared by the joint distribution of
the next depth + 1 tokens: its total variation distance from the model's is 0 for an exact rule.

- ``per_path``: the papers' rule for T > 0 (the successor's equation 9 and appendix F). Each draft is accepted with
  probability min(1, p / q) where its parent was, the longest accepted path is taken (of equally long ones the first),
  and the token after it is drawn from the residual max(0, p - q), or where the papers' text is taken literally
  (G.1: "sampled from logits of main stream corresponding to last accepted token"), from p.
- ``multi_round``: SpecInfer's (2305.09781): children are tried in turn, each against what the earlier ones left of p.
- ``product``: this project's rule, by its own code: the token is argmax(log p / T + keyed noise), a draft that holds
  it is entered. With ``epsilon`` also its typical acceptance (2401.10774), which is inexact.

The first two are computed exactly, over all drafts that could be drawn; the product's by drawing.
"""

from __future__ import annotations

import argparse
from itertools import product as combinations
from typing import Any

import numpy as np

from ssdevice.runtime.sampling.choice import Chooser, walk
from ssdevice.runtime.sampling.options import Sampling
from ssdevice.tree import Tree

Array = Any
V = 4
"""Tokens. Drafts that could be drawn are V^(k depth): 4^9 at most here, which are taken in parts."""


def softmax(logits: Array) -> Array:
    """Probabilities along the last axis."""
    weight = np.exp(logits - logits.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True)


def random_model(
    seed: int, depth: int, spread: float = 1.5, blur: float = 0.5
) -> tuple[list[Array], list[Array]]:
    """``p``: for 0..depth tokens before, the probabilities of the next, ``[V] * (n + 1)``; ``q``: of each stream, [V].

    A stream knows how likely its token is after the root, all tokens between summed over, with an error of ``blur``
    nats.
    """
    rng = np.random.default_rng(seed)
    p = [softmax(rng.normal(size=[V] * (n + 1)) * spread) for n in range(depth + 1)]
    marginals = [joint(p[:n]).sum(tuple(range(n - 1))) for n in range(1, depth + 1)]
    return p, [softmax(np.log(m) + rng.normal(size=V) * blur) for m in marginals]


def joint(p: list[Array]) -> Array:
    """The probabilities of the next ``len(p)`` tokens, ``[V] * len(p)``."""
    found = np.ones(())
    for conditional in p:
        found = found[..., None] * conditional
    return found


def residual(p: Array, q: Array) -> Array:
    """What is drawn from after a rejection: max(0, p - q), to a sum of 1; p if nothing is left."""
    left = np.maximum(p - q, 0)
    total = left.sum(-1, keepdims=True)
    return np.where(total > 0, left / np.where(total > 0, total, 1), p)


def text_of(ended: list[Array], last: list[Array], p: list[Array]) -> Array:
    """The joint of depth + 1 tokens, given how often a step took a path, and what follows it is drawn from.

    ``ended[d]``, ``[V] * d``; ``last[d]``, ``[V] * (d + 1)``.
    """
    total = np.zeros([V] * len(p))
    for d, (share, after) in enumerate(zip(ended, last, strict=True)):
        text = share[..., None] * after
        for conditional in p[d + 1 :]:
            text = text[..., None] * conditional
        total += text
    return total


def per_path(p: list[Array], q: list[Array], k: int, corrected: bool = True) -> tuple[Array, float]:
    """The joint under rejection along each path, and tokens per step. ``corrected``: by the residual."""
    depth, tree = len(q), Tree.full(k, len(q))
    ended = [np.zeros([V] * d) for d in range(depth + 1)]
    draws = np.stack(np.unravel_index(np.arange(V ** (k * depth)), [V] * (k * depth)), -1).reshape(
        -1, depth, k
    )
    for drafts in np.array_split(draws, -(-len(draws) // 8192)):  # [n, depth, k]
        weight = np.prod([q[d][drafts[:, d]] for d in range(depth)], axis=(0, 2))
        held = [tuple(drafts[:, d, rank] for d, rank in enumerate(ranks)) for ranks in tree.paths]
        for node, share in enumerate(_longest(tree, held, p, q)):
            d = tree.depths[node]
            at = sum(
                (token * V ** (d - 1 - n) for n, token in enumerate(held[node])),
                np.zeros(len(weight), int),
            )
            ended[d] += np.bincount(at, weight * share, V**d).reshape([V] * d)
    last = [residual(p[d], q[d]) if corrected and d < depth else p[d] for d in range(depth + 1)]
    return text_of(ended, last, p), sum(
        (d + 1) * float(share.sum()) for d, share in enumerate(ended)
    )


def _longest(
    tree: Tree, held: list[tuple[Array, ...]], p: list[Array], q: list[Array]
) -> list[Array]:
    """For each node, how likely the longest accepted path ends there, ``[n]``; ``held``: the tokens of its path."""
    depth, count = tree.depth, len(held[-1][0])
    children = [
        [c for c in range(1, tree.size) if tree.parents[c] == node] for node in range(tree.size)
    ]
    below = np.zeros(
        (tree.size, count, depth + 1)
    )  # how likely accepted paths below an accepted node have a length
    above = np.zeros(
        (tree.size, count, depth + 1)
    )  # the same with the node itself, which may be rejected
    for node in reversed(range(tree.size)):
        within = np.ones((count, depth + 1))  # every child's length is at most ..
        for child in children[node]:
            within = within * above[child].cumsum(1)
        below[node] = np.diff(within, axis=1, prepend=0)
        if node:
            d = tree.depths[node] - 1
            accepted = np.minimum(1, p[d][held[node]] / q[d][held[node][-1]])[:, None]
            above[node, :, 1:] = accepted * below[node, :, :-1]
            above[node, :, 0] = 1 - accepted[:, 0]
    reached = np.zeros_like(
        below
    )  # how likely the longest path goes through a node and so far beyond it
    reached[0] = below[0]
    for node in range(tree.size):
        for child in children[node]:
            chosen = above[child].copy()  # the first of the longest
            for other in children[node]:
                if other != child:
                    most = above[other].cumsum(1)
                    chosen *= most - above[other] if other < child else most
            share = np.divide(chosen, below[node], out=np.zeros_like(chosen), where=below[node] > 0)
            reached[child, :, :-1] = (reached[node] * share)[:, 1:]
    return [each[:, 0] for each in reached]


def multi_round(p: list[Array], q: list[Array], k: int) -> tuple[Array, float]:
    """The joint under SpecInfer's multi-round rejection, and tokens per step."""
    depth = len(q)
    ended, last, reached = [], [], np.ones(())
    for d in range(depth):
        entered, corrected = np.zeros([V] * (d + 1)), np.zeros([V] * (d + 1))
        for children in combinations(range(V), repeat=k):
            left, share = p[d], np.prod(q[d][list(children)]) * np.ones([V] * d)
            for child in children:
                accepted = np.minimum(1, left[..., child] / q[d][child])
                entered[..., child] += share * accepted
                share = share * (1 - accepted)
                left = residual(left, q[d])
            corrected += share[..., None] * left
        ended.append(reached * corrected.sum(-1))
        last.append(corrected / np.maximum(corrected.sum(-1, keepdims=True), 1e-300))
        reached = reached[..., None] * entered
    return text_of([*ended, reached], [*last, p[depth]], p), 1 + sum(
        d * float(share.sum()) for d, share in enumerate([*ended, reached])
    )


def product(
    p: list[Array], q: list[Array], k: int, draws: int, epsilon: float = 0.0, drafts: str = "drawn"
) -> tuple[Array, float]:
    """The joint's frequencies in ``draws`` answers of the product's code, a seed each, and tokens per step.

    ``drafts``: "drawn" from the streams, their "likeliest" k tokens, as the product's are, or "none".
    """
    depth, tree, rng = len(q), Tree.full(k, len(q)), np.random.default_rng(0)
    logits = [np.log(each).astype(np.float32) for each in p]
    if drafts == "likeliest":
        held = np.broadcast_to(
            np.argsort(-np.stack(q), 1, kind="stable")[:, :k], (draws, depth, k)
        ).astype(np.int32)
    else:
        held = np.stack([rng.choice(V, (draws, k), p=each) for each in q], 1).astype(np.int32)
    counts, emitted = np.zeros([V] * (depth + 1)), 0
    for seed in range(draws):
        chooser = Chooser(
            Sampling(temperature=1.0, seed=seed, typical_acceptance=epsilon), [0], [], V
        )
        text: list[int] = []
        if drafts != "none":
            ranks, own = tree.paths, held[seed]
            rows = [
                logits[len(path)][tuple(own[d, rank] for d, rank in enumerate(path))]
                for path in ranks
            ]
            taken = chooser.typical(tree, own, np.stack(rows))
            text = walk(tree, own, lambda node: chooser(rows[node]), taken)[1]  # noqa: B023
        emitted += len(text)
        while len(text) <= depth:
            text.append(chooser(logits[len(text)][tuple(text)]))
        counts[tuple(text)] += 1
    return counts / draws, emitted / draws


def distance(found: Array, target: Array) -> float:
    """The total variation distance: the most that any event's probability differs by."""
    return float(np.abs(found - target).sum() / 2)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", type=int, default=5, help="random models whose distances are averaged"
    )
    parser.add_argument(
        "--draws",
        type=int,
        default=20_000,
        help="answers by the product's code, for the first model",
    )
    parser.add_argument("--epsilon", type=float, default=0.09, help="of typical acceptance")
    args = parser.parse_args()
    print("| k | depth | per path | literally | SpecInfer | tokens a step: per path, SpecInfer |")
    print("|---|---|---|---|---|---|")
    for depth, k in combinations((1, 2, 3), (1, 2, 3)):
        rows = []
        for seed in range(args.models):
            p, q = random_model(seed, depth)
            target = joint(p)
            found = [per_path(p, q, k), per_path(p, q, k, corrected=False), multi_round(p, q, k)]
            rows.append([*(distance(each[0], target) for each in found), found[0][1], found[2][1]])
        *distances, papers, specinfer = np.mean(rows, 0)
        cells = ["exact" if each < 1e-12 else f"{each:.3f}" for each in distances]
        print(
            f"| {k} | {depth} | {' | '.join(cells)} | {papers:.2f}, {specinfer:.2f} |", flush=True
        )
    print(f"\n{args.draws} answers by the product's code, depth 2, the first model")
    p, q = random_model(0, 2)
    for name, k, asked in (
        ("no drafts", 1, {"drafts": "none"}),
        *((f"{drafts} drafts, k = {k}", k, {"drafts": drafts}) for drafts in ("drawn", "likeliest") for k in (1, 3)),
        *((f"typical acceptance, k = {k}", k, {"epsilon": args.epsilon}) for k in (1, 3)),
    ):  # fmt: skip
        frequencies, emitted = product(p, q, k, args.draws, **asked)  # type: ignore[arg-type]
        print(
            f"{name}: distance {distance(frequencies, joint(p)):.4f}, {emitted:.2f} tokens a step",
            flush=True,
        )


if __name__ == "__main__":
    main()
