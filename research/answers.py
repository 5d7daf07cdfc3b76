"""Answers that a model gives, and what drafters lose along rows: what several scripts here measure."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from ssdevice.model.backbone import Backbone
from ssdevice.model.step import StreamModel
from ssdevice.text.tokenizer import Sample
from ssdevice.train import evaluation, trainer
from ssdevice.train.batches import collate
from ssdevice.model.decoding import Decoding
from ssdevice.train.loss import LossWeights, StreamingLoss


def answered(
    backbone: Backbone,
    stop: Iterable[int],
    prompts: Sequence[Sequence[int]],
    most: Sequence[int],
    slots: int | None = None,
) -> list[Sample]:
    """The model's greedy answers; ``most``: tokens of each. ``slots``: see ``Decoding``."""
    found = dict(Decoding(backbone, prompts, set(stop), most, slots=slots))
    return [Sample((*ids, *found[i]), len(ids)) for i, ids in enumerate(prompts)]


@contextmanager
def losing(arm: type[StreamingLoss]) -> Iterator[None]:
    """In this context the product's own code, and ``mean_losses``, train and count by another loss."""
    with ExitStack() as changed:
        for module in (trainer, evaluation, sys.modules[__name__]):
            changed.enter_context(mock.patch.object(module, "StreamingLoss", arm))
        yield


@torch.no_grad()
def mean_losses(model: StreamModel, samples: Sequence[Sample]) -> list[float]:
    """The mean losses of the next token and of the streams, ``[1 + γ]`` in nats, along the samples' completions."""
    probe, total = StreamingLoss(model, LossWeights(1.0, 1.0)), torch.zeros(2, model.gamma + 1)
    for start in range(0, len(samples), 8):
        batch = collate(samples[start : start + 8], 0)
        counts = probe.counts(*batch)
        total += torch.stack([probe(*batch)[1] * counts, counts])
    return (total[0] / total[1].clamp(min=1)).tolist()  # type: ignore[no-any-return]
