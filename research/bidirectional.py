"""The second paper's shared mode: main rows of the top layers also see the streams of their own position (equation 3).

    python -m research.bidirectional --model MODEL --data train.jsonl.gz --dev dev.jsonl.gz --out OUT

Trains two arms as ``sweep.py`` trains a point, the first paper's shared mode and this one, and measures both. A main
row needs its streams, so they run together in training (in one pass: rows of a batch must fit) and in decoding, where a
step is ``fused`` and a plain step is the root with its γ streams. Streams that see the chosen token (g) are impossible
here: the row that chooses would see them. Prompt rows have no streams, but for the last one, which is a plain step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from research import answers, sweep
from ssdevice.commands.opening import prepare_frameworks
from ssdevice.config import Schedule
from ssdevice.data import read_examples
from ssdevice.export.parity.reference import Cache, int32
from ssdevice.model import loading
from ssdevice.model.attention import KeyValue
from ssdevice.model.step import PrefillModule, Step, StepModule, StreamModel
from ssdevice.model.tokenizer import open_tokenizer
from ssdevice.model.visibility import additive, own_streams, stream_positions
from ssdevice.text.tokenizer import Sample
from ssdevice.train.loss import IGNORE, StreamingLoss, completion_rows
from ssdevice.tree import Tree

CHUNK = 64
"""Prompt rows of a prefill call."""


class SeeingLoss(StreamingLoss):
    """``StreamingLoss`` of main rows that see their streams."""

    def forward(
        self,
        tokens: Tensor,
        prompts: Tensor,
        lengths: Tensor,
        counts: Tensor | None = None,
        known: tuple[Tensor, Tensor | None, list[KeyValue]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See StreamingLoss; without weights by reach and soft labels, which the papers do not have."""
        nodes = completion_rows(prompts, lengths)
        counts = self.counts(tokens, prompts, lengths) if counts is None else counts
        main, streams = self.together(self.run_main(tokens)[0], nodes)
        ahead = self.ahead(tokens, nodes, lengths).flatten(1)
        keep = ahead != IGNORE
        logits = self.model.draft_logits(self.model.finish(streams[keep])).float()
        each = cross_entropy(logits, ahead[keep], reduction="none")
        stream = torch.arange(self.model.gamma).expand(*nodes.shape, -1).flatten(1)[keep]
        of_main = self._main_loss(main, tokens, nodes, lengths)[None]
        sums = torch.cat([of_main, each.new_zeros(self.model.gamma).index_add(0, stream, each)])
        means = sums / counts.clamp(min=1)
        alpha = torch.full_like(counts, self.weights.stream)
        alpha[0] = self.weights.main
        return (alpha * (sums if self.weights.summed else means)).sum(), means.detach()

    def run_main(self, tokens: Tensor) -> tuple[Tensor, Tensor, list[KeyValue]]:
        """The layers below N - N_s only, of which the result is given twice; ``together`` runs the others."""
        positions, masks = self._causal(tokens)
        h = self.model.backbone.embed(tokens, positions.expand(tokens.shape[0], -1))
        h, read, _ = self.model.run_main_layers(h, positions, masks, [])
        return read, h, []

    def run_streams(
        self, states: Tensor, nodes: Tensor, tokens: Tensor, rows: Sequence[KeyValue]
    ) -> Tensor:
        """Final states ``[B, n * γ, D]`` of the streams of all ``nodes``, as ``evaluation.stream_ranks`` asks for."""
        return self.together(states, nodes)[1]

    def together(self, read: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """The MSA layers on main rows ``read [B, S, D]`` and the streams of ``nodes [B, n]`` (-1: none).

        Returns the final states of both, ``[B, S, D]`` and ``[B, n * γ, D]``.
        """
        model, at, width = self.model, nodes.clamp(min=0), read.shape[1]
        streams, value = model.streams, model.backbone.mask_value
        assert streams is not None
        row, causal = self._causal(read)
        mine = row[..., None] == nodes.repeat_interleave(model.gamma, dim=1)[:, None]
        sees = additive(mine, value)[:, None]
        own = additive(own_streams(at.shape[1], model.gamma), value).expand(len(at), 1, -1, -1)
        masks = {
            w: torch.cat(
                [
                    torch.cat([causal[w].expand(len(at), -1, -1, -1), sees], dim=3),
                    torch.cat([seen, own], dim=3),
                ],
                dim=2,
            )
            for w, seen in self._visible(at, width, model.gamma).items()
        }
        start = streams.start(
            read.gather(1, at[..., None].expand(-1, -1, read.shape[-1])), model.gamma
        )
        positions = torch.cat([row.expand(len(at), -1), stream_positions(at, model.gamma)], dim=1)
        both = torch.cat([read, start], dim=1)
        with streams.rows_after(width):
            both, _ = model.backbone.run(
                *model.drafting, both, model.backbone.rope(positions), masks
            )
        return both[:, :width], both[:, width:]


class SeeingStep(StepModule):
    """The ``fused`` step in which the main row of a node sees its own γ streams."""

    def _streams_of_main(self, size: int, gamma: int) -> Tensor:
        mine = torch.eye(size, dtype=torch.bool).repeat_interleave(gamma, dim=1)
        return additive(mine, self.model.backbone.mask_value)[None, None]


class Decoder:
    """One conversation with a model whose main rows see their streams; only main rows are committed."""

    def __init__(self, model: StreamModel, tree: Tree, context: int) -> None:
        self.prefill = PrefillModule(model.plain(), CHUNK, 1)
        self.step = SeeingStep(model, tree, tree.width, Schedule.FUSED)
        self.plain = SeeingStep(model, Tree.root_only(), tree.width, Schedule.FUSED)
        backbone = model.backbone
        rows = context + max(CHUNK, tree.emitted)
        self.cache = Cache(
            torch.zeros(len(backbone.layers), 2, 1, backbone.kv_heads, rows, backbone.head_dim)
        )
        self.none = torch.zeros(model.gamma, tree.width, dtype=torch.int32)

    @torch.no_grad()
    def start(self, prompt: Sequence[int]) -> Step:
        """Commit a prompt: the first token and the first drafts."""
        self.cache.length = 0
        for at in range(0, len(prompt) - 1, CHUNK):
            part = torch.tensor(prompt[:-1][at : at + CHUNK], dtype=torch.int32)
            padded = torch.nn.functional.pad(part, (0, CHUNK - len(part)))
            out = self.prefill(
                padded, int32(len(part)), int32(self.cache.length), self.cache.past()
            )
            self.cache.commit(out.rows, len(part))
        return self.advance(self.plain, prompt[-1], self.none)

    @torch.no_grad()
    def advance(self, step: StepModule, last: int, drafts: Tensor) -> Step:
        """One step after the token ``last``, whose accepted rows are committed."""
        out: Step = step(int32(last), drafts, int32(self.cache.length), self.cache.past())
        self.cache.commit(out.rows, int(out.count))
        return out

    def answer(
        self, prompt: Sequence[int], stop: Sequence[int], most: int, drafting: bool
    ) -> tuple[list[int], int]:
        """The greedy answer, and the number of its steps after the first token."""
        out, found, steps = self.start(prompt), list[int](), 0
        while True:
            for token in out.tokens[: int(out.count)].tolist():
                found.append(token)
                if token in stop or len(found) == most:
                    return found, steps
            step = self.step if drafting else self.plain
            out, steps = self.advance(step, found[-1], out.drafts), steps + 1


def spoken(
    model: StreamModel,
    stop: Sequence[int],
    prompts: Sequence[Sequence[int]],
    most: int,
    drafting: bool = True,
) -> list[Sample]:
    """Answers by steps of chain:γ, or by plain steps."""
    decoder = Decoder(model, Tree.chain(model.gamma), max(map(len, prompts)) + most)
    return [
        Sample((*ids, *decoder.answer(ids, stop, most, drafting)[0]), len(ids)) for ids in prompts
    ]


def seeing() -> AbstractContextManager[None]:
    """In this context main rows train and are counted with their streams in sight."""
    return answers.losing(SeeingLoss)


def main(words: Sequence[str] | None = None) -> None:
    """Train and measure what is not there yet, print the table, and compare plain steps with speculative ones."""
    args = sweep.parser(__doc__).parse_args(words)
    prepare_frameworks(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    point = {name: getattr(args, name)[0] for name in sweep.SWEPT}
    found = [
        sweep.finished(args, "main rows only", point),
        sweep.finished(args, "and their streams", point, seeing(), spoken),
    ]
    print(sweep.table(found))
    for each in found:
        print(each["name"], "β of chains:", *(f"{beta:.2f}" for beta in each["beta"].values()))

    adapter: Path = args.out / "and their streams"
    model, tokenizer = (
        loading.load(args.model, adapter, args.max_length).model,
        open_tokenizer(args.model, adapter),
    )
    every = [
        tokenizer.sample(example, args.instruction)
        for example in read_examples(args.dev, args.dev_limit)
    ]
    blind = answers.mean_losses(model, every)
    print(
        f"trained with streams in sight, without them: {', '.join(f'{loss:.3f}' for loss in blind)}"
    )
    prompts = [s.ids[: s.prompt] for s in every[:32]]
    said = partial(spoken, model, tokenizer.stop_ids, prompts, args.answer_tokens)
    same = sum(a == b for a, b in zip(said(drafting=False), said(), strict=True))
    print(f"answers by plain steps that are those of speculative ones: {same} of {len(prompts)}")


if __name__ == "__main__":
    main()
