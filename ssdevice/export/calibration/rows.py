"""Rows of an app going through a model layer by layer, main rows and streams alike, as in prefill
and step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ssdevice.data import Example
from ssdevice.model.attention import KeyValue
from ssdevice.model.backbone import Masks
from ssdevice.model.step import StreamModel
from ssdevice.model.visibility import additive, causal, own_streams, stream_positions, within
from ssdevice.text.tokenizer import ChatTokenizer, Sample

NODES = 64
"""At most so many tokens of a completion start streams, which have γ times as many rows."""


def tokenized(
    examples: Sequence[Example], tokenizer: ChatTokenizer, instruction: str, context: int
) -> list[Sample]:
    """Examples through the chat template, cut at ``context`` tokens."""
    rows = (tokenizer.sample(example, instruction) for example in examples)
    return [Sample(row.ids[:context], min(row.prompt, context)) for row in rows]


class Rows:
    """The hidden states of every row before the next layer: ``h [1, R, D]``, and from the MSA
    layers on streams.

    Of the drafts of own layers the first counts, which starts from a row as those after it start
    from a draft.
    """

    def __init__(self, model: StreamModel, rows: Sequence[Sample]) -> None:
        self.model = model
        self.rows = rows
        self.gamma = model.gamma if model.own is None else 1
        self.read: list[list[Tensor]] = [[] for _ in rows]  # what own layers read
        self.main: list[Tensor] = []
        self.streams: list[Tensor | None] = [None] * len(rows)
        for row in rows:
            positions = torch.arange(len(row.ids), dtype=torch.int32)[None]
            self.main.append(model.backbone.embed(torch.tensor([row.ids]), positions))

    def run(self, layer: int, advance: bool) -> None:
        """All rows through one layer; ``advance``: their states become what it gives."""
        model = self.model
        for i, row in enumerate(self.rows):
            h = self.main[i]
            if model.streams is not None and layer == model.first_msa:
                h = model.states(torch.cat(self.read[i], dim=-1) if model.own is not None else h)
                self.streams[i] = self._start(row, h)
            h, new = self._main(layer, row, h)
            if (s := self.streams[i]) is not None:
                s = self._streams(layer, row, s, new)
            if advance:
                self.main[i] = h
                self.streams[i] = s
                if model.own is not None:
                    self.read[i] += [h] * model.own.after.count(layer + 1)

    def _start(self, row: Sample, h: Tensor) -> Tensor:
        """Where streams start from ``h [1, R, D]``, ``[1, n * γ, D]``."""
        model = self.model
        nodes = _nodes(row)
        assert model.streams is not None
        after = (nodes + 1).clamp(
            max=len(row.ids) - 1
        )  # a row without a completion ends at its prompt
        tokens = torch.tensor([row.ids])[:, after]
        if model.own is not None:
            return model.draft_start(h[:, nodes], tokens, after[None], 0)
        return model.streams.start(h[:, nodes], model.gamma, model.chosen(tokens, after[None]))

    def _main(self, layer: int, row: Sample, h: Tensor) -> tuple[Tensor, list[KeyValue]]:
        backbone = self.model.backbone
        at = torch.arange(len(row.ids), dtype=torch.int32)
        window = backbone.window(layer)
        masks: Masks = {window: additive(causal(at, window)[None, None], backbone.mask_value)}
        return backbone.run(layer, layer + 1, h, backbone.rope(at[None]), masks)

    def _streams(self, layer: int, row: Sample, s: Tensor, new: Sequence[KeyValue]) -> Tensor:
        model = self.model
        backbone = self.model.backbone
        assert model.streams is not None
        nodes = _nodes(row)
        at = stream_positions(nodes.to(torch.int32)[None], self.gamma)
        window = backbone.window(layer)
        main = torch.arange(len(row.ids), dtype=torch.int32)
        seen = (main[None] <= nodes.repeat_interleave(self.gamma)[:, None]) & within(
            at[0], main, window
        )
        seen = torch.cat([seen, own_streams(len(nodes), self.gamma)], dim=1)
        masks: Masks = {window: additive(seen[None, None], backbone.mask_value)}
        context: list[list[KeyValue]] = [[] for _ in backbone.layers]
        context[layer] = list(new)
        with model.streams.rows_after(0):
            return backbone.run(layer, layer + 1, s, backbone.rope(at), masks, context)[0]


def _nodes(row: Sample) -> Tensor:
    """Row numbers from the last prompt token to the last but one token, NODES at most."""
    return torch.arange(row.prompt - 1, max(row.prompt, len(row.ids) - 1))[:NODES]
