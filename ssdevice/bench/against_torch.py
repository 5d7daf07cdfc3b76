"""Compares a bundle's answers with the torch model it was made from. Needs the export extra."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from ssdevice.adapters.settings import AdapterFolder, BaseIdentity
from ssdevice.bundle.folder import Bundle
from ssdevice.bundle.manifest import AdapterKind, Precision
from ssdevice.errors import InputError
from ssdevice.export.target import export_target
from ssdevice.model.loading import read_config, resolve_folder
from ssdevice.model.step import StreamModel
from ssdevice.progress import Report, track
from ssdevice.train.loss import StreamingLoss
from ssdevice.train.options import LossWeights

Texts = Sequence[Sequence[int]]
# These bounds are below 1 because the reference and a quantized graph round at different places.
LEAST_AGREEMENT = {
    Precision.FP32: 1.0,
    Precision.FP16: 0.99,
    Precision.INT8: 0.97,
    Precision.INT4: 0.85,
}
TIES = {
    Precision.FP32: 1e-3,
    Precision.FP16: 0.1,
    Precision.INT8: 0.5,
    Precision.INT4: 2.0,
    Precision.PALETTE4: 2.0,
}
"""Margins of the reference's logits up to which two tokens are nearly tied, by precision."""


@dataclass(frozen=True)
class Agreement:
    """How many of a bundle's tokens the reference would have chosen too.

    - ``agreeing``: of ``tokens``, those that are the reference's choice.
    - ``near_ties``: of the others, those that are its second choice within TIES.
    - ``largest_margin``: of a token that it would not have chosen.
    - ``simulated``: whether the reference rounds as the bundle does.
    """

    tokens: int
    agreeing: int
    near_ties: int
    largest_margin: float
    simulated: bool
    precision: Precision

    @property
    def share(self) -> float:
        """Share of tokens that agree or are near-ties; 1 if there are none."""
        if not self.tokens:
            return 1.0
        return (self.agreeing + self.near_ties) / self.tokens

    def faults(self) -> list[str]:
        """What exceeds the bounds of the precision, one sentence each."""
        found = []
        least = LEAST_AGREEMENT.get(self.precision, 0.85)
        tie = TIES[self.precision]
        # Even in fp32 a near-tie may go either way, so there only the margin decides.
        if self.share < least and self.precision is not Precision.FP32:
            found.append(
                f"torch reference: {self.share:.1%} of tokens agree or are near-ties, "
                f"at least {least:.0%} must"
            )
        if self.simulated and self.largest_margin > tie:
            found.append(
                f"torch reference: prefers another token by {self.largest_margin:.3g}, "
                f"at most {tie} is a near-tie"
            )
        return found


def reference_folder(bundle: Bundle, app: str | None, model: str, adapter: Path | None) -> Path:
    """The folder of ``model``.

    Raises InputError, before anything runs, for a model that is not the bundle's base or an adapter
    that does not fit it or the app.
    """
    folder = resolve_folder(model)
    own = bundle.app(app)
    identity = BaseIdentity.of(folder, read_config(folder))
    bundle.check_base(f"--model {model}", identity.sha256)
    if adapter is None and own.kind is not AdapterKind.BASE:
        raise InputError(
            f"--model {model} needs --adapter: app {own.name!r} of {bundle.folder} has one"
        )
    if adapter is not None and own.kind is AdapterKind.BASE:
        raise InputError(
            f"--adapter {adapter}: app {own.name!r} of {bundle.folder} is the base without one"
        )
    if adapter is not None:
        found = AdapterFolder.open(adapter, identity)
        same_streams = found.mode == own.mode and found.msa_layers == own.msa_layers
        if not same_streams or found.rank() != own.rank:
            raise InputError(
                f"--adapter {adapter}: app {own.name!r} of {bundle.folder} "
                "was made from another adapter"
            )
    return folder


def agreement(
    bundle: Bundle,
    app: str | None,
    model: StreamModel,
    prompts: Texts,
    answers: Texts,
    report: Report,
) -> Agreement:
    """How many tokens the torch model would have chosen too.

    Each is chosen after the bundle's own answer so far. ``app``: of the bundle. ``model``: its base
    and adapter, see ``reference_folder``.
    """
    rounded, precision = export_target(bundle.manifest.target).as_stored(bundle, app, model)
    tokens = 0
    agreeing = 0
    near_ties = 0
    worst = 0.0
    pairs = list(zip(prompts, answers, strict=True))
    with rounded or nullcontext(), torch.no_grad():
        for prompt, answer in track(report, "torch reference", pairs):
            logits = main_logits(model, [*prompt, *answer[:-1]])[len(prompt) - 1 :]
            agree, near, margin = judge(logits, torch.tensor(answer), TIES[precision])
            tokens += len(answer)
            agreeing += agree
            near_ties += near
            worst = max(worst, margin)
    return Agreement(
        tokens=tokens,
        agreeing=agreeing,
        near_ties=near_ties,
        largest_margin=worst,
        simulated=rounded is not None or precision is Precision.FP32,
        precision=precision,
    )


def judge(logits: torch.Tensor, chosen: torch.Tensor, tie: float) -> tuple[int, int, float]:
    """How many of ``chosen [n]`` are first in ``logits [n, V]``, near-ties, and the largest margin.

    A near-tie is the second choice: where many logits are close, distance alone would excuse a
    wrong bundle.
    """
    best, first = logits.max(dim=-1)
    own = logits.gather(1, chosen[:, None])
    margins = best - own[:, 0]
    agree = first == chosen
    near = ~agree & ((logits > own).sum(dim=-1) <= 1) & (margins <= tie)
    return int(agree.sum()), int(near.sum()), float(margins.max())


def main_logits(model: StreamModel, ids: Sequence[int]) -> torch.Tensor:
    """Logits ``[len(ids), V]`` of the main rows of a whole text at once."""
    loss = StreamingLoss(model, LossWeights(main=1.0, stream=0.0))
    _, h, _ = loss.run_main(torch.tensor([list(ids)]))
    return model.backbone.head(h)[0]
