"""How much the next token gains from the true tokens after it: equation 7 and figure 4 of the second paper.

    python -m research.peeking --model MODEL --data train.jsonl.gz --dev dev.jsonl.gz --out OUT

Row t, which chooses token t + 1, sees the γ true tokens after that one. Trains a LoRA on the next token alone, as
``sweep.py`` trains a point, in three arms: rows that see none of them; the paper's changed mask, by which a row sees
the rows of these tokens; and rows that see them without a leak. The changed mask leaks: row t + 2 has attended to row
t + 1, whose token is the one to choose. Without a leak each row has two more beside it: the token alone, seeing no
other, and a row that sees the plain rows up to t and the tokens t + 2 .. t + 1 + γ alone, which chooses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from research import answers, sweep
from ssdevice.adapters.settings import SETTINGS
from ssdevice.commands.opening import prepare_frameworks
from ssdevice.data import read_examples
from ssdevice.model import loading
from ssdevice.model.attention import KeyValue
from ssdevice.model.tokenizer import open_tokenizer
from ssdevice.model.visibility import within
from ssdevice.train.loss import StreamingLoss, completion_rows
from ssdevice.train.trainer import train

Table = Callable[[int, int], Tensor]
"""Of a sequence's length and γ: which rows see which, ``[n * S, n * S]`` bool; the last S rows choose."""


def none(length: int, gamma: int) -> Tensor:
    """Rows see the rows before them."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def ahead(length: int, gamma: int) -> Tensor:
    """``[S, S]``: row t and the tokens t + 2 .. t + 1 + γ."""
    row = torch.arange(length)
    return (row[None] - row[:, None] >= 2) & (row[None] - row[:, None] <= gamma + 1)


def changed_mask(length: int, gamma: int) -> Tensor:
    """Rows see the rows before them, and those of the tokens ahead."""
    return none(length, gamma) | ahead(length, gamma)


def without_leak(length: int, gamma: int) -> Tensor:
    """Plain rows, tokens alone, and the rows that choose."""
    before, alone, nothing = (
        none(length, gamma),
        torch.eye(length, dtype=torch.bool),
        torch.zeros(length, length).bool(),
    )
    rows = (
        (before, nothing, nothing),
        (nothing, alone, nothing),
        (before & ~alone, ahead(length, gamma), alone),
    )
    return torch.cat([torch.cat(row, dim=1) for row in rows])


ARMS: dict[str, Table] = {
    "none of them": none, "the rows of these tokens": changed_mask, "these tokens alone": without_leak,
}  # fmt: skip


class PeekingLoss(StreamingLoss):
    """The next token's loss of rows that see what ``table`` says; streams have none."""

    table: Table = staticmethod(none)

    def forward(
        self,
        tokens: Tensor,
        prompts: Tensor,
        lengths: Tensor,
        counts: Tensor | None = None,
        known: tuple[Tensor, Tensor | None, list[KeyValue]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See StreamingLoss."""
        counts = self.counts(tokens, prompts, lengths) if counts is None else counts
        found = self._main_loss(
            self.states(tokens), tokens, completion_rows(prompts, lengths), lengths
        )
        total = found if self.weights.summed else found / counts[0]
        return total, torch.nn.functional.pad(
            found.detach()[None] / counts[0], (0, self.model.gamma)
        )

    def states(self, tokens: Tensor) -> Tensor:
        """Final states ``[B, S, D]`` of the rows that choose."""
        backbone, length = self.model.backbone, tokens.shape[1]
        sees = self.table(length, self.model.gamma)
        copies = len(sees) // length
        at = torch.arange(length, dtype=torch.int32).repeat(copies)
        masks = backbone.masks(lambda window: (sees & within(at, at, window))[None, None])
        h = backbone.embed(tokens.repeat(1, copies), at.expand(len(tokens), -1))
        h, _ = backbone.run(0, backbone.num_layers, h, backbone.rope(at[None]), masks)
        return h[:, -length:]


def peeking(table: Table) -> AbstractContextManager[None]:
    """In this context the next token is trained and counted with rows that see what ``table`` says."""
    arm = type("Arm", (PeekingLoss,), {"table": staticmethod(table)})
    return answers.losing(arm)


def main(words: Sequence[str] | None = None) -> None:
    """Train the arms that are not there yet; print the loss of the next token along the dev targets, in nats."""
    args = sweep.parser(__doc__).parse_args(words)
    prepare_frameworks(args.threads)
    point = {name: getattr(args, name)[0] for name in sweep.SWEPT}
    for name, table in ARMS.items():
        out = args.out / name
        with peeking(table):
            if not (out / SETTINGS).is_file():
                train(sweep.options(args, out, point), lambda *_: None)
            model, tokenizer = (
                loading.load(args.model, out, args.max_length).model,
                open_tokenizer(args.model, out),
            )
            every = [
                tokenizer.sample(each, args.instruction)
                for each in read_examples(args.dev, args.dev_limit)
            ]
            found = {"rows see": name, "next token": answers.mean_losses(model, every)[0]}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
