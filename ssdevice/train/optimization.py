"""The steps of a training run: gradients of a batch, AdamW with a linear schedule, checkpoints."""

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ssdevice.errors import InputError, SSDeviceError
from ssdevice.text.tokenizer import Sample
from ssdevice.train import checkpoint
from ssdevice.train.batches import Batch, BatchOrder, collate, pieces
from ssdevice.train.job import Job
from ssdevice.train.loss import Main, StreamingLoss
from ssdevice.train.options import EPOCHS, TrainOptions
from ssdevice.train.start import Moments

CHECKPOINT_SECONDS = 120.0
WARMUP = 50
"""Steps in which the learning rate rises; a tenth of all at most."""
History = list[list[float]]
"""By step: its number, the loss of main rows, the loss of every stream."""


class MainRows:
    """Main rows of a frozen base, kept between epochs because they never change.

    They are kept by sample in CPU memory, up to ``limit`` bytes; what does not fit is recomputed
    each time.
    """

    def __init__(self, loss: StreamingLoss, limit: int) -> None:
        self.loss = loss
        self.left = limit
        self.kept: dict[Sample, list[Tensor]] = {}

    @torch.no_grad()
    def of(self, samples: Sequence[Sample], batch: Batch) -> Main:
        """The main rows of ``batch``, which is ``samples`` collated."""
        if not all(sample in self.kept for sample in samples):
            middle, final, rows = self.loss.run_main(batch.tokens)
            parts = [middle]
            if self.loss.weights.soft:
                parts.append(final)
            parts += chain.from_iterable(rows)
            self._keep(samples, parts)
            return middle, final, rows
        width = batch.tokens.shape[1]
        by_sample = [self.kept[sample] for sample in samples]
        stacked = list[Tensor]()
        for parts_of_samples in zip(*by_sample, strict=True):
            # Rows beyond a sample's length are always masked.
            padded = [pad(part, (0, 0, 0, width - part.shape[-2])) for part in parts_of_samples]
            stacked.append(torch.stack(padded).to(batch.tokens.device))
        middle = stacked.pop(0)
        kept_final = stacked.pop(0) if self.loss.weights.soft else None
        keys = stacked[0::2]
        values = stacked[1::2]
        return middle, kept_final, list(zip(keys, values, strict=True))

    def _keep(self, samples: Sequence[Sample], parts: Sequence[Tensor]) -> None:
        """Keep the rows of each sample in ``parts``, all ``[B, .., S, n]``."""
        for i, sample in enumerate(samples):
            own = [part[i, ..., : len(sample.ids), :] for part in parts]
            size = sum(part.numel() * part.element_size() for part in own)
            if sample not in self.kept and size <= self.left:
                self.left -= size
                self.kept[sample] = [part.to("cpu", copy=True) for part in own]


def optimize(job: Job, loss: StreamingLoss, order: BatchOrder, fresh: bool) -> History:
    """Train from the last checkpoint to the end.

    ``fresh``: the streams are untrained, so where they start is fitted first.
    """
    options = job.options
    place = job.place
    steps = options.steps or EPOCHS * order.per_epoch
    run = Run(loss, options, steps)
    run.resume(options.out)
    kept: MainRows | None = None
    # An accelerator computes main rows sooner than it fetches them.
    if options.frozen and place.device.type == "cpu":
        limit = psutil.virtual_memory().available // (2 * place.world)
        kept = MainRows(loss, limit)
    if fresh and not run.step:
        _fit_start(job, loss, order, kept)
    parallel = place.parallel(loss)
    batches = order.from_position(run.step)
    saved = time.monotonic()
    try:
        while run.step < steps:
            losses = place.total(_backward(job, loss, parallel, next(batches), kept)).tolist()
            run.update([round(x, 4) for x in losses])
            job.report("train", run.step, steps, " ".join(f"{x:.3f}" for x in losses))
            if place.main and time.monotonic() - saved > CHECKPOINT_SECONDS:
                run.save(options.out)
                saved = time.monotonic()
    finally:
        if place.main:
            run.save(options.out)
    return run.history


class Run:
    """What training changes, its optimizer and schedule, and the losses so far.

    InputError if nothing is trained.
    """

    def __init__(self, loss: StreamingLoss, options: TrainOptions, steps: int) -> None:
        self.loss = loss
        self.learned = {name: p for name, p in loss.named_parameters() if p.requires_grad}
        if not self.learned:
            raise InputError("nothing to train: the LoRA rank is 0 and there are no streams")
        self.optimizer = torch.optim.AdamW(self.learned.values(), lr=options.lr, weight_decay=0.0)
        warmup = min(WARMUP, steps // 10)

        def share_of_lr(step: int) -> float:
            rising = (step + 1) / (warmup + 1)
            falling = (steps - step) / max(1, steps - warmup)
            return min(rising, max(0.0, falling))

        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, share_of_lr)
        self.step = 0
        self.history = History()
        self._whole = False  # whether the state is that after a step, and not saved yet

    def resume(self, folder: Path) -> None:
        """Continue from the checkpoint in ``folder``, if there is one."""
        found = checkpoint.load(folder)
        if found is None:
            return
        self.loss.load_state_dict(found["weights"], strict=False)
        self.optimizer.load_state_dict(found["optimizer"])
        self.schedule.load_state_dict(found["scheduler"])
        self.step = found["step"]
        self.history = found["history"]

    def update(self, losses: list[float]) -> None:
        """Follow the gradients of a step with these losses.

        Raises SSDeviceError if they are not finite.
        """
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
        if not self._whole:
            return
        state = {
            "step": self.step,
            "weights": {name: p.detach().cpu() for name, p in self.learned.items()},
            "history": self.history,
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.schedule.state_dict(),
        }
        checkpoint.save(folder, state)
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
                if kept is not None:
                    middle, _, _ = kept.of(samples, batch)
                else:
                    middle, _, _ = loss.run_main(batch.tokens)
            moments.add(batch, middle)
        job.report("start", min(moments.nodes, moments.wanted), moments.wanted, "")
        if moments.nodes >= moments.wanted:
            break
    if moments.nodes:
        explained = moments.fit()
        note = f"a linear guess explains {explained:.0%} of the rows that streams stand for"
        job.report("start", 1, 1, note)


def _collated(job: Job, samples: Sequence[Sample]) -> Batch:
    """A batch on the device of this process, padded with a stop token."""
    return collate(samples, job.tokenizer.stop_ids[0]).to(job.place.device)


def _backward(
    job: Job, loss: StreamingLoss, parallel: nn.Module, group: list[Sample], kept: MainRows | None
) -> Tensor:
    """Accumulate the gradients of one step over ``group``.

    Returns this process's part of the losses, which are means over all processes. Each has a share
    of the group: n processes compute what one with n times the batch does.
    """
    place = job.place
    counts = loss.counts(*_collated(job, group))
    parts = torch.zeros_like(counts)
    # A process without a sample takes part in the averaging with a sample of weight 0.
    share = place.share(group)
    passes = pieces(share or group[:1], loss.nodes)
    weight = float(bool(share))
    for number, samples in enumerate(passes, 1):
        batch = _collated(job, samples)
        wait = isinstance(parallel, nn.parallel.DistributedDataParallel) and number < len(passes)
        with parallel.no_sync() if wait else nullcontext():  # type: ignore[operator]
            with place.autocast():
                known = kept.of(samples, batch) if kept is not None else None
                total, losses = parallel(*batch, counts, known)
            (total * (weight * place.world)).backward()
        parts += losses * weight
    return parts
