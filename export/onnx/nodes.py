"""What values of an ONNX graph are computed from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from ssdevice.runtime.onnx.kernels import INT8_ARGMAX, INT8_LINEAR, REGION


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


def show_choices(graph: GraphProto) -> None:
    """The products that columns are chosen of, by their own names: undoes ``fused.best_columns``."""
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        graph.node.append(node)
        if node.op_type == INT8_ARGMAX:
            product = graph.node[-1]
            product.op_type, product.output[0] = INT8_LINEAR, node.name
            one = helper.make_tensor(f"{node.output[0]}_k", TensorProto.INT64, [1], [1])
            graph.initializer.append(one)
            chosen = [f"{node.output[0]}_value", node.output[0]]
            graph.node.append(helper.make_node("TopK", [node.name, one.name], chosen, axis=-1))


def show_regions(model: ModelProto) -> None:
    """The nodes of regions, whose values have the names that they have in their functions: undoes ``join_regions``."""
    bodies = {function.overload: function.node for function in model.functions if function.name == REGION}
    nodes = list(model.graph.node)
    del model.graph.node[:]
    for node in nodes:
        model.graph.node.extend(bodies[node.overload] if node.op_type == REGION else [node])
