"""Our operators (``functions``) in place of nodes that form their pattern, and regions of
neighbouring operators.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir

from ssdevice.export.onnx.editor import (
    OPSET,
    Editor,
    constant_of,
    producer,
    shape_of,
    sizes_of,
    source_of,
)
from ssdevice.runtime.onnx import kernels
from ssdevice.runtime.onnx.kernels import (
    ADD_NORM,
    DOMAIN,
    INT8_ARGMAX,
    INT8_EMBEDDING,
    INT8_LINEAR,
    REGION,
)

WIDEST = 16384
"""Inputs that ``Int8Argmax`` takes, at most."""
LARGE = 1 << 22
"""Bytes of a head that no cache holds; of others, reading half gains nothing."""
LEAST = 2
"""Operators in a region: one is better on its own."""


def add_norms(edit: Editor) -> None:
    """Residual additions and the RMS normalizations of their sums become one node each."""
    for node in [node for node in edit.graph if node.op_type == "RMSNormalization"]:
        total = source_of(node)
        shape = shape_of(total) or ()
        add = producer(total, "Add")
        if node.attributes.get_int("axis", -1) != -1 or len(shape) not in (2, 3):
            continue
        if add is not None and shape_of(add.inputs[0]) == shape_of(add.inputs[1]):
            terms = list(add.inputs)
        elif producer(total, "Concat") is not None and (sizes := sizes_of(total)) is not None:
            # Main rows joined by stream rows: the kernel all other layers use, with nothing to add,
            # because another one rounds differently and a row must not depend on the schedule.
            add = None
            terms = [total, edit.constant(np.zeros(sizes, np.float32))]
        else:
            continue
        # The sum must exist before its other users, which may stand before this normalization.
        epsilon = {"epsilon": node.attributes.get_float("epsilon", 1e-5)}
        outputs = [(shape, total.dtype)] * 2
        made = edit.insert_several(
            add or node, ADD_NORM, [*terms, node.inputs[1]], outputs, epsilon, DOMAIN
        )
        if add is not None:
            edit.replace_value(total, made[1])
        edit.replace(node, made[0])
    edit.clean()


def best_columns(edit: Editor) -> None:
    """Choices of one of the columns of large eight-bit products; ``graphs.show_choices`` undoes it.

    A node's name is that of the product.
    """
    for node in [node for node in edit.graph if node.op_type == "TopK"]:
        product = producer(node.inputs[0], INT8_LINEAR)
        k = constant_of(node.inputs[1])
        codes = constant_of(product.inputs[1]) if product is not None else None
        if product is None or codes is None or len(codes) > WIDEST or codes.size < LARGE:
            continue
        if (
            k is None
            or k.tolist() != [1]
            or node.outputs[0].uses()
            or len(product.outputs[0].uses()) != 1
        ):
            continue
        ids = node.outputs[1]
        form = dict(product.attributes)
        best = edit.insert(
            node, INT8_ARGMAX, product.inputs, shape_of(ids), ids.dtype, form, DOMAIN
        ).producer()
        assert best is not None
        best.name = product.outputs[0].name
        edit.replace_value(ids, best.outputs[0])
        for use in source_of(product, 1).uses():
            if use.node.op_type == INT8_EMBEDDING:
                use.node.op_type = kernels.TIED_EMBEDDING
        edit.graph.remove([node, product], safe=True)


def join_regions(edit: Editor) -> None:
    """Put operators into regions, each with a function of its own; ``graphs.show_regions`` undoes
    it.

    A node's level is how often a path to it changes between nodes that regions take and others, at
    most. A region is all that it takes of one level, so no path leads out of it and back.
    """
    graph = edit.graph
    graph.sort()
    levels: dict[ir.Node, int] = {}  # odd for nodes that a region takes
    found: defaultdict[int, list[ir.Node]] = defaultdict(list)
    for node in graph:
        inside = int(node.domain == DOMAIN and node.op_type in kernels.IN_REGIONS)
        makers = [value.producer() for value in node.inputs if value is not None]
        before = [levels[maker] for maker in makers if maker in levels]
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
    read = [
        value
        for node in nodes
        for value in node.inputs
        if value is not None and value.producer() not in own
    ]
    inputs = list(dict.fromkeys(read))
    outputs = [value for value in made if _leaves(value, own)]
    text = "\n".join(
        [f"{len(inputs)} {len(outputs)}", *_steps(nodes, dict.fromkeys([*inputs, *outputs, *made]))]
    )

    model = edit.model
    overload = str(len(model.functions))
    body = ir.GraphView(inputs, outputs, nodes=nodes, opset_imports={"": OPSET, DOMAIN: 1}).clone()
    inner = [value for node in body for value in node.outputs]
    for value in (*body.inputs, *inner):
        value.type = None
        value.shape = None
    function = ir.Function(DOMAIN, REGION, overload, graph=body, attributes=[])
    model.functions[function.identifier()] = function
    model.opset_imports[DOMAIN] = 1
    region = ir.node(
        REGION, inputs, {"text": text}, domain=DOMAIN, overload=overload, num_outputs=len(outputs)
    )
    edit.graph.insert_after(nodes[-1], region)
    for old, new in zip(outputs, region.outputs, strict=True):
        name = old.name
        new.type = old.type
        new.shape = old.shape
        edit.replace_value(old, new)
        old.name = None
        new.name = name
    edit.graph.remove(nodes, safe=True)


def _leaves(value: ir.Value, nodes: set[ir.Node]) -> bool:
    """Whether anything but these nodes reads a value."""
    return value.is_graph_output() or any(use.node not in nodes for use in value.uses())


def _steps(nodes: Sequence[ir.Node], values: Iterable[ir.Value]) -> list[str]:
    """A line for each node, as region.cpp reads it."""
    numbers = {value: str(number) for number, value in enumerate(values)}
    lines = []
    for node in nodes:
        kinds = (ir.AttributeType.INT, ir.AttributeType.FLOAT)
        plain = [
            f"{name}={a.value!r}" for name, a in sorted(node.attributes.items()) if a.type in kinds
        ]
        reads = [numbers[value] for value in node.inputs if value is not None]
        makes = [numbers[value] for value in node.outputs]
        lines.append(" ".join([node.op_type, *plain, ":", *reads, ">", *makes]))
    return lines
