"""Compares a bundle's answers with the torch model it was made from. Needs the export extra."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from ssdevice.bench.comparable import check_base
from ssdevice.bundle.folder import Bundle
from ssdevice.bundle.manifest import AdapterKind, Precision
from ssdevice.errors import InputError
from ssdevice.export.target import export_target
from ssdevice.model.loading import load, resolve_folder
from ssdevice.model.step import StreamModel
from ssdevice.progress import Report, track
from ssdevice.train.loss import LossWeights, StreamingLoss

# The reference and a quantized graph round at different places. Ties are margins of the reference's logits.
LEAST_AGREEMENT = {Precision.FP32: 1.0, Precision.FP16: 0.99, Precision.INT8: 0.97, Precision.INT4: 0.85}
TIES = {Precision.FP32: 1e-3, Precision.FP16: 0.1, Precision.INT8: 0.5, Precision.INT4: 2.0}


@dataclass(frozen=True)
class Agreement:
    """``agreeing`` of ``tokens`` are the reference's choice; ``worst`` is the largest margin of one that is not.

    ``simulated``: whether the reference rounds as the bundle does.
    """

    tokens: int
    agreeing: int
    worst: float
    simulated: bool
    precision: Precision

    @property
    def share(self) -> float:
        """Share of tokens that agree; 1 if there are none."""
        return self.agreeing / self.tokens if self.tokens else 1.0

    def faults(self) -> list[str]:
        """What exceeds the bounds of the precision, one sentence each."""
        found = []
        least = LEAST_AGREEMENT.get(self.precision, 0.85)
        tie = TIES.get(self.precision, 2.0)
        # Even in fp32 a near-tie may go either way, so there only the margin decides.
        if self.share < least and self.precision is not Precision.FP32:
            found.append(f"torch reference: {self.share:.1%} of tokens agree, at least {least:.0%} must")
        if self.simulated and self.worst > tie:
            found.append(f"torch reference: prefers another token by {self.worst:.3g}, at most {tie} is a near-tie")
        return found


def agreement(
    bundle: Bundle,
    app: str | None,
    model: str,
    adapter: Path | None,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    report: Report,
) -> Agreement:
    """How many tokens the torch model would have chosen too, each after the bundle's own answer so far.

    ``app``: name of the bundle's app; ``adapter``: its folder, None for the base. Raises InputError for a model that
    is not the bundle's base.
    """
    folder = resolve_folder(model)
    merged = bundle.app(app).kind is AdapterKind.MERGED
    loaded = load(folder, adapter, bundle.geometry.context, merge=merged)
    check_base(f"--model {model}", loaded.identity.sha256, bundle)
    if adapter is None and bundle.app(app).kind is not AdapterKind.BASE:
        raise InputError(f"--model {model} needs --adapter: app {bundle.app(app).name!r} of {bundle.folder} has one")
    rounded, precision = export_target(bundle.manifest.target).as_stored(bundle, app, loaded.model)
    tokens = agreeing = 0
    worst = 0.0
    with rounded or nullcontext(), torch.no_grad():
        for prompt, answer in track(report, "torch reference", list(zip(prompts, answers, strict=True))):
            logits = main_logits(loaded.model, [*prompt, *answer[:-1]])[len(prompt) - 1 :]
            chosen = torch.tensor(answer)
            best, first = logits.max(dim=-1)
            margins = best - logits.gather(1, chosen[:, None])[:, 0]
            tokens += len(answer)
            agreeing += int((first == chosen).sum())
            worst = max(worst, float(margins.max()))
    exact = rounded is not None or precision is Precision.FP32
    return Agreement(tokens, agreeing, worst, exact, precision)


def main_logits(model: StreamModel, ids: Sequence[int]) -> torch.Tensor:
    """Logits ``[len(ids), V]`` of the main rows of a whole text at once."""
    _, h, _ = StreamingLoss(model, LossWeights(main=1.0, stream=0.0)).run_main(torch.tensor([list(ids)]))
    return model.backbone.head(h)[0]
