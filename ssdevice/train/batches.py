"""Tokenized examples and batches of similar length, in an order that depends only on a seed."""

import random
from collections.abc import Iterator, Sequence
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from ssdevice.data import Example
from ssdevice.errors import InputError
from ssdevice.text.tokenizer import ChatTokenizer, Sample

WIDTH_MULTIPLE = 16
"""Batches are a multiple of so many tokens wide.

With few distinct shapes the memory allocator reuses its blocks, which on CPUs saves more than the
padding costs.
"""


class Batch(NamedTuple):
    """``tokens [B, S]``, padded on the right.

    ``prompts [B]`` and ``lengths [B]`` count tokens without padding.
    """

    tokens: Tensor
    prompts: Tensor
    lengths: Tensor

    def to(self, device: torch.device) -> "Batch":
        """The same batch on a device."""
        return Batch(
            tokens=self.tokens.to(device),
            prompts=self.prompts.to(device),
            lengths=self.lengths.to(device),
        )


def tokenize(
    examples: Sequence[Example], tokenizer: ChatTokenizer, instruction: str, max_length: int
) -> tuple[list[Sample], int]:
    """Samples of at most ``max_length`` tokens, and the number of longer ones.

    Raises InputError if all are longer.
    """
    samples = list[Sample]()
    for example in examples:
        sample = tokenizer.sample(example, instruction)
        if len(sample.ids) <= max_length:
            samples.append(sample)
    if not samples:
        raise InputError(
            f"none of the {len(examples)} examples has {max_length} tokens or fewer; "
            "raise --max-length"
        )
    return samples, len(examples) - len(samples)


class BatchOrder:
    """The samples of each batch by its number, fixed by a seed: a resumed run sees the same ones.

    Every epoch shuffles the samples, sorts them by length within pools of many batches, and
    shuffles the batches: padding stays short and the order random.
    """

    POOL = 50
    """Batches in a pool."""

    def __init__(self, samples: Sequence[Sample], size: int, seed: int) -> None:
        self.samples = samples
        self.size = size
        self.seed = seed
        self.per_epoch = ceil(len(samples) / size)

    def from_position(self, position: int) -> Iterator[list[Sample]]:
        """Endless batches from number ``position`` on."""
        epoch, offset = divmod(position, self.per_epoch)
        while True:
            for group in self._epoch(epoch)[offset:]:
                yield [self.samples[i] for i in group]
            epoch += 1
            offset = 0

    def _epoch(self, epoch: int) -> list[list[int]]:
        """The batches of an epoch, as indices of samples."""
        rng = random.Random(f"{self.seed}/{epoch}")
        order = list(range(len(self.samples)))
        rng.shuffle(order)
        batches = list[list[int]]()
        pool_size = self.size * self.POOL
        for start in range(0, len(order), pool_size):
            pool = order[start : start + pool_size]
            pool.sort(key=lambda i: len(self.samples[i].ids))
            batches += [pool[i : i + self.size] for i in range(0, len(pool), self.size)]
        rng.shuffle(batches)
        return batches


def pieces(samples: Sequence[Sample], nodes: int) -> list[list[Sample]]:
    """The samples in groups of at most ``nodes`` completion tokens, padding included.

    A sample with more of them has a group to itself.
    """

    def completion_tokens(sample: Sample) -> int:
        return len(sample.ids) - sample.prompt

    groups: list[list[Sample]] = []
    for sample in sorted(samples, key=completion_tokens):
        longest = completion_tokens(sample)
        if groups and longest * (len(groups[-1]) + 1) <= nodes:
            groups[-1].append(sample)
        else:
            groups.append([sample])
    return groups


def collate(samples: Sequence[Sample], pad: int) -> Batch:
    """One right-padded batch; its width is a multiple of WIDTH_MULTIPLE."""
    longest = max(len(sample.ids) for sample in samples)
    width = ceil(longest / WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    rows = list[list[int]]()
    for sample in samples:
        padding = [pad] * (width - len(sample.ids))
        rows.append([*sample.ids, *padding])
    return Batch(
        tokens=torch.tensor(rows),
        prompts=torch.tensor([sample.prompt for sample in samples]),
        lengths=torch.tensor([len(sample.ids) for sample in samples]),
    )
