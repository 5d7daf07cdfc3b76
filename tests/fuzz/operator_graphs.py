"""Graphs of one node with an operator of ours, and changes to them: shapes, types, values,
attributes, regions.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ssdevice.runtime.onnx import kernels

Array = np.ndarray[Any, np.dtype[Any]]
F = np.float32
H = np.float16
I8 = np.int8
U8 = np.uint8
N = np.int32
J = np.int64
B = np.bool_
SIZES = (0, 1, 2, 3, 5, 8, 16, 17, 31, 32, 33, 64, 100)
LARGE = (1 << 20, 1 << 31, 1 << 40, 1 << 50)
INTEGERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    2**31 - 1,
    -(2**31),
    2**32,
    2**40,
    2**61 + 4,
    2**62,
    2**62 + 1,
    2**63 - 1,
    -(2**63),
)
FLOATS = (0.0, -0.0, 1e-40, 1e38, -1e38, float("nan"), float("inf"), float("-inf"))
NUMBERS = (
    "0",
    "1",
    "2",
    "3",
    "4",
    "5",
    "6",
    "9",
    "-1",
    "4294967296",
    "18446744073709551615",
    "9" * 20,
    "x",
    "",
)
MOST = 1 << 14


@dataclass(frozen=True)
class Node:
    """A node with what it reads.

    ``constants``: which inputs are initializers; ``types``: of its outputs.
    """

    kind: str
    inputs: tuple[Array | None, ...]
    types: tuple[int, ...] = (onnx.TensorProto.FLOAT,)
    attributes: dict[str, Any] = field(default_factory=dict)
    constants: frozenset[int] = frozenset()

    @property
    def names(self) -> list[str]:
        """The inputs' names; empty for one that is missing."""
        return ["" if array is None else f"i{at}" for at, array in enumerate(self.inputs)]

    def model(self) -> bytes:
        """The file of the graph."""
        given = {n: a for n, a in zip(self.names, self.inputs, strict=True) if a is not None}
        stored = {f"i{at}" for at in self.constants}
        outputs = [f"o{at}" for at in range(len(self.types))]
        node = helper.make_node(
            self.kind, self.names, outputs, domain=kernels.DOMAIN, **self.attributes
        )
        graph = helper.make_graph(
            [node],
            "g",
            [
                helper.make_tensor_value_info(
                    name, helper.np_dtype_to_tensor_dtype(array.dtype), None
                )
                for name, array in given.items()
                if name not in stored
            ],
            [
                helper.make_tensor_value_info(name, kind, None)
                for name, kind in zip(outputs, self.types, strict=True)
            ],
            [
                numpy_helper.from_array(array, name)
                for name, array in given.items()
                if name in stored
            ],
        )
        imports = [helper.make_opsetid("", 23), helper.make_opsetid(kernels.DOMAIN, 1)]
        content: bytes = helper.make_model(
            graph, opset_imports=imports, ir_version=11
        ).SerializeToString()
        return content

    def feeds(self) -> dict[str, Array]:
        """The inputs that are no initializers."""
        return {
            f"i{at}": a
            for at, a in enumerate(self.inputs)
            if a is not None and at not in self.constants
        }


def drawn(rng: Random, kind: Any, *shape: int) -> Array:
    """Small numbers."""
    values = np.random.default_rng(rng.randrange(1 << 30)).integers(0, 5, shape) - (
        2 if kind in (F, H) else 0
    )
    return values.astype(kind)


def region(text: str, *inputs: Array, types: tuple[int, ...] = (onnx.TensorProto.FLOAT,)) -> Node:
    """A region of these steps."""
    return Node(kernels.REGION, inputs, types, {"text": text})


def low_rank(rng: Random, x: Array, zero: Array) -> Node:
    """A right call of what an app adds to one to three linears."""
    ranks = [rng.choice([0, 3, 8, 17])]
    outputs = [rng.choice([1, 16, 21])]
    for _ in range(rng.choice([0, 1, 2])):
        ranks.append(rng.choice([0, 3, 8]))
        outputs.append(rng.choice([1, 16, 300]))
    base = drawn(rng, F, *x.shape[:-1], sum(outputs))
    down = drawn(rng, I8, x.shape[-1], sum(ranks))
    ups = [drawn(rng, F, rank, size) for rank, size in zip(ranks, outputs, strict=True)]
    several = [np.array(ranks, J)] if len(ranks) > 1 else []
    given = (base, x, down, np.full(sum(ranks), 0.5, F), zero, *several, *ups)
    return Node(kernels.LOW_RANK[len(ranks) - 1], given, constants=frozenset({4}))


def operator(rng: Random) -> Node:
    """A right call of an operator of ours."""
    rows = rng.choice([1, 2, 6, 11])
    inputs = rng.choice([5, 32, 64, 100])
    outputs = rng.choice([1, 16, 21, 40])
    x = drawn(rng, F, 1, rows, inputs)
    zero = np.array(128, U8)
    codes = drawn(rng, I8, inputs, outputs)
    scales = np.full(outputs, 0.5, F)
    ids = drawn(rng, N, 2, rows) % outputs
    dim = rng.choice([4, 16, 64])
    heads = rng.choice([1, 2])
    past = rng.choice([0, 3, 20])
    more = rng.choice([0, 2])
    cached = (
        drawn(rng, H, past, heads * dim),
        *(drawn(rng, F, count, heads * dim) for count in (rows, more)),
    )
    seen = np.where(drawn(rng, N, rows, 1, past + rows + more) > 1, F(0), F(-1e9))
    attention = (drawn(rng, F, 1, rows, 3 * heads * dim), *cached, *cached, seen)
    angles = drawn(rng, F, 1, rows, dim // 2)
    blocks = drawn(rng, U8, outputs, (inputs + 31) // 32, 16)
    return rng.choice(
        [
            Node(kernels.ADD_NORM, (x, x, x[0, 0]), (1, 1), {"epsilon": 1e-5}),
            Node(kernels.GATED_SILU, (np.concatenate([x, x], 2),)),
            Node(
                kernels.HALF_LINEAR, (x, drawn(rng, H, inputs, outputs)), constants=frozenset({1})
            ),
            Node(
                kernels.INT4_LINEAR,
                (x, blocks, np.ones(blocks.shape[:2], F)),
                constants=frozenset({1, 2}),
            ),
            Node(kernels.INT8_LINEAR, (x, codes, scales, zero), constants=frozenset({1, 2, 3})),
            Node(
                kernels.INT8_ARGMAX, (x, codes, scales, zero), (7,), constants=frozenset({1, 2, 3})
            ),
            low_rank(rng, x, zero),
            Node(kernels.INT8_EMBEDDING, (ids, codes, scales), constants=frozenset({1, 2})),
            Node(kernels.TIED_EMBEDDING, (ids, codes, scales), constants=frozenset({1, 2})),
            Node(
                kernels.ROTARY_SPLIT,
                (drawn(rng, F, 1, rows, 4 * heads * dim), angles, angles),
                (1, 1, 1),
                {"heads": 2 * heads, "kv_heads": heads},
            ),
            Node(
                kernels.HALF_TREE_ATTENTION,
                attention,
                attributes={"kv_heads": heads, "scale": 0.125},
            ),
            Node(
                kernels.TREE_ATTENTION,
                tuple(array.astype(F) for array in attention),
                attributes={"kv_heads": heads, "scale": 0.125},
            ),
        ]
    )


def line(kind: str, attributes: dict[str, object], inputs: list[int], outputs: list[int]) -> str:
    """A step as regions list it."""
    given = " ".join(f"{name}={value}" for name, value in attributes.items())
    return f"{kind} {given} : {' '.join(map(str, inputs))} > {' '.join(map(str, outputs))}\n"


def step(rng: Random) -> Node:
    """A region of a single operator."""
    own = operator(rng)
    count = len(own.inputs)
    made = len(own.types)
    steps = line(own.kind, own.attributes, [*range(count)], [*range(count, count + made)])
    return replace(own, kind=kernels.REGION, attributes={"text": f"{count} {made}\n{steps}"})


STEPS: tuple[tuple[str, dict[str, object], int, int], ...] = (
    (kernels.ADD_NORM, {"epsilon": 1e-5}, 3, 2),
    (kernels.GATED_SILU, {}, 1, 1),
    (kernels.HALF_LINEAR, {}, 2, 1),
    (kernels.ROTARY_SPLIT, {"heads": 2, "kv_heads": 1}, 3, 3),
    (kernels.TREE_ATTENTION, {"kv_heads": 1, "scale": 0.125}, 8, 1),
)
"""Operators with their attributes and numbers of inputs and outputs."""


def chain(rng: Random) -> Node:
    """A region of steps that read whatever there is."""
    width = rng.choice(SIZES[1:8])
    x, y = (drawn(rng, F, 1, rng.choice([1, 3]), width * rng.choice([1, 2])) for _ in range(2))
    inputs = (x, y, drawn(rng, F, width), drawn(rng, F, 3, width), drawn(rng, H, width, width))
    known = [*range(len(inputs))]
    steps = ""
    for _ in range(rng.choice([1, 2, 3, 5])):
        kind, attributes, reads, makes = rng.choice(STEPS)
        made = [
            known[-1] + 2 + at if len(known) == len(inputs) else known[-1] + 1 + at
            for at in range(makes)
        ]
        steps += line(kind, attributes, rng.choices(known, k=reads), made)
        known += made
    steps += line(kernels.GATED_SILU, {}, [known[-1]], [len(inputs)])
    return replace(region(f"{len(inputs)} 1\n{steps}", *inputs), constants=frozenset({4}))


def shape(rng: Random, node: Node) -> Node:
    at, array = _one(rng, node)
    sizes = list(array.shape)
    if sizes and rng.random() < 0.7:
        sizes[rng.randrange(len(sizes))] = rng.choice(SIZES)
    else:
        sizes = rng.choices(SIZES[:7], k=rng.choice([0, 1, 2, 3, 4, 6, 7]))
    if 0 in sizes and len(sizes) > 1 and rng.random() < 0.5:
        sizes[rng.choice([i for i, size in enumerate(sizes) if size or sizes.count(0) > 1])] = (
            rng.choice(LARGE)
        )
    if (
        np.prod(sizes, dtype=float) > MOST
        or np.prod([max(size, 1) for size in sizes], dtype=float) > 2**56
    ):
        return node
    return _with(node, at, np.resize(array, sizes) if array.size else np.zeros(sizes, array.dtype))


def element(rng: Random, node: Node) -> Node:
    at, array = _one(rng, node)
    with np.errstate(all="ignore"):
        return _with(
            node, at, array.astype(rng.choice([F, H, I8, U8, N, J, B, np.float64, np.int16]))
        )


def value(rng: Random, node: Node) -> Node:
    at, array = _one(rng, node)
    other = array.copy()
    if not other.size:
        return node
    place = rng.randrange(other.size) if rng.random() < 0.7 else slice(None)
    with np.errstate(all="ignore"):
        if other.dtype.kind == "b":
            other.view(U8).reshape(-1)[place] = rng.choice([0, 1, 2, 255])
        elif other.dtype.kind == "f":
            other.reshape(-1)[place] = rng.choice(FLOATS)
        else:
            other.reshape(-1)[place] = np.array(rng.choice(INTEGERS)).astype(other.dtype)
    return _with(node, at, other)


def attribute(rng: Random, node: Node) -> Node:
    if not node.attributes:
        return node
    name = rng.choice(list(node.attributes))
    kind = rng.random()
    changed: Any = rng.choice(FLOATS if isinstance(node.attributes[name], float) else INTEGERS)
    if kind < 0.1:
        changed = rng.choice([1, 0.5, "text"])
    elif isinstance(node.attributes[name], str):
        changed = text(rng, node.attributes[name])
    rest = {key: content for key, content in node.attributes.items() if key != name}
    return replace(node, attributes=rest if kind > 0.97 else {**rest, name: changed})


def text(rng: Random, steps: str) -> str:
    """Another text of a region."""
    lines = steps.split("\n")
    at = rng.randrange(len(lines))
    other = rng.randrange(len(lines))
    words = lines[at].split(" ")
    place = rng.randrange(len(words))
    kind = rng.choice(
        ["number", "number", "operator", "attribute", "remove", "repeat", "exchange", "cut", "word"]
    )
    if kind == "number":
        words[place] = rng.choice(NUMBERS)
    elif kind == "operator":
        words[0] = rng.choice([*kernels.IN_REGIONS, kernels.REGION, ""])
    elif kind == "attribute":
        words = [
            f"{word.partition('=')[0]}={rng.choice(INTEGERS)}" if "=" in word else word
            for word in words
        ]
    elif kind == "word":
        words.insert(place, rng.choice([":", ">", "=", "axis=1", *NUMBERS]))
    lines[at] = " ".join(words)
    if kind == "remove":
        del lines[at]
    elif kind == "repeat":
        lines.insert(other, lines[at])
    elif kind == "exchange":
        lines[at], lines[other] = lines[other], lines[at]
    whole = "\n".join(lines)
    return whole[: rng.randrange(len(whole) + 1)] if kind == "cut" else whole


def inputs(rng: Random, node: Node) -> Node:
    at, array = _one(rng, node)
    kind = rng.choice(["drop", "repeat", "missing", "other", "constant", "constant"])
    if kind == "constant":
        return replace(node, constants=node.constants ^ {at})
    if kind == "drop" and len(node.inputs) > 1:
        return replace(node, inputs=node.inputs[:-1])
    if kind == "repeat":
        return replace(node, inputs=(*node.inputs, array))
    return _with(
        node, at, None if kind == "missing" and len(node.inputs) > 1 else _one(rng, node)[1]
    )


def outputs(rng: Random, node: Node) -> Node:
    kind = rng.choice(["drop", "more", "type"])
    if kind == "drop" and len(node.types) > 1:
        return replace(node, types=node.types[:-1])
    if kind == "more":
        return replace(node, types=(*node.types, 1))
    return replace(node, types=(rng.choice([1, 2, 3, 6, 7, 8, 9, 10, 11]), *node.types[1:]))


def kind(rng: Random, node: Node) -> Node:
    return replace(
        node, kind=rng.choice([*kernels.IN_REGIONS, kernels.INT8_ARGMAX, kernels.REGION])
    )


CHANGES = (
    shape,
    shape,
    shape,
    element,
    value,
    value,
    value,
    attribute,
    attribute,
    attribute,
    inputs,
    outputs,
    kind,
)


def attentions() -> list[Node]:
    """Calls of attention that its node's schema lets through: only the kernel can refuse them."""
    query = np.ones((1, 1, 48), F)
    none = np.zeros((0, 16), F)
    cached = np.ones((3, 16), F)
    fresh = np.ones((1, 16), F)
    hidden = np.full((1, 1, 4), -1e9, F)
    all_seen = np.zeros((1, 1, 4), F)
    infinite = np.full((1, 1, 4), np.inf, F)
    runs = {
        "right": (query, cached, fresh, none, all_seen, 1),
        "nothing is seen": (query, cached, fresh, none, hidden, 1),
        "no rows that are new": (query, cached, none, none, all_seen[..., :3], 1),
        "no rows at all": (query, none, none, none, all_seen[..., :0], 1),
        "queries that are not numbers": (query * np.nan, cached, fresh, none, all_seen, 1),
        "an infinite mask": (query, cached, fresh, none, infinite, 1),
        "a mask that is too short": (query, cached, fresh, none, all_seen[..., :2], 1),
        "more rows than the mask has": (query, cached, fresh, cached, all_seen, 1),
        "heads without end": (query, cached, fresh, none, all_seen, 1 << 40),
        "heads that wrap around": (query, cached, fresh, none, all_seen, (1 << 62) + 1),
        "no heads": (query, cached, fresh, none, all_seen, 0),
        "keys of no width": (query, cached[:, :0], fresh[:, :0], none[:, :0], all_seen, 1),
    }
    nodes = []
    for queries, past, new, more, mask, heads in runs.values():
        attributes = {"kv_heads": heads, "scale": 0.125}
        for kind, dtype in ((kernels.TREE_ATTENTION, F), (kernels.HALF_TREE_ATTENTION, H)):
            run = (past.astype(dtype), new, more)
            nodes.append(Node(kind, (queries, *run, *run, mask), attributes=attributes))
    return nodes


def hostile(seed: int, index: int) -> Node:
    """Case ``index``: those of ``attentions`` first, then right nodes with none to three
    changes.
    """
    first = attentions()
    if index < len(first):
        return first[index]
    rng = Random(f"{seed}/{index}")
    node = rng.choice([operator, operator, step, chain])(rng)
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        node = rng.choice(CHANGES)(rng, node)
    return node


def _one(rng: Random, node: Node) -> tuple[int, Array]:
    at = rng.choice([at for at, array in enumerate(node.inputs) if array is not None])
    array = node.inputs[at]
    assert array is not None
    return at, array


def _with(node: Node, at: int, array: Array | None) -> Node:
    return replace(node, inputs=(*node.inputs[:at], array, *node.inputs[at + 1 :]))
