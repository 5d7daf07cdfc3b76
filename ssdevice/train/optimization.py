"""The steps of a training run: gradients over a batch, AdamW with a linear schedule, a checkpoint
now and then.
"""

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
    """Main rows of a frozen base, kept between epochs because they never change: by sample in CPU
    memory, up to ``limit`` bytes.

    What does not fit is recomputed each time.
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
            self._keep(
                samples,
                [middle, *([final] if self.loss.weights.soft else ()), *chain.from_iterable(rows)],
            )
            return middle, final, rows
        width = batch.tokens.shape[1]
        middle, *flat = (
            # Rows beyond a sample's length are always masked.
            torch.stack([pad(part, (0, 0, 0, width - part.shape[-2])) for part in parts]).to(
                batch.tokens.device
            )
            for parts in zip(*(self.kept[sample] for sample in samples), strict=True)
        )
        kept = flat.pop(0) if self.loss.weights.soft else None
        return middle, kept, list(zip(flat[::2], flat[1::2], strict=True))

    def _keep(self, samples: Sequence[Sample], parts: Sequence[Tensor]) -> None:
        """Keep the rows of each sample in ``parts``, all ``[B, .., S, n]``."""
        for i, sample in enumerate(samples):
            mine = [part[i, ..., : len(sample.ids), :] for part in parts]
            size = sum(part.numel() * part.element_size() for part in mine)
            if sample not in self.kept and size <= self.left:
                self.left -= size
                self.kept[sample] = [part.to("cpu", copy=True) for part in mine]


def optimize(job: Job, loss: StreamingLoss, order: BatchOrder, fresh: bool) -> History:
    """Train from the last checkpoint to the end.

    ``fresh``: the streams are untrained, so where they start is fitted first.
    """
    options = job.options
    place = job.place
    steps = options.steps or EPOCHS * order.per_epoch
    run = Run(loss, options, steps)
    run.resume(options.out)
    # An accelerator computes them sooner than it fetches them.
    keeps = options.frozen and place.device.type == "cpu"
    kept = MainRows(loss, psutil.virtual_memory().available // (2 * place.world)) if keeps else None
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
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda i: min((i + 1) / (warmup + 1), max(0.0, (steps - i) / max(1, steps - warmup))),
        )
        self.step = 0
        self.history = History()
        self._whole = False  # whether the state is that after a step, and not saved yet

    def resume(self, folder: Path) -> None:
        if (found := checkpoint.load(folder)) is None:
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
        if self._whole:
            weights = {name: p.detach().cpu() for name, p in self.learned.items()}
            state = {
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.schedule.state_dict(),
            }
            checkpoint.save(
                folder, {"step": self.step, "weights": weights, "history": self.history, **state}
            )
            self._whole = False


def _fit_start(job: Job, loss: StreamingLoss, order: BatchOrder, kept: MainRows | None) -> None:
    """Fit where streams start to the first batches of the run. All processes compute the same."""
    if (streams := loss.model.streams) is None or streams.token is None:
        return
    moments = Moments(loss.model)
    epoch = order.from_position(0)
    for _ in range(order.per_epoch):
        for samples in pieces(next(epoch), loss.nodes):
            batch = _collated(job, samples)
            with job.place.autocast(), torch.no_grad():
                middle = (
                    kept.of(samples, batch)[0]
                    if kept is not None
                    else loss.run_main(batch.tokens)[0]
                )
            moments.add(batch, middle)
        job.report("start", min(moments.nodes, moments.wanted), moments.wanted, "")
        if moments.nodes >= moments.wanted:
            break
    if moments.nodes:
        explained = moments.fit()
        job.report(
            "start",
            1,
            1,
            f"a linear guess explains {explained:.0%} of the rows that streams stand for",
        )


def _collated(job: Job, samples: Sequence[Sample]) -> Batch:
    """A batch on the device of this process, padded with a stop token."""
    return collate(samples, job.tokenizer.stop_ids[0]).to(job.place.device)


def _backward(
    job: Job, loss: StreamingLoss, parallel: nn.Module, group: list[Sample], kept: MainRows | None
) -> Tensor:
    """Accumulate the gradients of one step over ``group``; returns this process's part of the
    losses.

    Losses are means over all processes, each of which has a share of the group: n processes compute
    what one with n times the batch does.
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
