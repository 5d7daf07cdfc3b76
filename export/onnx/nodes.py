"""What values of an ONNX graph are computed from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from ssdevice.runtime.onnx.kernels import (
    ADD_NORM,
    INT8_ARGMAX,
    INT8_LINEAR,
    JOINED_LINEARS,
)

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto

READS = "<-"
"""In the name of a product's output, between the weight's name and that of the rows it reads."""
APART = {name: pair for pair, name in JOINED_LINEARS.items()}
"""Operators that are two in one: what makes the rows, and the linear."""


def makers(graph: GraphProto) -> dict[str, NodeProto]:
    """The node that computes each value."""
    return {name: node for node in graph.node for name in node.output}


def ancestors(
    maker: Mapping[str, NodeProto], values: Iterable[str], stop: Callable[[NodeProto], bool] = lambda _: False
) -> list[NodeProto]:
    """Nodes that ``values`` are computed from, once each; not beyond nodes where ``stop``."""
    found: dict[tuple[str, ...], NodeProto] = {}
    waiting = list(values)
    while waiting:
        node = maker.get(waiting.pop())
        if node is not None and (outputs := tuple(node.output)) not in found:
            found[outputs] = node
            waiting += () if stop(node) else node.input
    return list(found.values())


def show_products(graph: GraphProto) -> None:
    """Undo ``fused.best_column`` and ``fused.linear_with_its_rows``: every product and what it reads has its name."""
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        if node.op_type == INT8_ARGMAX:
            _choice(graph, node)
        elif node.op_type in APART:
            _apart(graph, node)
        else:
            graph.node.append(node)


def _choice(graph: GraphProto, node: NodeProto) -> None:
    """A product of the node's own name, and the choice of a column."""
    from onnx import TensorProto, helper

    product = graph.node.add()
    product.CopyFrom(node)
    product.op_type, product.output[0] = INT8_LINEAR, node.name
    one = helper.make_tensor(f"{node.output[0]}_k", TensorProto.INT64, [1], [1])
    graph.initializer.append(one)
    chosen = [f"{node.output[0]}_value", node.output[0]]
    graph.node.append(helper.make_node("TopK", [node.name, one.name], chosen, axis=-1))


def _apart(graph: GraphProto, node: NodeProto) -> None:
    """The rows that a product reads, whose name its own name ends with, and the product."""
    from onnx import helper

    first, linear = APART[node.op_type]
    rows, count = node.output[0].partition(READS)[2], 3 if first == ADD_NORM else 1
    before = helper.make_node(first, node.input[:count], [rows, *node.output[1:]], rows, domain=node.domain)
    product = helper.make_node(linear, [rows, *node.input[count:]], node.output[:1], node.name, domain=node.domain)
    for attribute in node.attribute:
        (before if attribute.name == "epsilon" else product).attribute.append(attribute)
    graph.node.extend([before, product])
