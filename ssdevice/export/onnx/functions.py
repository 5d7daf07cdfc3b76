"""Operators of our own as ONNX functions of standard ones, for runtimes that do not have their
kernels.
"""

import re
from collections.abc import Iterable
from math import prod
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir

from ssdevice.adapters.storage import LEVELS
from ssdevice.export.onnx.editor import CONTRIB, OPSET, Editor, sizes_of
from ssdevice.model.attention import MASKED
from ssdevice.runtime.onnx import kernels

BLOCK = 32
"""Inputs that share a scale."""
ZERO_POINT = 128
"""Of rows in uint8."""
TAIL = 3
"""At most so many numbers do not fill a vector of four."""
VIEWS = ("rows", "heads", "queries", "grouped", "scores", "weights", "split", "whole")
"""Attributes of attention: shapes that its function needs; ``attention_form`` gives them their
values.
"""


def attention_form(rows: int, kv_heads: int, groups: int, dim: int, scale: float) -> dict[str, Any]:
    """The attributes of attention over ``rows`` new queries: the shapes of its function's views are
    among them.
    """
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


def row_form(edit: Editor, value: ir.Value) -> tuple[ir.Value, dict[str, Any]]:
    """The zero point of rows and the attributes of ``Int8Linear`` for their shape: one row has a
    single scale.
    """
    if (shape := sizes_of(value)) is None:
        raise ValueError(f"the rows of {value.name} are not static: {value.shape}")
    axes = list(range(len(shape)))
    if prod(shape[:-1]) == 1:
        return edit.constant(np.array(ZERO_POINT, np.uint8)), {
            "axes": axes,
            "keep": 0,
            "axis": 1,
            "block": 0,
        }
    zeros = edit.constant(np.full((*shape[:-1], 1), ZERO_POINT, np.uint8))
    return zeros, {"axes": [-1], "keep": 1, "axis": axes[-1], "block": shape[-1]}


# ids [..] int32, codes [K, N] int8, scales [N] -> [.., K]; ``whole``: that shape
_INT8_EMBEDDING = """<whole> (ids, codes, scales) => (y) {
  all = Constant <value_ints = [-1]> ()
  flat = Reshape (ids, all)
  columns = Gather <axis = 1> (codes, flat)
  turned = Transpose <perm = [1, 0]> (columns)
  own = Gather <axis = 0> (scales, flat)
  rows = DequantizeLinear <axis = 0> (turned, own)
  shape = Constant <value_ints: ints = @whole> ()
  y = Reshape (rows, shape)
}"""

RUNS = ("past_keys", "keys", "more_keys", "past_values", "values", "more_values")
"""Keys and values of attention."""
_SHAPES = "\n".join(f"  {view}_shape = Constant <value_ints: ints = @{view}> ()" for view in VIEWS)
# New keys and values are two runs [.., N D], the second maybe empty, past ones [P, N D], the mask
# [1, 1, R, P + S] for all S new rows. The result is [1, R, N G D], its heads ordered by (key head,
# group member) as those of the queries.
#
# FusedMatMul walks over keys and values head by head, as the cache holds them. The heads of a group
# are rows of one matrix, so keys are read once per group, and the mask of one row serves all of
# them.
#
# WebAssembly's Softmax adds four numbers at a time and the last one to three after them. Three
# masked columns at the end keep those that count out of there, so a sum does not depend on how many
# rows a call has.
_TREE_ATTENTION = f"""<kv_heads, scale, {", ".join(VIEWS)}> (q, {", ".join(RUNS)}, mask) => (y) {{
{_SHAPES}
  new_keys = Reshape (keys, rows_shape)
  last_keys = Reshape (more_keys, rows_shape)
  all_keys = Concat <axis = 0> (past_keys, new_keys, last_keys)
  k = Reshape (all_keys, heads_shape)
  new_values = Reshape (values, rows_shape)
  last_values = Reshape (more_values, rows_shape)
  all_values = Concat <axis = 0> (past_values, new_values, last_values)
  v = Reshape (all_values, heads_shape)
  by_group = Reshape (q, queries_shape)
  by_head = Transpose <perm = [1, 2, 0, 3]> (by_group)
  grouped = Reshape (by_head, grouped_shape)
  products = {CONTRIB}.FusedMatMul <transBatchB = 1, transB = 1, alpha: float = @scale> (grouped, k)
  scores = Reshape (products, scores_shape)
  masked = Add (scores, mask)
  tail = Constant <value_ints = [0, {TAIL}]> ()
  hidden = Constant <value_float = {MASKED!r}> ()
  last = Constant <value_ints = [-1]> ()
  wide = Pad (masked, tail, hidden, last)
  shares = Softmax <axis = -1> (wide)
  first = Constant <value_ints = [0]> ()
  end = Constant <value_ints = [-{TAIL}]> ()
  seen = Slice (shares, first, end, last)
  weights = Reshape (seen, weights_shape)
  sums = {CONTRIB}.FusedMatMul <transBatchB = 1> (weights, v)
  split = Reshape (sums, split_shape)
  by_row = Transpose <perm = [2, 0, 1, 3]> (split)
  y = Reshape (by_row, whole_shape)
}}"""

NEW = [run for run in RUNS if "past" not in run]
_ROUNDED = "\n".join(
    f"  {run}_half = Cast <to = 10> ({run})\n  {run}_wide = Cast <to = 1> ({run}_half)"
    for run in NEW
)
_GIVEN = ", ".join(f"{view}: ints = @{view}" for view in VIEWS)

# x [.., R, K], codes [K, N] int8, scales [N], zero uint8 -> [.., R, N]. ``zero`` is 128 in the
# shape of the rows' scales, [.., R, 1]. Attributes say over which ``axes`` a row's peak is taken,
# whether it keeps them (``keep``), and QuantizeLinear's ``axis`` and ``block``: one row has a
# single scale.
#
# A row of zeros has scale 0 and any codes: the product is multiplied by the scale, so it is 0 as it
# should be. MatMulIntegerToFloat takes one scale for all rows, so rows are scaled after it. A graph
# of one row does the same, though it could save the Mul: (x * column) * row and x * (column * row)
# round differently, and plain decoding would then differ from the step by an ulp, which the next
# rounding to eight bits turns into a whole level.
_INT8_LINEAR = f"""<axes, keep, axis, block> (x, codes, scales, zero) => (y) {{
  size = Abs (x)
  over = Constant <value_ints: ints = @axes> ()
  peak = ReduceMax <keepdims: int = @keep> (size, over)
  level = Constant <value_float = {1 / LEVELS!r}> ()
  scale = Mul (peak, level)
  rows = QuantizeLinear <axis: int = @axis, block_size: int = @block> (x, scale, zero)
  one = Constant <value_float = 1.0> ()
  center = Constant <value = uint8 {{{ZERO_POINT}}}> ()
  product = {CONTRIB}.MatMulIntegerToFloat (rows, codes, one, scales, center)
  y = Mul (product, scale)
}}"""


def _low_rank(linears: int) -> str:
    """base [.., R, N], x [.., R, K], down [K, S] int8, its scales [S], zero, with several linears
    their ``ranks``, and an up [rank, columns] for each -> [.., R, N].

    Its attributes are those of ``Int8Linear``.
    """
    numbers = range(linears)
    ups = [f"up{i}" for i in numbers]
    terms = [f"term{i}" for i in numbers]
    hs = ["h"]
    inputs = ["base", "x", "down", "scales", "zero", *ups]
    steps = []
    if linears > 1:
        hs = [f"h{i}" for i in numbers]
        inputs.insert(5, "ranks")
        steps.append(f"  {', '.join(hs)} = Split <axis = -1> (h, ranks)")
    for term, h, up in zip(terms, hs, ups, strict=True):
        steps.append(f"  {term} = MatMul ({h}, {up})")
    products = "\n".join(steps)
    return f"""<axes, keep, axis, block> ({", ".join(inputs)}) => (y) {{
  h = {kernels.DOMAIN}.{kernels.INT8_FACTOR}
    <axes: ints = @axes, keep: int = @keep, axis: int = @axis, block: int = @block>
    (x, down, scales, zero)
{products}
  term = Concat <axis = -1> ({", ".join(terms)})
  y = Add (base, term)
}}"""


FUNCTIONS = {
    # x [.., R, K], codes [N, K / 32, 16], scales [N, K / 32] -> [.., R, N]. A bias that follows
    # stays behind the view: ONNX Runtime would make it part of the product, with other bits than
    # those of an addition
    kernels.INT4_LINEAR: f"""<K, N> (x, codes, scales) => (y) {{
  product = {CONTRIB}.MatMulNBits
    <K: int = @K, N: int = @N, bits = 4, block_size = {BLOCK}, accuracy_level = 4>
    (x, codes, scales)
  sizes = Shape (product)
  y = Reshape (product, sizes)
}}""",
    # As Int8Linear, -> [.., R, 1] int64
    kernels.INT8_ARGMAX: f"""<axes, keep, axis, block> (x, codes, scales, zero) => (best) {{
  product = {kernels.DOMAIN}.{kernels.INT8_LINEAR}
    <axes: ints = @axes, keep: int = @keep, axis: int = @axis, block: int = @block>
    (x, codes, scales, zero)
  k = Constant <value_ints = [1]> ()
  largest, best = TopK <axis = -1> (product, k)
}}""",
    # x [1, R, (H + 2 N) D], cos, sin [1, R, E] -> queries [1, R, H D], keys [1, R, N D], values.
    # Attributes: ``heads`` H, ``kv_heads`` N, ``rotary_dim`` (0: all), and the ``widths`` of the
    # three.
    kernels.ROTARY_SPLIT: """<heads, kv_heads, rotary_dim, widths> (x, cos, sin)
  => (queries, keys, values) {
  parts = Constant <value_ints: ints = @widths> ()
  q, k, values = Split <axis = -1> (x, parts)
  queries = RotaryEmbedding
    <num_heads: int = @heads, rotary_embedding_dim: int = @rotary_dim> (q, cos, sin)
  keys = RotaryEmbedding
    <num_heads: int = @kv_heads, rotary_embedding_dim: int = @rotary_dim> (k, cos, sin)
}""",
    # x, y [.., F], weight [F] -> the RMS norm of x + y, and x + y
    kernels.ADD_NORM: f"""<epsilon> (x, y, weight) => (normed, sum) {{
  normed, mean, inverse, sum = {CONTRIB}.SkipSimplifiedLayerNormalization
    <epsilon: float = @epsilon> (x, y, weight)
}}""",
    # x [.., 2 F] -> [.., F]: the first half of a row times its sigmoid times the second half
    kernels.GATED_SILU: """(x) => (y) {
  gate, up = Split <axis = -1, num_outputs = 2> (x)
  share = Sigmoid (gate)
  silu = Mul (gate, share)
  y = Mul (silu, up)
}""",
    # x [.., R, K], weight [K, N] float16 -> [.., R, N]
    kernels.HALF_LINEAR: """(x, weight) => (y) {
  wide = Cast <to = 1> (weight)
  y = MatMul (x, wide)
}""",
    kernels.TREE_ATTENTION: _TREE_ATTENTION,
    # The same with scores that are bounded by ``softcap``
    kernels.CAPPED_ATTENTION: _TREE_ATTENTION.replace("<kv_heads,", "<softcap, kv_heads,").replace(
        "  masked = Add (scores, mask)",
        """  cap = Constant <value_float: float = @softcap> ()
  share = Div (scores, cap)
  bent = Tanh (share)
  bounded = Mul (bent, cap)
  masked = Add (bounded, mask)""",
    ),
    # The same with past keys and values in float16; new ones are rounded to it
    kernels.HALF_TREE_ATTENTION: f"""<kv_heads, scale, {", ".join(VIEWS)}>
  (q, {", ".join(RUNS)}, mask) => (y) {{
  past_keys_wide = Cast <to = 1> (past_keys)
  past_values_wide = Cast <to = 1> (past_values)
{_ROUNDED}
  y = {kernels.DOMAIN}.{kernels.TREE_ATTENTION}
    <kv_heads: int = @kv_heads, scale: float = @scale, {_GIVEN}>
    (q, {", ".join(f"{run}_wide" for run in RUNS)}, mask)
}}""",
    **dict.fromkeys((kernels.INT8_LINEAR, kernels.INT8_FACTOR), _INT8_LINEAR),
    **{name: _low_rank(linears) for linears, name in enumerate(kernels.LOW_RANK, 1)},
    **dict.fromkeys((kernels.INT8_EMBEDDING, kernels.TIED_EMBEDDING), _INT8_EMBEDDING),
}
"""Operator -> its function, in ONNX's text format."""
_PRODUCT = re.compile(
    r"^  (\w+) = (\S*MatMul(?:NBits)?(?:\s+<.*?>)?)\s+\((\w+), (.*)\)$", re.MULTILINE
)
_TWICE = r"""  two_\3 = Concat <axis = -2> (\3, \3)
  two_\1 = \2 (two_\3, \4)
  \1, again_\1 = Split <axis = -2, num_outputs = 2> (two_\1)"""
ALONE = {name: _PRODUCT.sub(_TWICE, text) for name, text in FUNCTIONS.items()}
"""The same for graphs of one row, each product of floats with the row twice: ONNX Runtime has other
kernels for a single row, which sum in another order.

Where rows are rounded to eight bits after it, that becomes whole levels, and plain answers would
not be those of steps.
"""
IMPORTS = f'["" : {OPSET}, "{CONTRIB}" : 1, "{kernels.DOMAIN}" : 1]'
HEADER = f'<domain: "{kernels.DOMAIN}", opset_import: {IMPORTS}>'


def add_functions(model: ir.Model, alone: bool = False) -> None:
    """Give a model the functions of the operators that its graph and functions call, and of those
    that they call.

    ``alone``: it computes a single row.
    """
    texts = ALONE if alone else FUNCTIONS
    made: dict[str, ir.Function] = {}
    waiting = _called(model.graph).union(*map(_called, model.functions.values()))
    while waiting:
        name = waiting.pop()
        made[name] = ir.serde.deserialize_function(
            onnx.parser.parse_function(f"{HEADER} {name} {texts[name]}")
        )
        waiting |= _called(made[name]) - made.keys()
    for _, function in sorted(made.items()):
        model.functions[function.identifier()] = function
    if made:
        model.opset_imports[kernels.DOMAIN] = 1


def _called(nodes: Iterable[ir.Node]) -> set[str]:
    """The operators of ours but regions, which have a function each."""
    return {
        node.op_type
        for node in nodes
        if node.domain == kernels.DOMAIN and node.op_type != kernels.REGION
    }
