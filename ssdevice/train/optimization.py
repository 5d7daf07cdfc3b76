"""The steps of a training run: gradients over a batch, AdamW with a linear schedule, a checkpoint now and then."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from ssdevice.errors import InputError, SSDeviceError
from ssdevice.train import checkpoint
from ssdevice.train.batches import Batch, BatchOrder, Sample, collate, pieces
from ssdevice.train.job import Job
from ssdevice.train.loss import StreamingLoss
from ssdevice.train.main_rows import MainRows
from ssdevice.train.options import TrainOptions
from ssdevice.train.start import Moments


def optimize(job: Job, loss: StreamingLoss, order: BatchOrder, fresh: bool) -> list[list[float]]:
    """Train from the last checkpoint to the end. Returns the history: step, loss of main rows, loss of every stream.

    ``fresh``: the streams have not been trained before, so where they start is fitted first.
    """
    options, place = job.options, job.place
    steps = options.steps or max(1, int(options.epochs * order.per_epoch / options.accumulate))
    run = _Run(loss, options, steps)
    run.resume(options.out)
    # An accelerator computes them sooner than it fetches them.
    keeps = options.frozen and not options.alphas[0] and place.device.type == "cpu"
    kept = MainRows(loss, int(options.keep_gb * 1e9)) if keeps else None
    if fresh and not run.step:
        _fit_start(job, loss, order, kept)
    parallel = place.parallel(loss)
    batches = order.from_position(run.step * options.accumulate)
    saved = time.monotonic()
    try:
        while run.step < steps:
            groups = [next(batches) for _ in range(options.accumulate)]
            losses = place.total(_backward(job, loss, parallel, groups, kept)).tolist()
            run.update([round(x, 4) for x in losses])
            job.report("train", run.step, steps, " ".join(f"{x:.3f}" for x in losses))
            if place.main and time.monotonic() - saved > options.checkpoint_seconds:
                run.save(options.out)
                saved = time.monotonic()
    finally:
        if place.main:
            run.save(options.out)
    return run.history


class _Run:
    """What training changes: the adapter's parameters, their optimizer and its schedule, and the losses so far.

    Raises InputError if there is nothing to train.
    """

    def __init__(self, loss: StreamingLoss, options: TrainOptions, steps: int) -> None:
        self.loss = loss
        self.learned = {name: p for name, p in loss.named_parameters() if p.requires_grad}
        if not self.learned:
            raise InputError("nothing to train: the LoRA rank is 0 and there are no streams")
        self.optimizer = torch.optim.AdamW(self.learned.values(), lr=options.lr, weight_decay=options.weight_decay)
        warmup = min(options.warmup, steps // 10)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda i: min((i + 1) / (warmup + 1), max(0.0, (steps - i) / max(1, steps - warmup)))
        )
        self.step, self.history = 0, list[list[float]]()
        self._whole = False  # whether the state is that after a step, and not saved yet

    def resume(self, folder: Path) -> None:
        """Go on from the checkpoint in ``folder``, if there is one."""
        found = checkpoint.load(folder)
        if found is None:
            return
        self.loss.load_state_dict(found.weights, strict=False)
        self.optimizer.load_state_dict(found.optimizer)
        self.schedule.load_state_dict(found.scheduler)
        self.step, self.history = found.step, found.history

    def update(self, losses: list[float]) -> None:
        """Follow the gradients of a step with these losses. Raises SSDeviceError if they are not finite."""
        self._whole = False
        norm = float(nn.utils.clip_grad_norm_(self.learned.values(), 1.0))
        if not all(map(math.isfinite, (norm, *losses))):
            raise SSDeviceError(f"the loss is not finite at step {self.step + 1}; lower --lr")
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.history.append([self.step, *losses])
        self._whole = True

    def save(self, folder: Path) -> None:
        """Write a checkpoint, unless a step was interrupted or nothing is new."""
        if self._whole:
            weights = {name: p.detach().cpu() for name, p in self.learned.items()}
            state = self.optimizer.state_dict(), self.schedule.state_dict(), self.history
            checkpoint.save(folder, checkpoint.Checkpoint(self.step, weights, *state))
            self._whole = False


def _fit_start(job: Job, loss: StreamingLoss, order: BatchOrder, kept: MainRows | None) -> None:
    """Fit where streams start to the first batches of the run. All processes compute the same."""
    streams = loss.model.streams
    if streams is None or streams.token is None:
        return
    moments = Moments(loss.model)
    epoch = order.from_position(0)
    for _ in range(order.per_epoch):
        for samples in pieces(next(epoch), loss.nodes):
            batch = _collated(job, samples)
            with job.place.autocast(), torch.no_grad():
                middle = kept.of(samples, batch)[0] if kept is not None else loss.run_main(batch.tokens)[0]
            moments.add(batch, middle)
        job.report("start", min(moments.nodes, moments.wanted), moments.wanted, "")
        if moments.nodes >= moments.wanted:
            break
    if moments.nodes:
        explained = moments.fit()
        job.report("start", 1, 1, f"a linear guess explains {explained:.0%} of the rows that streams stand for")


def _collated(job: Job, samples: Sequence[Sample]) -> Batch:
    """A batch on the device of this process, padded with a stop token."""
    return collate(samples, job.tokenizer.stop_ids[0]).to(job.place.device)


def _backward(
    job: Job, loss: StreamingLoss, parallel: nn.Module, groups: list[list[Sample]], kept: MainRows | None
) -> Tensor:
    """Accumulate the gradients of one step over ``groups`` of samples; returns this process's part of the losses.

    Losses are means over the whole step: over all groups and all processes, each of which sees its share of a group.
    So n processes compute the same as one with n times the batch.
    """
    place = job.place
    counts = torch.stack([loss.counts(*_collated(job, group)) for group in groups]).sum(0)
    parts = torch.zeros_like(counts)
    # A process without a sample takes part in the averaging with a sample of weight 0.
    passes: list[tuple[list[Sample], float]] = []
    for group in groups:
        share = place.share(group)
        passes += [(samples, float(bool(share))) for samples in pieces(share or group[:1], loss.nodes)]
    for number, (samples, weight) in enumerate(passes, 1):
        batch = _collated(job, samples)
        wait = isinstance(parallel, nn.parallel.DistributedDataParallel) and number < len(passes)
        with parallel.no_sync() if wait else nullcontext():  # type: ignore[operator]
            with place.autocast():
                known = kept.of(samples, batch) if kept is not None else None
                total, losses = parallel(*batch, counts, known)
            (total * (weight * place.world)).backward()
        parts += losses * weight
    return parts
