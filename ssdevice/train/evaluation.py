"""Tokens per step of a trained adapter on dev rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ssdevice.data import Example
from ssdevice.errors import InputError
from ssdevice.model import loading
from ssdevice.model.step import StreamModel
from ssdevice.text.tokenizer import ChatTokenizer, Sample
from ssdevice.train.batches import collate
from ssdevice.train.job import Job
from ssdevice.train.loss import IGNORE, StreamingLoss, completion_rows
from ssdevice.train.options import LossWeights, TrainOptions
from ssdevice.train.samples import own_completions
from ssdevice.tree import MISS, Tree, tokens_per_step

DEV_LIMIT = 100
"""The most dev rows."""


@dataclass(frozen=True)
class DevResult:
    """β of chain:γ on the dev prompts, along the model's own greedy completions."""

    prompts: int
    tokens_per_step: float


def dev_prompts(
    options: TrainOptions, examples: list[Example], tokenizer: ChatTokenizer
) -> list[Sample]:
    """The dev prompts that leave half of ``max_length`` to the answer.

    Raises InputError if there are examples but no such prompt.
    """
    longest = options.max_length // 2
    prompts = [
        tokenizer.prompt_ids(example.prompt, instruction=options.instruction, system=example.system)
        for example in examples
    ]
    fitting = [Sample(tuple(ids), len(ids)) for ids in prompts if len(ids) <= longest]
    if examples and not fitting:
        shortest = min(len(ids) for ids in prompts)
        raise InputError(
            f"--dev {options.dev}: none of the {len(examples)} prompts has {longest} tokens or "
            f"fewer, half of --max-length; the shortest has {shortest}"
        )
    return fitting


def evaluate(job: Job, dev: list[Sample]) -> DevResult | None:
    """The DevResult of the saved adapter.

    None in processes other than the first, which only help to decode.
    """
    options = job.options
    place = job.place
    model = loading.load(job.folder, options.out, options.max_length).model.to(place.device)
    most = [options.max_length - sample.prompt for sample in dev]
    dev = own_completions(job, model.backbone, dev, most, "dev")
    if not place.main:
        return None
    with place.autocast():
        ranks = stream_ranks(model, dev)
    return DevResult(len(dev), tokens_per_step(ranks, Tree.chain(model.gamma)))


@torch.no_grad()
def stream_ranks(
    model: StreamModel, samples: Sequence[Sample], batch: int = 4
) -> list[list[list[int]]]:
    """For each sample and completion token i: the ranks ``[γ]`` of tokens i+1..i+γ.

    They are those in streams 1..γ of the row that predicted token i; 0 is the likeliest. Drafts of
    own layers follow the right tokens.
    """
    found = list[list[list[int]]]()
    device = next(model.parameters()).device
    probe = StreamingLoss(model, LossWeights(0.0, 1.0)).to(device)
    for start in range(0, len(samples), batch):
        group = samples[start : start + batch]
        data = collate(group, 0).to(device)
        read, _, rows = probe.run_main(data.tokens)
        states, rows = probe.run_own(read, rows)
        nodes = completion_rows(data.prompts, data.lengths)
        s = probe.run_streams(states, nodes, data.tokens, rows)
        logits = _draft_logits(model, s, data.tokens, nodes.clamp(min=0)).float()
        ahead = probe.ahead(data.tokens, nodes, data.lengths).flatten(1)
        ranks = ranks_of(ahead, logits).reshape(*nodes.shape, model.gamma).tolist()
        for row, sample in zip(ranks, group, strict=True):
            completion = len(sample.ids) - sample.prompt
            found.append(row[:completion])
    return found


def ranks_of(tokens: Tensor, logits: Tensor) -> Tensor:
    """The ranks of ``tokens [..]`` in ``logits [.., V]``: 0 for the likeliest, MISS for IGNORE."""
    wanted = logits.gather(-1, tokens.clamp(min=0)[..., None])
    lower_id = torch.arange(logits.shape[-1], device=logits.device) < tokens[..., None]
    likelier = (logits > wanted) | ((logits == wanted) & lower_id)  # ties go to the lowest id
    return torch.where(tokens == IGNORE, MISS, likelier.sum(-1))


def _draft_logits(model: StreamModel, s: Tensor, tokens: Tensor, nodes: Tensor) -> Tensor:
    """Logits ``[B, n * γ, V]`` of streams ``[B, n * γ, D]``.

    Where drafts follow each other, each follows the likeliest one.
    """
    finished = model.finish(s)
    if model.streams is None or model.streams.follow is None:
        return model.draft_logits(finished)
    before = tokens.gather(1, nodes + 1)
    logits = list[Tensor]()
    by_stream = finished.reshape(*nodes.shape, model.gamma, -1).unbind(2)
    for j, row in enumerate(by_stream, 1):
        embedded = model.backbone.embed(before, nodes + j)
        logits.append(model.draft_logits(model.streams.after(row, embedded)))
        before = model.draft_tokens(logits[-1].argmax(-1))
    return torch.stack(logits, dim=2).flatten(1, 2)
