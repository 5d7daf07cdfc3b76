"""Linears of an ONNX graph: found, merged where several read the same input, and lowered to MatMul.

``torch`` linears arrive as placeholders ``Linear(x, weight [outputs, inputs], bias)`` under the weights' own
names, so that three graphs agree on what is the same weight and quantization sees each weight whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ssdevice.export.onnx.editor import Editor, Marked, constant_of, role_of, shape_of
from ssdevice.model.roles import Part as ModelPart
from ssdevice.model.roles import Role
from ssdevice.runtime.onnx.kernels import DOMAIN, HALF_LINEAR

LINEAR_DOMAIN = "ssdevice.placeholder"
LINEAR = "Linear"
SMALL = 1 << 14
"""Weights of fewer elements are not quantized: quantizing their input costs more than the product."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Part:
    """One placeholder: its node, the weight's name and content ``[outputs, inputs]``, and its role."""

    node: ir.Node
    name: str
    weight: Array
    role: Role | None = None

    @property
    def output(self) -> ir.Value:
        """What it computes, before anything is replaced."""
        return self.node.outputs[0]


@dataclass(frozen=True)
class Linear:
    """Placeholders that read one input and become one product; usually one, or q/k/v, or gate/up.

    ``weight [inputs, sum of outputs]`` is made when asked for.
    """

    parts: tuple[Part, ...]

    @property
    def source(self) -> ir.Value:
        """The input, ``[1, rows, inputs]``."""
        value = self.parts[0].node.inputs[0]
        assert value is not None
        return value

    @property
    def name(self) -> str:
        """Identifies the weight across graphs."""
        return "|".join(part.name for part in self.parts)

    @property
    def inputs(self) -> int:
        """K."""
        return int(self.parts[0].weight.shape[1])

    @property
    def outputs(self) -> int:
        """N, of all parts together."""
        return sum(int(part.weight.shape[0]) for part in self.parts)

    @property
    def factor(self) -> bool:
        """Whether it is a factor of a low-rank term: these are no part of a base's product, which other rows use."""
        return self.role is not None and self.role.part is ModelPart.FACTOR

    @property
    def role(self) -> Role | None:
        """What its weights are."""
        return self.parts[0].role

    @property
    def stays_float(self) -> bool:
        """Whether it stays float32 in every quantization; parts of both kinds are never merged."""
        return _stays_float(self.parts[0].weight, self.role)

    def weight(self) -> Array:
        """``[K, N]`` float32."""
        parts = [part.weight for part in self.parts]
        return np.ascontiguousarray((parts[0] if len(parts) == 1 else np.concatenate(parts)).T)


def _stays_float(weight: Array, role: Role | None) -> bool:
    return weight.size < SMALL or (role is not None and role.own)


def linears(edit: Editor) -> list[Linear]:
    """All linears of a graph, those of one input together, in graph order."""
    groups: dict[tuple[int, bool, bool], list[Part]] = {}
    for node in edit.graph:
        if node.op_type != LINEAR or node.domain != LINEAR_DOMAIN:
            continue
        source, weight = node.inputs[0], node.inputs[1]
        content = constant_of(weight)
        if weight is None or content is None:
            raise ValueError(f"linear {node.name} has no constant weight")
        role = role_of(weight)
        key = (id(source), role is not None and role.part is ModelPart.FACTOR, _stays_float(content, role))
        groups.setdefault(key, []).append(Part(node, weight.name or "", content, role))
    return [Linear(tuple(parts)) for parts in groups.values()]


Product = Callable[[Editor, Linear, ir.Node], ir.Value]
"""Makes ``source @ weight`` before a node, ``[1, rows, N]``."""


def lower(edit: Editor, linear: Linear, product: Product, terms: Mapping[int, ir.Node] | None = None) -> None:
    """Replace a linear's placeholders by one product, a split of its columns and the biases.

    ``terms``: by the id of a placeholder, the addition of a low-rank term that the product already has.
    """
    first, source = linear.parts[0].node, linear.source
    whole = product(edit, linear, first)
    values = [whole] if len(linear.parts) == 1 else _split(edit, linear, whole, first)
    biased = [_with_bias(edit, part, value, first) for part, value in zip(linear.parts, values, strict=True)]
    for part, value in zip(linear.parts, biased, strict=True):
        edit.replace(part.node, value)
        if terms and id(part.node) in terms:
            edit.replace(terms[id(part.node)], value)
        edit.products.append(Marked(part.name, source, value))


def _with_bias(edit: Editor, part: Part, value: ir.Value, before: ir.Node) -> ir.Value:
    bias = part.node.inputs[2] if len(part.node.inputs) > 2 else None
    if bias is None:
        return value
    return edit.insert(before, "Add", [value, bias], shape_of(part.output), ir.DataType.FLOAT)


def _split(edit: Editor, linear: Linear, whole: ir.Value, before: ir.Node) -> Sequence[ir.Value]:
    widths = edit.ints(*(part.weight.shape[0] for part in linear.parts))
    return edit.split(before, whole, widths, [shape_of(part.output) for part in linear.parts], -1)


def plain_product(edit: Editor, linear: Linear, before: ir.Node) -> ir.Value:
    """A float32 MatMul."""
    weight = _named(edit, transposed_name(linear), linear.weight)
    return edit.insert(before, "MatMul", [linear.source, weight], out_shape(linear), ir.DataType.FLOAT)


def half_product(edit: Editor, linear: Linear, before: ir.Node) -> ir.Value:
    """A product with a weight in float16; see ``fits_half``."""
    weight = _named(edit, f"{linear.name}.float16", lambda: linear.weight().astype(np.float16))
    return edit.insert(
        before, HALF_LINEAR, [linear.source, weight], out_shape(linear), ir.DataType.FLOAT, domain=DOMAIN
    )


def _named(edit: Editor, name: str, content: Callable[[], Array]) -> ir.Value:
    """The initializer of this name, which is made for the first product that reads it."""
    known = edit.graph.initializers.get(name)
    return known if known is not None else edit.constant(content(), name)


def fits_half(linear: Linear) -> bool:
    """Whether a weight of some size is one of float16 numbers, as the streams' own terms are in adapter folders."""
    weight = linear.weight()
    with np.errstate(over="ignore"):
        return weight.size >= SMALL and bool((weight == weight.astype(np.float16)).all())


def transposed_name(linear: Linear) -> str:
    """Name of a float32 weight as ``[K, N]``."""
    return f"{linear.name}.T"


def out_shape(linear: Linear) -> tuple[int | None, ...]:
    """Shape of a linear's product."""
    lead = shape_of(linear.source)
    if lead is None:
        raise ValueError(f"linear {linear.name} reads a value of unknown rank")
    return (*lead[:-1], linear.outputs)
