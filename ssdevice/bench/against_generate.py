"""Compares a lossless bundle's answers with ``generate`` of the untouched base, without any of our own model code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ssdevice.bench.equality import first_difference
from ssdevice.export.crosscheck.generation import neutral
from ssdevice.model.loading import load_hf, resolve_folder
from ssdevice.progress import Report, track

TIE = 1e-3
"""In float32, two tokens whose logits are at most this far apart may swap."""


@dataclass
class Generated:
    """``differing``: (prompt, token, distance of the two logits in the base) at the first difference of an answer."""

    prompts: int
    differing: list[tuple[int, int, float]] = field(default_factory=list)

    def faults(self) -> list[str]:
        """Differences that are not near-ties, one sentence each."""
        return [
            f"transformers generate: prompt {prompt + 1} differs at token {token + 1}, {distance:.3g} apart"
            for prompt, token, distance in self.differing
            if distance > TIE
        ]


@torch.no_grad()
def against_generate(
    model: str,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    stops: Sequence[int],
    max_tokens: int,
    context: int,
    report: Report,
) -> Generated:
    """Compare answers with greedy ``generate`` of the model in ``model``, prompt by prompt.

    ``context``: of the bundle, at which an answer ends whether or not the model has finished.
    """
    hf = load_hf(resolve_folder(model))
    hf.generation_config = neutral(hf.generation_config)  # settings that bundles do not apply are notes
    found = Generated(len(prompts))
    pairs = list(zip(prompts, answers, strict=True))
    for number, (prompt, answer) in enumerate(track(report, "transformers generate", pairs)):
        ids = torch.tensor([list(prompt)])
        out = hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=min(max_tokens, context + 1 - len(prompt)),  # the last token has no row
            do_sample=False,
            eos_token_id=list(stops),
            pad_token_id=stops[0],
        )
        theirs = out[0, len(prompt) :].tolist()
        if theirs == list(answer):
            continue
        at, mine, other = first_difference(answer, theirs)
        distance = float("inf")
        if at < min(len(answer), len(theirs)):  # else one of them ended early
            logits = hf(torch.tensor([[*prompt, *answer[:at]]])).logits[0, -1]
            distance = float((logits[mine] - logits[other]).abs())
        found.differing.append((number, at, distance))
    return found
