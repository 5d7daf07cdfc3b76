"""What a value of an ONNX graph is computed from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

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
