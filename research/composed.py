"""Tokens/s of trained rivals from measured parts: β, a step of the base, and the products of a draft.

    python -m research.composed models/base-7m RESULTS INT4-BUNDLE INT8-BUNDLE

RESULTS is what ``rivals.py`` writes; the bundles are of the base without streams and with ``--tree chain:4``, whose
step of γ + 1 rows is timed whole. A draft is timed as one graph of its products by the engine's kernels, at the sizes
of its weights; heads have eight bits in both. Norms, activations, attention's own sums and the loop between drafts are
left out, which favours the rivals; the row of plain decoding says which part of a call its products are. CPU time of
one thread.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch

from research.costs import Shape
from research.methods import lines
from research.rows import in_turns, timed
from ssdevice.bench import report
from ssdevice.export.onnx.editor import OPSET, Editor
from ssdevice.export.onnx.files import IR_VERSION
from ssdevice.export.onnx.functions import row_form
from ssdevice.export.onnx.quantization import INT4, INT8, initializers
from ssdevice.export.weights import Part, Role, Stored
from ssdevice.runtime.onnx import kernels
from ssdevice.runtime.onnx.engine import PROVIDER

Size = tuple[int, int, int]
"""Rows, inputs and outputs of a product."""
Draft = tuple[list[Size], list[Size]]
"""The products of a draft: of layers, and of heads."""
PLAIN = "plain"


class Sizes(Shape):
    """The products of a call; ``verified``: rows of a step that were accepted, which some compute again; ``drafted``:
    by level, rows that are drafted after, from the last accepted one on (None: a chain of γ)."""

    verified = 2
    drafted: Sequence[int] | None = None

    @property
    def levels(self) -> Sequence[int]:
        """``drafted``, or that of a chain."""
        return [1] * self.gamma if self.drafted is None else self.drafted

    def layer(self, rows: int) -> list[Size]:  # type: ignore[override]
        """A layer of the base."""
        merged = (rows, self.width, self.read + 2 * self.kept)
        return [merged, (rows, self.read, self.width), *self.mlp(rows, self.width, self.inner)]

    def mlp(self, rows: int, width: int, inner: int) -> list[Size]:
        """A gated one."""
        return [(rows, width, 2 * inner), (rows, inner, width)]

    def heads(self) -> list[Size]:
        """Heads of all guesses, which wait for each other or have weights of their own by level."""
        return [(rows, self.width, self.vocab) for rows in self.levels]


def bpd(s: Sizes) -> Draft:
    inner = s.gamma * s.inner
    return [(1, s.width, inner), (1, inner, s.gamma * s.width)], [(len(s.levels), s.width, s.vocab)]


def medusa(s: Sizes) -> Draft:
    return [(1, s.width, s.width)] * len(s.levels), [(1, s.width, s.vocab)] * len(s.levels)


def hydra(s: Sizes) -> Draft:
    return [(rows, (j + 1) * s.width, 2 * s.width) for j, rows in enumerate(s.levels, 1)], s.heads()


def hydra_plus_plus(s: Sizes) -> Draft:
    deeper = [(rows, s.width, s.width) for rows in s.levels for _ in range(3)]
    return [*s.layer(s.verified), *hydra(s)[0], *deeper], s.heads()


def eagle(s: Sizes) -> Draft:
    levels = [s.verified, *s.levels[1:]]
    return [
        size for rows in levels for size in ((rows, 2 * s.width, s.width), *s.layer(rows))
    ], s.heads()


def mixture(s: Sizes, upper: int) -> Draft:
    """Layer self-attention on all layers of the verified rows; then each draft's attentions and upper layers."""
    own, pair, rows = s.dim * max(1, s.width // (8 * s.dim)), 2 * s.kept, s.verified * s.layers
    depths = [(rows, pair, pair), (rows, pair, pair), (rows, pair, pair), *s.mlp(rows, pair, pair)]

    def level(n: int) -> list[Size]:
        tokens = [
            (n, s.width, s.read + 2 * own),
            (n, s.read, s.width),
            *s.mlp(n, s.width, s.width // 8),
        ]
        across = [(n, s.width, s.read), (n, s.read, s.width), *s.mlp(n, s.width, s.width * 3 // 4)]
        return [*tokens, *across, *s.layer(n) * upper]

    return [*depths, *(size for n in s.levels for size in level(n))], s.heads()


DRAFTS = {
    "BPD": bpd, "Medusa-1": medusa, "Hydra": hydra, "Hydra++": hydra_plus_plus, "EAGLE": eagle,
    "MoA TLI 0": lambda s: mixture(s, 0), "MoA TLI 1": lambda s: mixture(s, 1), "MoA TLI 3": lambda s: mixture(s, 3),
    PLAIN: lambda s: (s.layer(1) * s.layers, [(1, s.width, s.vocab)]),
}  # fmt: skip


def session(draft: Draft, four_bits: bool) -> ort.InferenceSession:
    """A graph of a draft's products, each with random weights and an input of its own, on one thread."""
    layers, heads = draft
    sizes = [*layers, *heads]
    values = [
        ir.val(f"x{i}", ir.DataType.FLOAT, [1, rows, k]) for i, (rows, k, _) in enumerate(sizes)
    ]
    opsets = {"": OPSET, kernels.DOMAIN: 1}
    edit = Editor(ir.Model(ir.Graph(values, [], nodes=[], opset_imports=opsets), ir_version=IR_VERSION))
    random = np.random.default_rng(0)
    for i, (value, (rows, k, n)) in enumerate(zip(values, sizes, strict=True)):
        few = four_bits and i < len(layers)
        weight = torch.from_numpy(random.standard_normal((k, n), np.float32).T)
        scheme = INT4 if few else INT8
        given = initializers(edit, f"w{i}", [Stored((f"w{i}",), (), weight, Role(Part.LINEAR), scheme)])
        kind, form = kernels.INT4_LINEAR, {"K": k, "N": n}
        if not few:
            zero, form = row_form(edit, value)
            kind, given = kernels.INT8_LINEAR, [*given, zero]
        made = edit.insert(
            None, kind, [value, *given], (1, rows, n), ir.DataType.FLOAT, form, kernels.DOMAIN
        )
        edit.graph.outputs.append(made)
    library, options = kernels.library(), ort.SessionOptions()
    if library is None:
        raise SystemExit("there are no kernels; run ssdevice kernels")
    options.intra_op_num_threads = 1
    options.register_custom_ops_library(str(library))
    with kernels.crew(library, 1):
        return ort.InferenceSession(
            ir.to_proto(edit.model).SerializeToString(), options, providers=[PROVIDER]
        )


def draft_ms(drafts: Sequence[Draft], four_bits: bool, rounds: int) -> list[float]:
    """CPU milliseconds of each draft, see ``rows.in_turns``."""
    calls = []
    for draft in drafts:
        opened = session(draft, four_bits)
        binding = opened.io_binding()
        for value in opened.get_inputs():
            binding.bind_cpu_input(value.name, np.ones(value.shape, np.float32))
        for value in opened.get_outputs():
            binding.bind_output(value.name)
        calls.append(partial(opened.run_with_iobinding, binding))
    return in_turns(calls, rounds)


def main(words: Sequence[str] | None = None) -> None:
    """Print a row for each method."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("bundles", type=Path, nargs=2)
    for name, default in {"length": 128, "rounds": 100}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args(words)
    shape = Sizes(json.loads((args.model / "config.json").read_text()), args.length)
    found = [each for each in lines(args.results) if each["method"] in DRAFTS]
    drafts = [DRAFTS[name](shape) for name in (PLAIN, *(each["method"] for each in found))]
    calls = timed(args.bundles, args.length, args.rounds)
    times = [draft_ms(drafts, four_bits, args.rounds) for four_bits in (True, False)]
    both = list(zip(calls, times, strict=True))
    head = [
        "method",
        "β",
        *(f"{what}, {bits}" for bits in ("INT4", "INT8") for what in ("a draft, ms", "tokens/s")),
    ]
    plain = [
        text
        for (own, _), ms in both
        for text in (f"{ms[0] / own:.0%} of a call", f"{1e3 / own:.0f}")
    ]
    rows = [[PLAIN, "1.00", *plain]]
    for number, each in enumerate(found, 1):
        row, beta = [each["method"], f"{each['beta'][-1]:.2f}"], each["beta"][-1]
        for (_, step), ms in both:
            row += [f"{ms[number]:.2f}", f"{1e3 * beta / (step + ms[number]):.0f}"]
        rows.append(row)
    print("\n".join(report.table(head, *rows)).strip())
    for file, (own, step) in zip(args.bundles, calls, strict=True):
        print(f"{file.name}: a plain call {own:.2f} ms, a step {step:.2f} ms")


if __name__ == "__main__":
    main()
