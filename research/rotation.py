"""Streams that are told apart by rotated values (the successor's equation 8) instead of identifiers P_j.

    python -m research.rotation --model MODEL --data train.jsonl.gz --dev dev.jsonl.gz --out OUT

Stream n starts as its node's state, without P_n, and its value projections in the MSA layers are multiplied by
exp(i ε n): element i of a head and element i + d / 2 are the real and the imaginary part. Trains every arm of ARMS as
``sweep.py`` trains a point. Then prints what half precision leaves of the rotation, and β of the rotated arm if its
values are rotated in half precision, or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from research import sweep
from research.answers import answered
from ssdevice.commands.opening import prepare_frameworks
from ssdevice.data import read_examples
from ssdevice.model import loading, step
from ssdevice.model.attention import Attending
from ssdevice.model.streams import Streams
from ssdevice.model.tokenizer import open_tokenizer
from ssdevice.train import loss
from ssdevice.train.batches import collate
from ssdevice.train.evaluation import stream_ranks
from ssdevice.train.loss import LossWeights, StreamingLoss
from ssdevice.tree import Tree, tokens_per_step

LENGTHS = (512, 2048, 8192, 32768)
"""Sequence lengths, each with its largest ε."""


def largest(length: int, gamma: int) -> float:
    """π / 2N, the largest ε of equation 8; N: the longest sequence and the streams."""
    return math.pi / (2 * (length + gamma))


def rotated(values: Tensor, gamma: int, epsilon: float, dtype: torch.dtype | None = None) -> Tensor:
    """``[.., n * γ, d]``: the values of stream j times exp(i ε j); ``dtype``: every number is rounded to it."""
    stream = torch.arange(values.shape[-2], device=values.device) % gamma + 1
    angle = (epsilon * stream.double())[:, None]
    real, imaginary = values.to(dtype or values.dtype).chunk(2, -1)
    cos, sin = torch.cos(angle).to(real.dtype), torch.sin(angle).to(real.dtype)
    turned = torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], -1)
    return turned.to(values.dtype)


@contextmanager
def told_apart(
    epsilon: float, positions: bool = True, dtype: torch.dtype | None = None
) -> Iterator[None]:
    """In this context streams train and guess without P, with rotated values instead.

    ``positions``: stream j is at the node's position + j, as elsewhere here; False: at the node's, so that nothing but
    the rotation and the mask tells streams apart.
    """
    by_node = loss.attend_by_node

    def attend(asked: Attending, gamma: int) -> Tensor:
        main, *own = asked.values
        return by_node(
            replace(asked, values=[main, *(rotated(v, gamma, epsilon, dtype) for v in own)]), gamma
        )

    def start(self: Streams, h: Tensor, gamma: int, chosen: Tensor | None = None) -> Tensor:
        return self.moved(h).repeat_interleave(gamma, dim=1)

    with ExitStack() as changed:
        changed.enter_context(mock.patch.object(loss, "attend_by_node", attend))
        changed.enter_context(mock.patch.object(Streams, "start", start))
        if not positions:
            same = mock.patch.object(
                step, "stream_positions", lambda at, n: at.repeat_interleave(n, -1)
            )
            changed.enter_context(same)
        yield


def kept(values: Tensor, gamma: int, epsilon: float, dtype: torch.dtype) -> tuple[float, float]:
    """What ``dtype`` leaves of a rotation of values ``[.., γ, d]``.

    The share of numbers that it does not change, and the size of the error beside the size of the rotation.
    """
    before = values.to(dtype).float()
    exact, found = rotated(before, gamma, epsilon), rotated(before, gamma, epsilon, dtype)
    return (found == before).float().mean().item(), (
        (found - exact).norm() / (exact - before).norm()
    ).item()


def main(words: Sequence[str] | None = None) -> None:
    """Train the arms that are not there yet, and print their table and what half precision does."""
    args = sweep.parser(__doc__).parse_args(words)
    prepare_frameworks(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    point = {name: getattr(args, name)[0] for name in sweep.SWEPT}
    gamma = point["gamma"]
    epsilon = largest(args.max_length, gamma)
    arms = {
        "identifiers": None,
        "rotation": told_apart(epsilon),
        "positions only": told_apart(0.0),
        "rotation, node's position": told_apart(epsilon, positions=False),
    }
    print(sweep.table([sweep.finished(args, name, point, arm) for name, arm in arms.items()]))

    adapter: Path = args.out / "rotation"
    model, tokenizer = (
        loading.load(args.model, adapter, args.max_length).model,
        open_tokenizer(args.model, adapter),
    )
    every = [
        tokenizer.sample(example, args.instruction)
        for example in read_examples(args.dev, args.dev_limit)
    ]
    batch = collate(every[:8], tokenizer.stop_ids[0])
    with torch.no_grad():
        rows = StreamingLoss(model, LossWeights(1.0, 1.0)).run_main(batch.tokens)[2]
    values = torch.stack([row[1] for row in rows])[..., None, :].expand(*[-1] * 4, gamma, -1)
    print("\n| N | number | unchanged | error / rotation |\n|---|---|---|---|")
    for length in LENGTHS:
        for dtype in (torch.float16, torch.bfloat16):
            same, error = kept(values, gamma, largest(length, gamma), dtype)
            print(f"| {length} | {str(dtype).split('.')[1]} | {same:.0%} | {error:.2f} |")
    prompts = [s.ids[: s.prompt] for s in every]
    samples = answered(
        model.backbone, tokenizer.stop_ids, prompts, [args.answer_tokens] * len(prompts)
    )
    settings = {
        "float32": (epsilon, None),
        "float16": (epsilon, torch.float16),
        "bfloat16": (epsilon, torch.bfloat16),
    }
    for name, (angle, dtype) in {
        **settings,
        "none": (0.0, None),
        "opposite": (-epsilon, None),
    }.items():
        with told_apart(angle, dtype=dtype):
            ranks = stream_ranks(model, samples)
        print(f"β with values rotated in {name}: {tokens_per_step(ranks, Tree.chain(gamma)):.3f}")


if __name__ == "__main__":
    main()
