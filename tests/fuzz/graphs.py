"""ONNX graphs changed where a reader believes them: shapes, offsets, indices, operators, names."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

SIZES = (0, 1, -1, 2, 3, 7, 33, 1 << 16, 1 << 20, 2**31 - 1, 2**31, 2**40, 2**62, -(2**62))
LOCATIONS = (
    "../weights.bin",
    "/etc/passwd",
    "manifest.json",
    "nowhere.bin",
    "",
    "step.onnx",
    "../../../../etc/passwd",
    "weights.bin/",
    "./weights.bin",
    "tokenizer.json",
    "\0",
    "a" * 5000,
)
OFFSETS = (
    "0",
    "1",
    "-1",
    "4096",
    "135552",
    "9" * 18,
    "9" * 40,
    "x",
    "",
    "1e9",
    "18446744073709551615",
)


def mutate_graph(rng: Random, file: Path) -> str:
    """Change one to three things of the graph in ``file``; says what was done."""
    model = onnx.load(str(file), load_external_data=False)
    notes = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        kind = rng.choice(CHANGES)
        notes.append(f"{kind.__name__} {kind(rng, model)}")
    file.write_bytes(model.SerializeToString())
    return ", ".join(notes)


def shape(rng: Random, model: Any) -> str:
    tensor = rng.choice(model.graph.initializer)
    size = rng.choice(SIZES)
    if tensor.dims and rng.random() < 0.8:
        tensor.dims[rng.randrange(len(tensor.dims))] = size
    else:
        tensor.dims.append(size)
    return f"{tensor.name} {list(tensor.dims)}"[:80]


def element(rng: Random, model: Any) -> str:
    tensor = rng.choice(model.graph.initializer)
    tensor.data_type = rng.choice([*range(0, 24), 99, 2**31 - 1])
    return f"{tensor.name} {tensor.data_type}"


def constant(rng: Random, model: Any) -> str:
    small = [
        t for t in model.graph.initializer if not t.external_data and t.data_type in (1, 6, 7, 9)
    ]
    if not small:
        return "none"
    tensor = rng.choice(small)
    try:
        value = numpy_helper.to_array(tensor).copy()
    except (ValueError, TypeError) as error:  # a change before this one broke it
        return f"{tensor.name}: {error}"[:60]
    if value.size:
        extreme: Any = rng.choice([0, 1, -1, 5, 100, 2**31 - 1, -(2**31)])
        if value.dtype.kind == "f":
            extreme = rng.choice([np.nan, np.inf, -np.inf, 0.0, 1e38])
        value.reshape(-1)[rng.randrange(value.size) if rng.random() < 0.7 else slice(None)] = (
            extreme
        )
    tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    return tensor.name


def external(rng: Random, model: Any) -> str:
    large = [t for t in model.graph.initializer if t.external_data]
    if not large:
        return "none"
    entry = rng.choice(rng.choice(large).external_data)
    entry.value = rng.choice(LOCATIONS if entry.key == "location" else OFFSETS)
    return f"{entry.key}={entry.value[:30]!r}"


def operator(rng: Random, model: Any) -> str:
    node = rng.choice(model.graph.node)
    before = node.op_type
    node.op_type = rng.choice(
        ["Nothing", "", "Loop", "If", *(other.op_type for other in model.graph.node)]
    )
    if rng.random() < 0.2:
        node.domain = rng.choice(["com.microsoft", "ai.onnx.ml", "x", ""])
    return f"{before} to {node.op_type}"


def attribute(rng: Random, model: Any) -> str:
    nodes = [node for node in model.graph.node if node.attribute]
    node = rng.choice(nodes)
    found = rng.choice(node.attribute)
    found.i = rng.choice(SIZES)
    found.f = rng.choice([float("nan"), float("inf"), 0.0, -1.0])
    for i in range(len(found.ints)):
        found.ints[i] = rng.choice(SIZES)
    if rng.random() < 0.2:
        found.type = rng.randrange(0, 15)
    return f"{node.op_type}.{found.name}"


def inputs(rng: Random, model: Any) -> str:
    node = rng.choice([node for node in model.graph.node if node.input])
    at = rng.randrange(len(node.input))
    names = [
        *(t.name for t in model.graph.initializer),
        *(o for n in model.graph.node for o in n.output),
        "",
        "none",
    ]
    kind = rng.choice(["other", "drop", "more"])
    if kind == "other":
        node.input[at] = rng.choice(names)
    elif kind == "drop":
        del node.input[at]
    else:
        node.input.append(rng.choice(names))
    return f"{node.op_type} {kind}"


def nodes(rng: Random, model: Any) -> str:
    at = rng.randrange(len(model.graph.node))
    kind = rng.choice(["remove", "repeat", "move", "silent"])
    node = onnx.NodeProto()
    node.CopyFrom(model.graph.node[at])
    if kind in ("remove", "move"):
        del model.graph.node[at]
    if kind in ("repeat", "move"):
        model.graph.node.append(node)
    if kind == "silent":
        del model.graph.node[at].output[:]
    return f"{kind} {node.op_type}"


def signature(rng: Random, model: Any) -> str:
    side = rng.choice([model.graph.input, model.graph.output])
    value = rng.choice(side)
    kind = rng.choice(["rename", "remove", "element", "size", "rank", "repeat", "untyped"])
    note = f"{kind} {value.name}"
    tensor = value.type.tensor_type
    if kind == "rename":
        value.name = rng.choice(["", "x", "root", "count", value.name + "\n"])
    elif kind == "remove":
        side.remove(value)
    elif kind == "element":
        tensor.elem_type = rng.randrange(0, 24)
    elif kind == "size" and tensor.shape.dim:
        rng.choice(tensor.shape.dim).dim_value = rng.choice(SIZES)
    elif kind == "rank":
        tensor.shape.dim.add().dim_value = rng.choice(SIZES)
    elif kind == "repeat":
        side.append(value)
    elif kind == "untyped":
        value.ClearField("type")
    return note


def version(rng: Random, model: Any) -> str:
    if model.opset_import and rng.random() < 0.7:
        rng.choice(model.opset_import).version = rng.choice([0, 1, 13, 22, 24, 999, -1, 2**62])
    else:
        model.ir_version = rng.choice([0, 1, 3, 99, -1, 2**62])
    return "of the operators or the form"


CHANGES = (
    shape,
    element,
    constant,
    constant,
    external,
    operator,
    attribute,
    inputs,
    nodes,
    signature,
    version,
)
