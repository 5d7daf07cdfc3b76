"""What values of an ONNX graph are computed from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from ssdevice.runtime.onnx.kernels import INT8_ARGMAX, INT8_LINEAR

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto


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
    """Make products, by their names, and choices again of what ``fused.best_column`` made."""
    from onnx import TensorProto, helper

    nodes = list(graph.node)
    if not any(node.op_type == INT8_ARGMAX for node in nodes):
        return
    del graph.node[:]
    for node in nodes:
        if node.op_type != INT8_ARGMAX:
            graph.node.append(node)
            continue
        product = graph.node.add()
        product.CopyFrom(node)
        product.op_type, product.output[0] = INT8_LINEAR, node.name
        one = helper.make_tensor(f"{node.output[0]}_k", TensorProto.INT64, [1], [1])
        graph.initializer.append(one)
        chosen = [f"{node.output[0]}_value", node.output[0]]
        graph.node.append(helper.make_node("TopK", [node.name, one.name], chosen, axis=-1))
