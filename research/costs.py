"""Parameters and floating-point operations of each way to draft: the successor's figures 8 and 9 for a model's folder.

    python -m research.costs models/base-7m --context 512

Counted from the shape in ``config.json``, for decoders of Llama's kind: products of matrices, and of attention the
scores and sums over all rows that are there; no norms, activations or rotations. For one chain of γ drafts after
``--context`` rows: what a draft costs (with the head, of all tokens), and what each verified row costs besides.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssdevice.bench import report

TOP = 64
"""Positions that a stream sees by the successor's appendix H.1."""


@dataclass(frozen=True)
class Cost:
    """``parameters`` that are added; operations of a ``draft`` of γ tokens and of each verified ``row``."""

    parameters: int
    draft: int
    row: int = 0


class Shape:
    """The sizes of a decoder in which ``context`` rows are there."""

    def __init__(self, config: dict[str, Any], context: int, gamma: int = 4) -> None:
        self.width, self.inner = config["hidden_size"], config["intermediate_size"]
        self.layers, self.vocab = config["num_hidden_layers"], config["vocab_size"]
        self.dim = config.get("head_dim") or self.width // config["num_attention_heads"]
        self.read = config["num_attention_heads"] * self.dim  # the width of queries
        self.kept = (
            config.get("num_key_value_heads", config["num_attention_heads"]) * self.dim
        )  # of keys, of values
        self.context, self.gamma = context, gamma

    @property
    def attention(self) -> int:
        """Weights of a layer's attention."""
        return 2 * self.width * (self.read + self.kept)

    @property
    def weights(self) -> int:
        """Weights of a layer's products."""
        return self.attention + 3 * self.width * self.inner

    @property
    def head(self) -> int:
        """Operations of the LM head on one row."""
        return 2 * self.width * self.vocab

    def seen(self, rows: int, keys: int) -> int:
        """Operations of attention itself in a layer."""
        return 4 * rows * keys * self.read

    def layer(self, rows: int, keys: int) -> int:
        """Operations of a layer on ``rows`` that see ``keys`` rows."""
        return 2 * rows * self.weights + self.seen(rows, keys)

    def plain(self) -> int:
        """Operations of the model itself on one row."""
        return self.layers * self.layer(1, self.context) + self.head


def bpd(s: Shape) -> Cost:
    """2 γ D F (1 + γ) products' operations besides the heads; see ``trained.py``, as for the next ones."""
    inner, out = s.gamma * s.inner, s.gamma * s.width
    return Cost(
        (s.width + 1) * inner + (inner + 1) * out, 2 * (s.width + out) * inner + s.gamma * s.head
    )


def medusa(s: Shape) -> Cost:
    block = s.width * (s.width + 1)
    return Cost(s.gamma * (block + s.width * s.vocab), s.gamma * (2 * s.width**2 + s.head))


def hydra(s: Shape, depth: int = 1, prefix: bool = False) -> Cost:
    first = [2 * (j + 1) * s.width**2 for j in range(1, s.gamma + 1)]  # with the linear that skips
    deeper = (depth - 1) * s.width**2
    parameters = sum(first) + s.gamma * (
        2 * s.width + deeper + (depth - 1) * s.width + s.width * s.vocab
    )
    draft = 2 * sum(first) + s.gamma * (2 * deeper + s.head)
    if not prefix:
        return Cost(parameters, draft)
    return Cost(parameters + s.weights + 2 * s.width, draft, s.layer(1, s.context))


def hydra_plus_plus(s: Shape) -> Cost:
    return hydra(s, 4, True)


def eagle(s: Shape) -> Cost:
    joined = 2 * s.width**2
    later = sum(
        2 * joined + s.layer(1, s.context + j) for j in range(1, s.gamma)
    )  # the first is its row's
    row = 2 * joined + s.layer(1, s.context)
    return Cost(joined + s.width + s.weights + s.width, later + s.gamma * s.head, row)


def mixture(s: Shape, upper: int) -> Cost:
    """A verified row costs layer self-attention; each draft self-attention, cross-attention and the upper layers."""
    kept, own, pair = s.dim * max(1, s.width // (8 * s.dim)), s.width // 8, 2 * s.kept
    tokens = 2 * s.width * (s.read + kept) + 3 * s.width * own
    depths = pair * (2 * pair + 2 * s.kept) + 3 * pair * pair
    across = 2 * s.width * s.read + 3 * s.width * (s.width * 3 // 4)
    norms = 2 * (2 * s.width + pair)
    each = 2 * (tokens + across) + 2 * s.seen(1, s.context)
    above = upper * s.layer(s.gamma, s.context + s.gamma)
    row = s.layers * (2 * depths + 4 * s.layers * pair)
    return Cost(tokens + depths + across + norms, s.gamma * (each + s.head) + above, row)


def streams(s: Shape, top: int = 4, rank: int = 8, token: int = 256) -> Cost:
    """Ours, lossless: adapters on all linears, and g."""
    sizes = 2 * (s.width + s.read) + 2 * (s.width + s.kept) + 3 * (s.width + s.inner)
    g = token * (2 + s.gamma) * s.width
    rows = top * (s.layer(s.gamma, s.context + s.gamma) + 2 * s.gamma * rank * sizes)
    return Cost(s.gamma * s.width + top * rank * sizes + g, 2 * g + rows + s.gamma * s.head)


def streams_of_the_paper(
    s: Shape, top: int = 4, rank: int = 8, positions: int | None = None
) -> Cost:
    """The successor's lossless mode: an adapter in the MLP's place; ``positions``: the most that a stream sees."""
    keys = min(s.context, positions or s.context) + s.gamma
    rows = top * (2 * s.gamma * (s.attention + 2 * s.width * rank) + s.seen(s.gamma, keys))
    return Cost(s.gamma * s.width + top * 2 * s.width * rank, rows + s.gamma * s.head)


def draft_layers(s: Shape) -> Cost:
    """Ours, one layer of its own."""
    later = sum(2 * s.width**2 + s.layer(1, s.context + j) for j in range(1, s.gamma + 1))
    parameters = s.weights + 4 * s.width**2 + 7 * s.width + s.gamma * s.width
    return Cost(parameters, later + s.gamma * s.head, 6 * s.width**2 + s.layer(1, s.context))


def second_model(s: Shape, layers: int = 4) -> Cost:
    """A draft model as wide as the model, which shares nothing with it; its head is its embedding."""
    parameters = layers * (s.weights + 2 * s.width) + s.width + s.width * s.vocab
    later = sum(layers * s.layer(1, s.context + j) for j in range(1, s.gamma + 1))
    return Cost(parameters, later + s.gamma * s.head)


METHODS = {
    "BPD": bpd, "Medusa-1": medusa, "Hydra": hydra, "Hydra++": hydra_plus_plus, "EAGLE": eagle,
    "MoA TLI 0": lambda s: mixture(s, 0), "MoA TLI 1": lambda s: mixture(s, 1), "MoA TLI 3": lambda s: mixture(s, 3),
    "our streams": streams, "the paper's streams": streams_of_the_paper,
    f"the same, {TOP} positions": lambda s: streams_of_the_paper(s, positions=TOP),
    "our draft layers": draft_layers, "a draft model of 4 layers": second_model,
}  # fmt: skip


def table(shape: Shape) -> str:
    """A row for each method; operations in millions and as shares of the model's own on one row."""
    plain = shape.plain()
    head = [
        "method",
        "parameters added",
        "a draft, MFLOPs",
        "of a plain token",
        "without the head",
        "a verified row",
    ]
    rows = []
    for name, method in METHODS.items():
        cost = method(shape)
        bare = cost.draft - shape.gamma * shape.head
        shares = (f"{part / plain:.1%}" for part in (cost.draft, bare, cost.row))
        rows.append([name, f"{cost.parameters:,}", f"{cost.draft / 1e6:,.1f}", *shares])
    return "\n".join(report.table(head, *rows)).strip()


def main(words: Sequence[str] | None = None) -> None:
    """Print the table of a folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--gamma", type=int, default=4)
    args = parser.parse_args(words)
    shape = Shape(json.loads((args.model / "config.json").read_text()), args.context, args.gamma)
    print(f"a plain token: {shape.plain() / 1e6:,.1f} MFLOPs\n\n{table(shape)}")


if __name__ == "__main__":
    main()
