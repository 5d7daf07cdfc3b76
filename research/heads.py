"""What Medusa's heads know of the states ahead, beside the streams of ``figures.py``: the successor's figure 5.

    python -m research.heads OUT --rows 64

OUT is that of a run of ``rivals.py``. Head j of node t stands for the row of position t + j, as stream j does: the
cosine of what its block makes of the state at t with the base's state at t + j, with the controls of ``figures.py``,
along the targets of dev rows. States are normed ones, which the LM head reads, and Medusa's block makes of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from research.dynamic import restored
from research.figures import cosines
from research.trained import Medusa, rows_at
from ssdevice.bench import report
from ssdevice.data import read_examples
from ssdevice.model.tokenizer import open_tokenizer
from ssdevice.train.batches import Batch, collate, tokenize
from ssdevice.train.loss import IGNORE, completion_rows


@torch.no_grad()
def similarities(drafter: Medusa, batch: Batch) -> dict[str, list[float]]:
    """The cosines, and shares of right tokens, of each head."""
    base, main = drafter.base, drafter.base.main(batch.tokens)
    nodes = completion_rows(batch.prompts, batch.lengths)
    wanted, here = base.ahead(batch, nodes), rows_at(main.states, nodes.clamp(min=0))
    found: dict[str, list[float]] = {}
    for j, (block, head) in enumerate(zip(drafter.blocks, drafter.heads, strict=True)):
        keep = wanted[:, :, j] != IGNORE
        token, true = wanted[:, :, j][keep], rows_at(main.states, nodes.clamp(min=0) + j + 1)[keep]
        mine = block(here[keep])
        measured = {
            **cosines(mine, here[keep], true),
            "right tokens": base.logits(mine, head).argmax(-1) == token,
            "right tokens of the main row": base.logits(true).argmax(-1) == token,
        }
        for name, values in measured.items():
            found.setdefault(name, []).append(values.float().mean().item())
    return found


def main(words: Sequence[str] | None = None) -> None:
    """Print a row for each number, with a column for each head."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=64)
    args = parser.parse_args(words)
    drafter, options = restored(args.out, "Medusa-1")
    assert isinstance(drafter, Medusa)
    tokenizer = open_tokenizer(Path(options.base))
    examples = read_examples(options.dev, args.rows)
    samples, _ = tokenize(examples, tokenizer, options.instruction, options.max_length)
    found = similarities(drafter, collate(samples, tokenizer.stop_ids[0]))
    rows = [[name, *(f"{value:.2f}" for value in values)] for name, values in found.items()]
    print("\n".join(report.table(["head", *map(str, range(1, options.gamma + 1))], *rows)).strip())


if __name__ == "__main__":
    main()
