"""Tokenized examples and batches of similar length, in an order that depends only on a seed."""

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ssdevice.data import Example
from ssdevice.errors import InputError
from ssdevice.text.tokenizer import ChatTokenizer, Sample

WIDTH_MULTIPLE = 16
"""With few distinct shapes the memory allocator reuses its blocks, which on CPUs saves more than
the padding costs.
"""


class Batch(NamedTuple):
    """``tokens [B, S]`` right-padded; ``prompts [B]`` and ``lengths [B]`` count tokens without
    padding.
    """

    tokens: Tensor
    prompts: Tensor
    lengths: Tensor

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(tensor.to(device) for tensor in self))


def tokenize(
    examples: Sequence[Example], tokenizer: ChatTokenizer, instruction: str, max_length: int
) -> tuple[list[Sample], int]:
    """Samples of at most ``max_length`` tokens, and the number of longer ones; raises InputError if
    all are.
    """
    every = (tokenizer.sample(example, instruction) for example in examples)
    if not (samples := [sample for sample in every if len(sample.ids) <= max_length]):
        raise InputError(
            f"none of the {len(examples)} examples has {max_length} tokens or fewer; raise --max-length"
        )
    return samples, len(examples) - len(samples)


class BatchOrder:
    """The samples of batch number i, fixed by the seed, so that a resumed run sees the same
    batches.

    Every epoch shuffles the samples, sorts them by length within pools of many batches, and
    shuffles the batches: padding stays short and the order random.
    """

    POOL = 50

    def __init__(self, samples: Sequence[Sample], size: int, seed: int) -> None:
        self.samples = samples
        self.size = size
        self.seed = seed
        self.per_epoch = -(-len(samples) // size)

    def from_position(self, position: int) -> Iterator[list[Sample]]:
        """Endless batches from number ``position`` on."""
        epoch, offset = divmod(position, self.per_epoch)
        while True:
            for group in self._epoch(epoch)[offset:]:
                yield [self.samples[i] for i in group]
            epoch, offset = epoch + 1, 0

    def _epoch(self, epoch: int) -> list[list[int]]:
        rng = random.Random(f"{self.seed}/{epoch}")
        order = list(range(len(self.samples)))
        rng.shuffle(order)
        batches = []
        for start in range(0, len(order), self.size * self.POOL):
            pool = sorted(
                order[start : start + self.size * self.POOL], key=lambda i: len(self.samples[i].ids)
            )
            batches += [pool[i : i + self.size] for i in range(0, len(pool), self.size)]
        rng.shuffle(batches)
        return batches


def pieces(samples: Sequence[Sample], nodes: int) -> list[list[Sample]]:
    """The samples in groups of at most ``nodes`` completion tokens, padding included; a longer
    sample is alone.
    """
    groups: list[list[Sample]] = []
    for sample in sorted(samples, key=lambda s: len(s.ids) - s.prompt):
        longest = len(sample.ids) - sample.prompt
        if groups and longest * (len(groups[-1]) + 1) <= nodes:
            groups[-1].append(sample)
        else:
            groups.append([sample])
    return groups


def collate(samples: Sequence[Sample], pad: int) -> Batch:
    """One right-padded batch; its width is a multiple of WIDTH_MULTIPLE."""
    width = -(-max(len(s.ids) for s in samples) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    tokens = torch.tensor([[*s.ids, *[pad] * (width - len(s.ids))] for s in samples])
    return Batch(
        tokens,
        torch.tensor([s.prompt for s in samples]),
        torch.tensor([len(s.ids) for s in samples]),
    )
