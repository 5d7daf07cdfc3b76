"""Logits of our model beside those of transformers, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ssdevice.config import Schedule
from ssdevice.errors import ParityError
from ssdevice.export.parity.reference import Cache, int32, jittered
from ssdevice.model.mapped import released_after
from ssdevice.model.step import PrefillModule, StepModule, StreamModel
from ssdevice.tree import Tree

SAME = 1e-4
"""Logits that differ by at most so many standard deviations of their row are the same in float32."""
JITTER, TWIN = 1e-6, 4.0
"""Beyond that they may differ by TWIN times what a random change of JITTER of every product makes of them.

Float32 rounds to 6e-8. In models of 31 families of 3 to 48 layers, right logits differ by 0.02 to 0.6 of that change.
"""
CHUNK = 16


@dataclass(frozen=True)
class Expected:
    """What transformers computes of a text: ``logits [n, V]`` at ``tokens[first:]``.

    ``chosen``: the n tokens that ``generate`` puts there; None: it was not asked.
    """

    tokens: Sequence[int]
    first: int
    logits: Tensor
    chosen: Sequence[int] | None = None


def compare_logits(model: StreamModel, expected: Expected, whose: str) -> None:
    """Raise ParityError if the model has other logits, or if one of the ``chosen`` tokens is not the likeliest."""
    ours, first = our_logits(model, expected.tokens, expected.first), expected.first
    size = expected.logits.std(-1).clamp(min=torch.finfo(torch.float32).tiny)
    off = (ours - expected.logits).abs().amax(-1) / size
    allowed = SAME
    if not bool((off <= allowed).all()):  # also if there is a NaN
        with jittered(model, JITTER, torch.Generator().manual_seed(0)):
            twin = our_logits(model, expected.tokens, first)
        allowed = max(SAME, TWIN * float(((twin - ours).abs().amax(-1) / size).max()))
    for row, value in enumerate(off.tolist()):
        if not value <= allowed:
            again = float(((our_logits(model, expected.tokens, first) - ours).abs().amax(-1) / size).max())
            if again > SAME:
                raise ParityError(
                    f"{whose}: the same logits, computed twice, differ by {again:.2g} of their standard deviation: "
                    "torch or this machine is at fault, not the model; try again"
                )
            raise ParityError(
                f"{whose}: the logits at token {first + row + 1} of a text of {len(expected.tokens)} differ from those "
                f"of transformers by {value:.2g} of their standard deviation, allowed is {allowed:.2g}: ssdevice does "
                "not compute this model as transformers does"
            )
    if expected.chosen is None:
        return
    best, likeliest = ours.max(-1)
    short = (best - ours.gather(1, torch.tensor(expected.chosen)[:, None])[:, 0]) / size
    for row, value in enumerate(short.tolist()):
        if not value <= 2 * allowed:
            raise ParityError(
                f"{whose}: generate(do_sample=False) of transformers gives token {expected.chosen[row]} as number "
                f"{row + 1} of its answer, the likeliest is {int(likeliest[row])}: something in the model's folder "
                "changes what generate does, and ssdevice does not know it"
            )


@torch.no_grad()
def our_logits(model: StreamModel, tokens: Sequence[int], first: int) -> Tensor:
    """Logits ``[n, V]`` at ``tokens[first:]``: prefill in chunks of those before, then a step with them as drafts."""
    backbone = model.backbone
    size = (len(backbone.layers), 2, 1, backbone.kv_heads, first + CHUNK, backbone.head_dim)
    cache, prefill = Cache(torch.zeros(size)), PrefillModule(model, CHUNK, 1)
    root, *drafts = tokens[first:]
    step, given = StepModule(model, Tree.chain(len(drafts)), 1, Schedule.DEFERRED), torch.tensor(drafts).int()[:, None]
    with released_after((*backbone.layers, backbone.lm_head)):
        for at in range(0, first, CHUNK):
            part = list(tokens[at : min(at + CHUNK, first)])
            ids = torch.tensor(part + [0] * (CHUNK - len(part)), dtype=torch.int32)
            cache.commit(prefill(ids, int32(len(part)), int32(at), cache.past()).rows, len(part))
        logits: Tensor = step(int32(root), given, int32(first), cache.past()).logits
    return logits
