"""What streams lose if they attend to the p best positions of their main row only (the successor's appendix H.1).

    python -m apps.paper.top_attention --model MODEL --adapter ADAPTER --data prompts.jsonl --contexts 256,1024

Prompts are made as long as each context by the texts of other prompts before them. The model answers greedily, and β of
chain:γ is counted along its answers, with streams that see all positions and with those that see p of them: for each
layer and each group of heads that share their keys, the positions that the main row's attention weighs most, summed
over the group. Streams also see themselves and each other, as always. The adapter was trained without this mask.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from apps.paper.answers import answered
from ssdevice.data import read_examples
from ssdevice.model import loading
from ssdevice.model.attention import Attending, attend
from ssdevice.model.step import StreamModel
from ssdevice.model.tokenizer import open_tokenizer
from ssdevice.text.tokenizer import ChatTokenizer, Sample
from ssdevice.train import loss
from ssdevice.train.evaluation import stream_ranks
from ssdevice.tree import Tree, tokens_per_step


def best_positions(asked: Attending, nodes: range, p: int) -> Tensor:
    """``[B, kv_heads, nodes, S]`` bool: the p positions that each of these main rows weighs most, by group of heads."""
    (keys,) = asked.keys
    batch, _, _, dim = asked.query.shape
    kv_heads = keys.shape[1]
    q = (asked.query[:, :, nodes.start : nodes.stop] * asked.scale).reshape(batch, kv_heads, -1, len(nodes), dim)
    scores = torch.matmul(q, keys.transpose(2, 3)[:, :, None])
    weights = torch.softmax(scores + asked.mask[:, :, None, nodes.start : nodes.stop], -1).sum(2)
    best = weights.topk(min(p, weights.shape[-1]), -1).indices
    return torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, best, True)


@contextmanager
def limited(model: StreamModel, nodes: range, p: int) -> Iterator[None]:
    """In this context streams of the main rows ``nodes``, in one sequence, see p positions of the rows before them.

    For ``StreamingLoss.run_main`` and then ``run_streams``.
    """
    backbone, by_node = model.backbone, loss.attend_by_node
    seen: list[Tensor] = []  # by MSA layer
    layers = iter(range(backbone.num_layers))
    streams = iter(range(backbone.num_layers))

    def main(asked: Attending) -> Tensor:
        if next(layers) >= model.first_msa:
            seen.append(best_positions(asked, nodes, p))
        return attend(asked)

    def stream(asked: Attending, gamma: int) -> Tensor:
        found = seen[next(streams)].repeat_interleave(gamma, dim=2)
        mask = asked.mask.expand(-1, found.shape[1], -1, -1).clone()
        mask[..., : found.shape[-1]].masked_fill_(~found, backbone.mask_value)
        return by_node(replace(asked, mask=mask), gamma)

    before = backbone.operators
    backbone.operators = replace(before, attention=main)
    try:
        with mock.patch.object(loss, "attend_by_node", stream):
            yield
    finally:
        backbone.operators = before


def tokens_a_step(model: StreamModel, samples: Sequence[Sample], p: int | None) -> float:
    """β of chain:γ along the samples' completions; ``p``: None for streams that see all positions."""
    ranks = []
    for sample in samples:
        if p is None:
            ranks += stream_ranks(model, [sample])
            continue
        with limited(model, range(sample.prompt - 1, len(sample.ids) - 1), p):
            ranks += stream_ranks(model, [sample])
    return tokens_per_step(ranks, Tree.chain(model.gamma))


def long_prompts(texts: Sequence[str], tokenizer: ChatTokenizer, context: int, count: int) -> list[list[int]]:
    """Prompts of at most ``context`` tokens: each text, with as many of the following ones before it as fit."""
    found = []
    for at in range(count):
        before = ""
        ids = tokenizer.prompt_ids(texts[at])
        for other in range(1, len(texts)):
            more = texts[(at + other) % len(texts)] + "\n\n" + before
            longer = tokenizer.prompt_ids(more + texts[at])
            if len(longer) <= context:
                before, ids = more, longer
        found.append(ids)
    return found


def main() -> None:
    """Print a line for each context."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--adapter", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--contexts", default="256,1024,2048")
    parser.add_argument("--best", default="8,64", help="p")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    contexts, limits = ([int(n) for n in text.split(",")] for text in (args.contexts, args.best))
    model = loading.load(Path(args.model), args.adapter, max(contexts) + args.max_tokens).model.eval()
    tokenizer = open_tokenizer(Path(args.model), args.adapter)
    texts = [example.prompt for example in read_examples(args.data, None, require_completion=False)]
    print(f"| context | tokens of prompts | all | {' | '.join(f'p = {p}' for p in limits)} |")
    for context in contexts:
        prompts = long_prompts(texts, tokenizer, context, args.prompts)
        samples = answered(model.backbone, tokenizer.stop_ids, prompts, [args.max_tokens] * len(prompts), slots=1)
        found = [tokens_a_step(model, samples, p) for p in (None, *limits)]
        mean = sum(map(len, prompts)) / len(prompts)
        print(f"| {context} | {mean:.0f} | {' | '.join(f'{beta:.2f}' for beta in found)} |", flush=True)


if __name__ == "__main__":
    main()
