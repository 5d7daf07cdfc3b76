"""Joins neighbouring operators of ours in a finished graph into one node each, a region."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from ssdevice.export.onnx.editor import OPSET, Editor
from ssdevice.runtime.onnx.kernels import DOMAIN, IN_REGIONS, REGION

LEAST = 2
"""Operators in a region: one is better on its own."""


def join_regions(edit: Editor) -> None:
    """Put operators into regions, each with a function of its own; ``nodes.show_regions`` undoes it.

    A node's level is how often a path to it changes between nodes that regions take and others, at most. A region is
    all that it takes of one level, so no path leads out of it and back.
    """
    graph = edit.graph
    graph.sort()
    levels: dict[ir.Node, int] = {}  # odd for nodes that a region takes
    found: defaultdict[int, list[ir.Node]] = defaultdict(list)
    for node in graph:
        inside = int(node.domain == DOMAIN and node.op_type in IN_REGIONS)
        before = [levels[maker] for value in node.inputs if value is not None and (maker := value.producer()) in levels]
        levels[node] = max((level + (level % 2 != inside) for level in before), default=inside)
        if inside:
            found[levels[node]].append(node)
    for nodes in found.values():
        if len(nodes) >= LEAST:
            _join(edit, nodes)
    graph.sort()


def _join(edit: Editor, nodes: Sequence[ir.Node]) -> None:
    """One node in place of several, with a function that has theirs."""
    own = set(nodes)
    made = [value for node in nodes for value in node.outputs]
    read = [value for node in nodes for value in node.inputs if value is not None and value.producer() not in own]
    inputs = list(dict.fromkeys(read))
    outputs = [value for value in made if value.is_graph_output() or any(use.node not in own for use in value.uses())]
    text = "\n".join([f"{len(inputs)} {len(outputs)}", *_steps(nodes, dict.fromkeys([*inputs, *outputs, *made]))])

    model = edit.model
    overload = str(len(model.functions))
    body = ir.GraphView(inputs, outputs, nodes=nodes, opset_imports={"": OPSET, DOMAIN: 1}).clone()
    for value in (*body.inputs, *(value for node in body for value in node.outputs)):
        value.type = value.shape = None
    function = ir.Function(DOMAIN, REGION, overload, graph=body, attributes=[])
    model.functions[function.identifier()] = function
    model.opset_imports[DOMAIN] = 1
    count = len(outputs)
    region = ir.node(REGION, inputs, {"text": text}, domain=DOMAIN, overload=overload, num_outputs=count)
    edit.graph.insert_after(nodes[-1], region)
    for old, new in zip(outputs, region.outputs, strict=True):
        name, new.type, new.shape = old.name, old.type, old.shape
        edit.replace_value(old, new)
        old.name, new.name = None, name
    edit.graph.remove(nodes, safe=True)


def _steps(nodes: Sequence[ir.Node], values: Iterable[ir.Value]) -> list[str]:
    """A line for each node, as region.cpp reads it."""
    numbers = {value: str(number) for number, value in enumerate(values)}
    lines = []
    for node in nodes:
        kinds = (ir.AttributeType.INT, ir.AttributeType.FLOAT)
        plain = [f"{name}={a.value!r}" for name, a in sorted(node.attributes.items()) if a.type in kinds]
        reads, makes = ([numbers[value] for value in side if value is not None] for side in (node.inputs, node.outputs))
        lines.append(" ".join([node.op_type, *plain, ":", *reads, ">", *makes]))
    return lines
