"""What streams lose if they attend to the p best positions of their main row only (the successor's appendix H.1).

    python -m research.top_attention --model MODEL --adapter ADAPTER --data prompts.jsonl --contexts 256,1024

Prompts are made as long as each context by the texts of other prompts before them. The model answers greedily, and β of
chain:γ is counted along its answers, with streams that see all positions and with those that see p of them: for each
layer and each group of heads that share their keys, the positions that the main row's attention weighs most, summed
over the group. Streams also see themselves and each other, as always. The adapter was trained without this mask;
``top_trained.py`` trains with it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from research import answers
from research.answers import answered
from ssdevice.data import read_examples
from ssdevice.model import loading
from ssdevice.model.attention import Attending, KeyValue, attend
from ssdevice.model.step import StreamModel
from ssdevice.model.tokenizer import open_tokenizer
from ssdevice.text.tokenizer import ChatTokenizer, Sample
from ssdevice.train import evaluation, loss
from ssdevice.train.loss import StreamingLoss
from ssdevice.tree import Tree, tokens_per_step


def best_positions(asked: Attending, nodes: Tensor, p: int) -> Tensor:
    """``[B, kv_heads, n, S]`` bool: the p positions that each main row of ``nodes [B, n]`` weighs most, by group of
    heads."""
    (keys,) = asked.keys
    batch, heads, _, dim = asked.query.shape
    kv_heads, width = keys.shape[1], keys.shape[2]
    q = asked.query.gather(2, nodes[:, None, :, None].expand(-1, heads, -1, dim)) * asked.scale
    scores = torch.matmul(
        q.reshape(batch, kv_heads, -1, nodes.shape[1], dim), keys.transpose(2, 3)[:, :, None]
    )
    mask = asked.mask.expand(batch, -1, -1, -1).gather(
        2, nodes[:, None, :, None].expand(-1, 1, -1, width)
    )
    weights = torch.softmax(scores + mask[:, :, None], -1).sum(2)
    best = weights.topk(min(p, width), -1).indices
    return torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, best, True)


class LimitedLoss(StreamingLoss):
    """The product's loss with streams that see ``best`` positions of the main rows before them."""

    best = 64

    def forward(
        self,
        tokens: Tensor,
        prompts: Tensor,
        lengths: Tensor,
        counts: Tensor | None = None,
        known: tuple[Tensor, Tensor | None, list[KeyValue]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See StreamingLoss; main rows that are ``known`` run again, for what they weigh was not kept."""
        return super().forward(tokens, prompts, lengths, counts)

    def run_main(self, tokens: Tensor) -> tuple[Tensor, Tensor, list[KeyValue]]:
        """See StreamingLoss; keeps what each layer's attention was asked."""
        self.asked = list[Attending]()

        def kept(asked: Attending) -> Tensor:
            self.asked.append(asked)
            return attend(asked)

        backbone, before = self.model.backbone, self.model.backbone.operators
        backbone.operators = replace(before, attention=kept)
        try:
            return super().run_main(tokens)
        finally:
            backbone.operators = before

    def run_streams(
        self, states: Tensor, nodes: Tensor, tokens: Tensor, rows: Sequence[KeyValue]
    ) -> Tensor:
        """See StreamingLoss."""
        model, by_node = self.model, loss.attend_by_node
        with torch.no_grad():
            every = [
                best_positions(asked, nodes.clamp(min=0), self.best)
                for asked in self.asked[model.first_msa :]
            ]
        layers = iter(every)

        def stream(asked: Attending, gamma: int) -> Tensor:
            found = next(layers).repeat_interleave(gamma, dim=2)
            mask = asked.mask.expand(len(found), found.shape[1], -1, -1).clone()
            mask[..., : found.shape[-1]].masked_fill_(~found, model.backbone.mask_value)
            return by_node(replace(asked, mask=mask), gamma)

        with mock.patch.object(loss, "attend_by_node", stream):
            return super().run_streams(states, nodes, tokens, rows)


def limited(p: int | None) -> AbstractContextManager[None]:
    """In this context streams are trained and counted with p positions of the rows before them (None: all)."""
    return nullcontext() if p is None else answers.losing(type("Arm", (LimitedLoss,), {"best": p}))


def tokens_a_step(model: StreamModel, samples: Sequence[Sample], p: int | None) -> float:
    """β of chain:γ along the samples' completions; ``p``: None for streams that see all positions."""
    with limited(p):
        return tokens_per_step(evaluation.stream_ranks(model, samples), Tree.chain(model.gamma))


def long_prompts(
    texts: Sequence[str], tokenizer: ChatTokenizer, context: int, count: int
) -> list[list[int]]:
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    model = loading.load(
        Path(args.model), args.adapter, max(contexts) + args.max_tokens
    ).model.eval()
    tokenizer = open_tokenizer(Path(args.model), args.adapter)
    texts = [example.prompt for example in read_examples(args.data, None, require_completion=False)]
    print(f"| context | tokens of prompts | all | {' | '.join(f'p = {p}' for p in limits)} |")
    for context in contexts:
        prompts = long_prompts(texts, tokenizer, context, args.prompts)
        samples = answered(
            model.backbone, tokenizer.stop_ids, prompts, [args.max_tokens] * len(prompts), slots=1
        )
        found = [tokens_a_step(model, samples, p) for p in (None, *limits)]
        mean = sum(map(len, prompts)) / len(prompts)
        print(
            f"| {context} | {mean:.0f} | {' | '.join(f'{beta:.2f}' for beta in found)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
