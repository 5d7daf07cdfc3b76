"""Operators of our own as ONNX functions of standard ones, for runtimes that do not have their kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from ssdevice.adapters.weights import LEVELS
from ssdevice.export.onnx.editor import CONTRIB, OPSET, SKIP_NORM
from ssdevice.model.attention import MASKED
from ssdevice.runtime.onnx.kernels import (
    ADD_NORM,
    CAPPED_ATTENTION,
    DOMAIN,
    GATED_SILU,
    HALF_LINEAR,
    HALF_TREE_ATTENTION,
    INT4_LINEAR,
    INT8_ARGMAX,
    INT8_EMBEDDING,
    INT8_LINEAR,
    REGION,
    ROTARY_SPLIT,
    TIED_EMBEDDING,
    TREE_ATTENTION,
)

BLOCK = 32
"""Inputs that share a scale."""
ZERO_POINT = 128
"""Of rows in uint8."""
TAIL = 3
"""Numbers that do not fill a vector of four, at most."""


class _Body:
    """The nodes of a function, and the attributes that they take from its call."""

    def __init__(self, name: str, inputs: str, **parameters: ir.AttributeType) -> None:
        self.name, self.parameters = name, parameters
        self.inputs = [ir.Value(name=given) for given in inputs.split()]
        self.nodes: list[ir.Node] = []

    def add(self, kind: str, *inputs: ir.Value, domain: str = "", outputs: int = 1, **attributes: Any) -> ir.Value:
        """A node's (first) output. An attribute ``name=ref("given")`` is the function's own ``given``."""
        own = {name: value for name, value in attributes.items() if not isinstance(value, _Ref)}
        made = ir.node(kind, list(inputs), own, domain=domain, num_outputs=outputs)
        for name, value in attributes.items():
            if isinstance(value, _Ref):
                made.attributes.add(ir.RefAttr(name, value.given, self.parameters[value.given]))
        for i, out in enumerate(made.outputs):
            out.name = f"t{len(self.nodes)}_{i}"
        self.nodes.append(made)
        return made.outputs[0]

    def call(self, name: str, *inputs: ir.Value, form: Iterable[str]) -> ir.Value:
        """The output of one of our operators, with the function's own attributes in ``form``."""
        same: dict[str, Any] = {given: ref(given) for given in form}
        return self.add(name, *inputs, domain=DOMAIN, **same)

    def ints(self, given: str) -> ir.Value:
        """The function's attribute ``given`` as a vector."""
        return self.add("Constant", value_ints=ref(given))

    def view(self, value: ir.Value, given: str) -> ir.Value:
        """A value in the shape that the attribute ``given`` says."""
        return self.add("Reshape", value, self.ints(given))

    def function(self, *outputs: ir.Value) -> ir.Function:
        """The finished ONNX function."""
        imports = {"": OPSET, CONTRIB: 1, DOMAIN: 1}
        graph = ir.Graph(self.inputs, outputs, nodes=self.nodes, opset_imports=imports)
        parameters = [ir.Attr(name, kind, None) for name, kind in self.parameters.items()]
        return ir.Function(DOMAIN, self.name, graph=graph, attributes=parameters)


@dataclass(frozen=True)
class _Ref:
    given: str


ref = _Ref
INT, INTS, FLOAT = ir.AttributeType.INT, ir.AttributeType.INTS, ir.AttributeType.FLOAT
ROWS_FORM = {"axes": INTS, "keep": INT, "axis": INT, "block": INT}
"""What ``int8_linear`` is told of its rows."""
ATTENTION_INPUTS = "q past_keys keys more_keys past_values values more_values mask"
PAST = (1, 4)
"""Inputs of attention that the cache holds."""
VIEWS = ("rows", "heads", "queries", "grouped", "scores", "weights", "split", "whole")
ATTENTION_FORM = {"kv_heads": INT, "scale": FLOAT, **dict.fromkeys(VIEWS, INTS)}
"""Inputs and attributes of attention; ``attention_form`` gives these their values."""


def int4_linear() -> ir.Function:
    """``Int4Linear(x [.., R, K], codes [N, K / 32, 16], scales [N, K / 32]; K, N) -> [.., R, N]``."""
    body = _Body(INT4_LINEAR, "x codes scales", K=INT, N=INT)
    sizes: dict[str, Any] = {"K": ref("K"), "N": ref("N"), "bits": 4, "block_size": BLOCK, "accuracy_level": 4}
    return body.function(body.add("MatMulNBits", *body.inputs, domain=CONTRIB, **sizes))


def int8_linear() -> ir.Function:
    """``Int8Linear(x [.., R, K], codes [K, N] int8, scales [N], zero uint8) -> [.., R, N]``.

    ``zero`` is 128 in the shape of the rows' scales, ``[.., R, 1]``. Attributes say over which ``axes`` a row's peak is
    taken, whether it keeps them (``keep``), and QuantizeLinear's ``axis`` and ``block``: one row has a single scale.
    """
    body = _Body(INT8_LINEAR, "x codes scales zero", **ROWS_FORM)
    x, codes, scales, zero = body.inputs
    peak = body.add("ReduceMax", body.add("Abs", x), body.ints("axes"), keepdims=ref("keep"))
    # A row of zeros has scale 0 and any codes: the product is multiplied by the scale, so it is 0 as it should be.
    scale = body.add("Mul", peak, body.add("Constant", value_float=1 / LEVELS))
    rows = body.add("QuantizeLinear", x, scale, zero, axis=ref("axis"), block_size=ref("block"))
    one = body.add("Constant", value_float=1.0)
    center = body.add("Constant", value=ir.tensor(np.array(ZERO_POINT, np.uint8)))
    # The operator takes one scale for all rows, so rows are scaled after it. A graph of one row does the same, though
    # it could save the Mul: (x * column) * row and x * (column * row) round differently, and plain decoding would then
    # differ from the step by an ulp, which the next rounding to eight bits turns into a whole level.
    product = body.add("MatMulIntegerToFloat", rows, codes, one, scales, center, domain=CONTRIB)
    return body.function(body.add("Mul", product, scale))


def int8_argmax() -> ir.Function:
    """``Int8Argmax(x [.., R, K], codes [K, N] int8, scales [N], zero uint8) -> [.., R, 1]`` int64; see int8_linear."""
    body = _Body(INT8_ARGMAX, "x codes scales zero", **ROWS_FORM)
    product = body.call(INT8_LINEAR, *body.inputs, form=ROWS_FORM)
    body.add("TopK", product, body.add("Constant", value_ints=[1]), outputs=2, axis=-1)
    return body.function(body.nodes[-1].outputs[1])


def int8_embedding(name: str = INT8_EMBEDDING) -> ir.Function:
    """``Int8Embedding(ids [..] int32, codes [K, N] int8, scales [N]; whole) -> [.., K]``; ``whole``: that shape."""
    body = _Body(name, "ids codes scales", whole=INTS)
    ids, codes, scales = body.inputs
    flat = body.add("Reshape", ids, body.add("Constant", value_ints=[-1]))
    columns = body.add("Transpose", body.add("Gather", codes, flat, axis=1), perm=[1, 0])
    rows = body.add("DequantizeLinear", columns, body.add("Gather", scales, flat, axis=0), axis=0)
    return body.function(body.view(rows, "whole"))


def rotary_split() -> ir.Function:
    """``RotarySplit(x [1, R, (H + 2 N) D], cos [1, R, E], sin) -> queries [1, R, H D], keys [1, R, N D], values``.

    Attributes: ``heads`` H, ``kv_heads`` N, ``rotary_dim`` (0: all), and the ``widths`` of the three.
    """
    body = _Body(ROTARY_SPLIT, "x cos sin", heads=INT, kv_heads=INT, rotary_dim=INT, widths=INTS)
    x, cos, sin = body.inputs
    body.add("Split", x, body.ints("widths"), outputs=3, axis=-1)
    queries, keys, values = body.nodes[-1].outputs
    turned = ref("rotary_dim")
    queries, keys = (
        body.add("RotaryEmbedding", value, cos, sin, num_heads=ref(count), rotary_embedding_dim=turned, interleaved=0)
        for value, count in ((queries, "heads"), (keys, "kv_heads"))
    )
    return body.function(queries, keys, values)


def add_norm() -> ir.Function:
    """``AddNorm(x [.., F], y [.., F], weight [F]; epsilon) -> normed [.., F], sum [.., F]``: the RMS norm of x + y."""
    body = _Body(ADD_NORM, "x y weight", epsilon=FLOAT)
    body.add(SKIP_NORM, *body.inputs, domain=CONTRIB, outputs=4, epsilon=ref("epsilon"))
    normed, _, _, total = body.nodes[-1].outputs
    return body.function(normed, total)


def gated_silu() -> ir.Function:
    """``GatedSilu(x [.., 2 F]) -> [.., F]``: the first half of a row times its sigmoid times the second half."""
    body = _Body(GATED_SILU, "x")
    body.add("Split", body.inputs[0], outputs=2, axis=-1, num_outputs=2)
    gate, up = body.nodes[-1].outputs
    return body.function(body.add("Mul", body.add("Mul", gate, body.add("Sigmoid", gate)), up))


def attention_form(rows: int, kv_heads: int, groups: int, dim: int, scale: float) -> dict[str, Any]:
    """The attributes of attention over ``rows`` new queries: the shapes of its function's views are among them."""
    return {
        "kv_heads": kv_heads,
        "scale": scale,
        "rows": [-1, kv_heads * dim],
        "heads": [-1, kv_heads, dim],
        "queries": [-1, kv_heads, groups, dim],
        "grouped": [kv_heads, -1, dim],
        "scores": [kv_heads, groups, rows, -1],
        "weights": [kv_heads, rows * groups, -1],
        "split": [kv_heads, groups, rows, dim],
        "whole": [1, rows, kv_heads * groups * dim],
    }


def tree_attention(name: str = TREE_ATTENTION) -> ir.Function:
    """``TreeAttention(q [1, R, N G D], past keys [P, N D], keys, more keys, past values, values, more values, mask)``.

    Two runs of new keys and values, of which the second may be empty. Mask ``[1, 1, R, P + S]`` for all S new ones. The
    result is ``[1, R, N G D]``, its heads ordered by (key head, group member) as those of the queries. Attributes: see
    ``attention_form``. ``CappedAttention`` bounds the scores by ``softcap`` in addition.
    """
    capped = name == CAPPED_ATTENTION
    body = _Body(name, ATTENTION_INPUTS, **ATTENTION_FORM, **({"softcap": FLOAT} if capped else {}))
    q, mask = body.inputs[0], body.inputs[-1]
    past_and_new = body.inputs[1:4], body.inputs[4:7]
    keys, values = (
        body.view(body.add("Concat", past, *(body.view(run, "rows") for run in new), axis=0), "heads")
        for past, *new in past_and_new
    )
    # FusedMatMul walks over keys and values head by head, as the cache holds them. The heads of a group are rows of one
    # matrix, so keys are read once per group, and the mask of one row serves all of them.
    queries = body.view(body.add("Transpose", body.view(q, "queries"), perm=[1, 2, 0, 3]), "grouped")
    by_head: dict[str, Any] = {"transBatchB": 1, "transB": 1, "alpha": ref("scale")}
    scores = body.view(body.add("FusedMatMul", queries, keys, domain=CONTRIB, **by_head), "scores")
    if capped:
        cap = body.add("Constant", value_float=ref("softcap"))
        scores = body.add("Mul", body.add("Tanh", body.add("Div", scores, cap)), cap)
    # WebAssembly's Softmax adds four numbers at a time and the last one to three after them. Three masked columns at
    # the end keep those that count out of there, so a sum does not depend on how many rows a call has.
    masked = body.add("Constant", value_float=MASKED)
    sizes = body.add("Constant", value_ints=[0, TAIL])
    wide = body.add("Pad", body.add("Add", scores, mask), sizes, masked, body.add("Constant", value_ints=[-1]))
    weights = body.add("Softmax", wide, axis=-1)
    weights = body.add("Slice", weights, *(body.add("Constant", value_ints=[at]) for at in (0, -TAIL, -1)))
    out = body.add("FusedMatMul", body.view(weights, "weights"), values, domain=CONTRIB, transBatchB=1)
    by_row = body.add("Transpose", body.view(out, "split"), perm=[2, 0, 1, 3])
    return body.function(body.view(by_row, "whole"))


def half_tree_attention() -> ir.Function:
    """``HalfTreeAttention``: tree_attention with past keys and values in float16, to which new ones are rounded."""
    body = _Body(HALF_TREE_ATTENTION, ATTENTION_INPUTS, **ATTENTION_FORM)
    half, single = ir.DataType.FLOAT16, ir.DataType.FLOAT
    q, *runs, mask = body.inputs
    widened = [
        body.add("Cast", run if at in PAST else body.add("Cast", run, to=int(half)), to=int(single))
        for at, run in enumerate(runs, start=1)
    ]
    return body.function(body.call(TREE_ATTENTION, q, *widened, mask, form=ATTENTION_FORM))


def half_linear() -> ir.Function:
    """``HalfLinear(x [.., R, K], weight [K, N] float16) -> [.., R, N]``."""
    body = _Body(HALF_LINEAR, "x weight")
    x, weight = body.inputs
    return body.function(body.add("MatMul", x, body.add("Cast", weight, to=int(ir.DataType.FLOAT))))


FUNCTIONS: dict[str, Callable[[], ir.Function]] = {
    ADD_NORM: add_norm,
    CAPPED_ATTENTION: partial(tree_attention, CAPPED_ATTENTION),
    GATED_SILU: gated_silu,
    HALF_LINEAR: half_linear,
    HALF_TREE_ATTENTION: half_tree_attention,
    INT4_LINEAR: int4_linear,
    INT8_ARGMAX: int8_argmax,
    INT8_EMBEDDING: int8_embedding,
    INT8_LINEAR: int8_linear,
    ROTARY_SPLIT: rotary_split,
    TIED_EMBEDDING: partial(int8_embedding, TIED_EMBEDDING),
    TREE_ATTENTION: tree_attention,
}


def add_functions(model: ir.Model) -> None:
    """Give a model the functions of the operators that its graph and functions call, and of those that they call."""
    made: dict[str, ir.Function] = {}
    waiting = _called(model.graph).union(*map(_called, model.functions.values()))
    while waiting:
        name = waiting.pop()
        made[name] = FUNCTIONS[name]()
        waiting |= _called(made[name]) - made.keys()
    for _, function in sorted(made.items()):
        model.functions[function.identifier()] = function
    if made:
        model.opset_imports[DOMAIN] = 1


def _called(nodes: Iterable[ir.Node]) -> set[str]:
    """The operators of ours but regions, which have a function each."""
    return {node.op_type for node in nodes if node.domain == DOMAIN and node.op_type != REGION}
