"""Linears of an ONNX graph: found, merged where several read the same input, and lowered to MatMul.

``torch`` linears arrive as placeholders ``Linear(x, weight [outputs, inputs], bias)`` under the
weights' own names, so that three graphs agree on what is the same weight and quantization sees each
weight whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ssdevice.export.onnx.editor import (
    Editor,
    Marked,
    constant_of,
    only_user,
    producer,
    shape_of,
    source_of,
    stored_of,
)
from ssdevice.export.weights import KEPT, Role, Scheme, Stored
from ssdevice.runtime.onnx.kernels import DOMAIN, GATED_SILU, ROTARY_SPLIT

LINEAR_DOMAIN = "ssdevice.placeholder"
LINEAR = "Linear"
SMALL = 1 << 14
"""Weights of fewer elements stay floats: quantizing their input costs more than the product."""
Array = np.ndarray[Any, Any]
Form = dict[str, Any] | None
Term = tuple[Role, ir.Node]
"""A low-rank term beside a linear: the role of its second factor, and the addition of both."""


@dataclass(frozen=True)
class Part:
    """One placeholder: its node, the weight's name and content ``[outputs, inputs]``, and its row
    of the model's table.

    ``term``: the one beside it that becomes a slot.
    """

    node: ir.Node
    name: str
    weight: Array
    stored: Stored
    term: Term | None

    @property
    def output(self) -> ir.Value:
        """The product with its term."""
        return (self.node if self.term is None else self.term[1]).outputs[0]

    @property
    def factor(self) -> bool:
        """Whether it is a factor of a low-rank term, and so not merged with the base, which other
        rows use too.
        """
        return self.stored.role.factor


@dataclass(frozen=True)
class Linear:
    """Placeholders that read one input and become one product before the first: one, or q/k/v, or
    gate/up.
    """

    parts: tuple[Part, ...]

    @property
    def first(self) -> Part:
        """The first part; all of them have the same input, kind and scheme."""
        return self.parts[0]

    @property
    def source(self) -> ir.Value:
        """The input, ``[1, rows, inputs]``."""
        return source_of(self.first.node)

    @property
    def name(self) -> str:
        """Identifies the weight across graphs."""
        return "|".join(part.name for part in self.parts)

    @property
    def stays_float(self) -> bool:
        """Whether it stays float32 in every precision."""
        return self.first.stored.scheme is KEPT

    @property
    def inputs(self) -> int:
        return int(self.first.weight.shape[1])

    @property
    def outputs(self) -> int:
        """N, of all parts together."""
        return sum(int(part.weight.shape[0]) for part in self.parts)

    @property
    def transposed(self) -> str:
        """The name of its float32 weight as ``[K, N]``."""
        return f"{self.name}.T"

    def weight(self, dtype: type[np.floating[Any]] = np.float32) -> Array:
        """``[K, N]``."""
        parts = [part.weight for part in self.parts]
        return np.ascontiguousarray(
            (parts[0] if len(parts) == 1 else np.concatenate(parts)).T, dtype
        )

    def product(
        self,
        edit: Editor,
        kind: str,
        weight: Sequence[ir.Value],
        form: Form = None,
        domain: str = DOMAIN,
    ) -> ir.Value:
        """Its product by an operator, ``[.., rows, N]``, before its placeholders."""
        shape = (*(shape_of(self.source) or ())[:-1], self.outputs)
        return edit.insert(
            self.first.node, kind, [self.source, *weight], shape, ir.DataType.FLOAT, form, domain
        )


def linears(edit: Editor, terms: Mapping[ir.Node, Term]) -> list[Linear]:
    """All linears of a graph, those of one input together, in graph order; ``terms``: by the
    placeholder beside.
    """
    groups: dict[tuple[int, bool, Scheme], list[Part]] = {}
    for node in edit.graph:
        if node.op_type != LINEAR or node.domain != LINEAR_DOMAIN:
            continue
        weight = source_of(node, 1)
        if (content := constant_of(weight)) is None:
            raise ValueError(f"linear {node.name} has no constant weight")
        stored = stored_of(weight)
        if stored is None:
            raise ValueError(f"linear {node.name}: {weight.name} is not in the table of weights")
        part = Part(node, weight.name or "", content, stored, terms.get(node))
        key = (id(source_of(node)), part.factor, stored.scheme)
        groups.setdefault(key, []).append(part)
    return [Linear(tuple(parts)) for parts in groups.values()]


def lower(edit: Editor, linear: Linear, whole: ir.Value) -> None:
    """Replace a linear's placeholders by their product ``whole [1, rows, N]``, a split of its
    columns and the biases.

    The product has the low-rank terms already. It stays whole where operators of ours take it
    whole.
    """
    first = linear.first.node
    source = linear.source
    values = [whole]
    if len(weights := [(part.name, int(part.weight.shape[0])) for part in linear.parts]) > 1:
        ends = [part.output for part in linear.parts]
        biased = any(len(part.node.inputs) > 2 for part in linear.parts)
        if not biased and (_rotary_split(edit, ends, whole) or _gated_silu(edit, ends, whole)):
            edit.products.append(Marked(tuple(weights), source, whole))
            return
        widths = edit.ints(*(width for _, width in weights))
        values = list(edit.split(first, whole, widths, [shape_of(end) for end in ends], -1))
    for part, value, weight in zip(linear.parts, values, weights, strict=True):
        if len(part.node.inputs) > 2:
            value = edit.insert(
                part.node, "Add", [value, part.node.inputs[2]], shape_of(value), ir.DataType.FLOAT
            )
        edit.replace(part.node, value)
        if part.term is not None:
            edit.replace(part.term[1], value)
        edit.products.append(Marked((weight,), source, value))


def _rotary_split(edit: Editor, ends: Sequence[ir.Value], whole: ir.Value) -> bool:
    """Split queries and keys that only rotary positions read, and values; False for others."""
    queries, keys = (only_user(end, "RotaryEmbedding") for end in ends[:2])
    if len(ends) != 3 or queries is None or keys is None or queries.inputs[1:] != keys.inputs[1:]:
        return False
    if keys.attributes.get_int("interleaved"):
        return False
    heads, kv_heads = (turned.attributes.get_int("num_heads") for turned in (queries, keys))
    shapes = [shape_of(end) or () for end in ends]
    form = {
        "heads": heads,
        "kv_heads": kv_heads,
        "rotary_dim": 0,
        "widths": [shape[-1] for shape in shapes],
    }
    outputs = [(shape, whole.dtype) for shape in shapes]
    made = edit.insert_several(keys, ROTARY_SPLIT, [whole, *keys.inputs[1:]], outputs, form, DOMAIN)
    edit.replace(queries, made[0])
    edit.replace(keys, made[1])
    edit.replace_value(ends[2], made[2])
    return True


def _gated_silu(edit: Editor, ends: Sequence[ir.Value], whole: ir.Value) -> bool:
    """``g * sigmoid(g) * u`` of two halves; False for other columns."""
    gate, up, *others = ends
    gated = only_user(up, "Mul")
    silu = producer(gated.inputs[0], "Mul") if gated is not None else None
    share = producer(silu.inputs[1], "Sigmoid") if silu is not None else None
    if gated is None or silu is None or share is None or others or shape_of(gate) != shape_of(up):
        return False
    users = {use.node for use in gate.uses()}
    if (
        users != {silu, share}
        or len(silu.outputs[0].uses()) != 1
        or len(share.outputs[0].uses()) != 1
    ):
        return False
    edit.replace(
        gated, edit.insert(gated, GATED_SILU, [whole], shape_of(up), whole.dtype, None, DOMAIN)
    )
    return True


def fits_half(linear: Linear) -> bool:
    """Whether a large weight has only float16 numbers, as the streams' own terms in adapter folders
    have.
    """
    weight = linear.weight()
    with np.errstate(over="ignore"):
        return weight.size >= SMALL and bool((weight == weight.astype(np.float16)).all())
