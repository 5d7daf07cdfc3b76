"""The table of operations that move, read or write elements."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.mil.builder import Build, Case
from tests.mil.cases import b, f, i, op


def shapes() -> list[Case]:
    """Making, moving, repeating."""
    x = f(2, 3, 4)
    cases = [
        Case("identity", op("identity", "x"), (x,)),
        Case("reshape", op("reshape", "x", shape=[4, -1]), (x,)),
        Case("reshape_zero", op("reshape", "x", shape=[0, -1, 2]), (x,)),
        Case(
            "reshape_runtime", op("reshape", "x", "shape"), (x, np.array([6, 4], np.int32)), lambda x, s: x.reshape(s)
        ),
        Case("transpose", op("transpose", "x", perm=[2, 0, -2]), (x,)),
        Case("expand_dims", op("expand_dims", "x", axes=[0, -1]), (x,)),
        Case("squeeze", op("squeeze", "x", axes=[0, 2]), (f(1, 3, 1, 2),)),
        Case("squeeze_all", op("squeeze", "x"), (f(1, 3, 1, 2),)),
        Case("flatten2d", op("flatten2d", "x", axis=2), (x,)),
        Case("tile", op("tile", "x", reps=[2, 1, 3]), (x,)),
        Case("split", op("split", "x", num_splits=2, axis=-1), (x,)),
        Case("split_sizes", op("split", "x", split_sizes=[1, 3], axis=2), (x,)),
        Case("concat", lambda mb, a, c: mb.concat(values=(a, c), axis=1), (f(2, 1), f(2, 3))),
        Case(
            "concat_interleave",
            lambda mb, a, c: mb.concat(values=(a, c), axis=0, interleave=True),
            (f(3, 2), f(3, 2)),
            lambda a, c: np.stack([a, c], 1).reshape(6, 2),
        ),
        Case("stack", lambda mb, a, c: mb.stack(values=(a, c), axis=-1), (f(2, 3), f(2, 3))),
        Case("reverse", op("reverse", "x", axes=[-1]), (x,)),
        Case("pad", op("pad", "x", pad=[1, 2], mode="constant", constant_val=0.5), (f(2, 3),)),
        Case("pad_reflect", op("pad", "x", pad=[0, 0, 2, 1], mode="reflect"), (f(2, 4),)),
        Case("pad_replicate", op("pad", "x", pad=[1, 1, 2, 1], mode="replicate"), (f(2, 4),)),
        Case("fill", lambda mb, n: mb.fill(shape=n, value=1.5), (np.array([2, 3], np.int32),)),
        Case("fill_like", lambda mb, x: mb.fill_like(ref_tensor=x, value=7), (x,), lambda x: np.full(x.shape, 7)),
        Case("shape", op("shape", "x"), (x,)),
        Case("non_zero", op("non_zero", "x"), (np.array([[0, 1, 2], [3, 0, 0]], np.int32),)),
        Case("range_1d", _range, (np.array([2, 11, 3], np.int32),), lambda v: np.arange(2, 11, 3)),
        Case(
            "one_hot",
            op("one_hot", "indices", one_hot_vector_size=4),
            (i(2, 3, low=0, high=4),),
            lambda v: np.eye(4)[v],
        ),
        Case(
            "one_hot_values",
            op("one_hot", "indices", one_hot_vector_size=4, axis=0, on_value=2.5, off_value=-1.0),
            (i(3, low=0, high=4),),
            lambda v: np.where(np.arange(4)[:, None] == v, 2.5, -1.0),
        ),
        Case("band_part", op("band_part", "x", lower=1, upper=0), (f(2, 4, 5),)),
        Case("band_part_lower", op("band_part", "x", lower=-1, upper=0), (f(4, 5),)),
    ]
    return [Case(case.name, case.build, case.inputs, case.expected, exact=True) for case in cases]


def _range(mb: Any, v: Any) -> Any:
    start, end, step = (mb.squeeze(x=part, axes=[0]) for part in mb.split(x=v, num_splits=3, axis=0))
    return mb.range_1d(start=start, end=end, step=step)


def _nd(data: np.ndarray, index: np.ndarray, updates: np.ndarray, mode: str) -> np.ndarray:
    out = data.copy()
    ufunc = {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "div": np.divide,
        "max": np.maximum,
        "min": np.minimum,
    }
    for where in np.ndindex(index.shape[:-1]):
        place = tuple(index[where])
        out[place] = updates[where] if mode == "update" else ufunc[mode](out[place], updates[where])
    return out


def indexing() -> list[Case]:
    """Slices, gathers, scatters."""
    x = f(4, 5, 6)
    at = i(2, 3, low=0, high=4)
    cases = [
        Case("slice", op("slice_by_index", "x", begin=[1, 0, -4], end=[3, 5, -1], stride=[1, 2, 1]), (x,)),
        Case(
            "slice_masks",
            op(
                "slice_by_index",
                "x",
                begin=[1, 1, 3],
                end=[2, 1, 1],
                begin_mask=[False, True, False],
                end_mask=[True, False, True],
                squeeze_mask=[False, False, True],
            ),
            (x,),
            lambda x: x[1:, :1, 3],
        ),
        Case("slice_back", op("slice_by_index", "x", begin=[3, 0, 0], end=[0, 5, 6], stride=[-1, 1, 1]), (x,)),
        Case(
            "slice_runtime",
            op("slice_by_index", "x", "begin", "end"),
            (x, np.array([1, 0, 2], np.int32), np.array([3, 5, 3], np.int32)),
            lambda x, begin, end: x[1:3, 0:5, 2:3],
        ),
        Case("slice_size", op("slice_by_size", "x", begin=[1, 0, -2], size=[2, -1, 2]), (x,)),
        Case(
            "slice_size_runtime",
            op("slice_by_size", "x", "begin", size=[2, 5, 1]),
            (x, np.array([2, 0, 3], np.int32)),
            lambda x, begin: x[2:4, :, 3:4],
        ),
        Case("slice_update", op("slice_update", "x", "update", begin=[1, 0, 2], end=[3, 5, 3]), (x, f(2, 5, 1))),
        Case(
            "slice_update_masks",
            op(
                "slice_update",
                "x",
                "update",
                begin=[1, 0, 2],
                end=[1, 0, 4],
                end_mask=[False, True, False],
                squeeze_mask=[True, False, False],
            ),
            (x, f(5, 2)),
        ),
        Case(
            "slice_update_runtime",
            op("slice_update", "x", "update", "begin", "end"),
            (x, f(2, 5, 6), np.array([2, 0, 0], np.int32), np.array([4, 5, 6], np.int32)),
            lambda x, u, b, e: np.concatenate([x[:2], u]),
        ),
        Case("gather", op("gather", "x", "indices", axis=0), (x, at)),
        Case("gather_axis", op("gather", "x", "indices", axis=-2), (x, i(3, low=0, high=5))),
        Case("gather_batch", op("gather", "x", "indices", axis=2, batch_dims=1), (x, i(4, 3, low=0, high=6))),
        Case("gather_batch2", op("gather", "x", "indices", axis=2, batch_dims=2), (x, i(4, 5, 2, low=0, high=6))),
        Case("gather_int", op("gather", "x", "indices"), (i(9), i(3, low=0, high=9))),
        Case("gather_along", op("gather_along_axis", "x", "indices", axis=1), (x, i(4, 2, 6, low=0, high=5))),
        Case(
            "gather_nd", op("gather_nd", "x", "indices"), (x, i(3, 2, low=0, high=4)), lambda x, v: x[v[:, 0], v[:, 1]]
        ),
        Case(
            "gather_nd_batch",
            op("gather_nd", "x", "indices", batch_dims=1),
            (x, i(4, 3, 1, low=0, high=5)),
            lambda x, v: np.stack([x[n][v[n, :, 0]] for n in range(4)]),
        ),
        Case(
            "scatter",
            op("scatter", "data", "indices", "updates", axis=1, mode="update"),
            (x, np.array([3, 0], np.int32), f(4, 2, 6)),
            _scatter_update,
        ),
        Case(
            "scatter_add",
            op("scatter", "data", "indices", "updates", mode="add"),
            (f(4, 3), np.array([1, 1, 0], np.int32), f(3, 3)),
            lambda d, v, u: _nd(d, v[:, None], u, "add"),
        ),
        Case(
            "scatter_along",
            op("scatter_along_axis", "data", "indices", "updates", axis=1, mode="update"),
            (f(3, 5), np.array([[0, 4], [1, 2], [3, 0]], np.int32), f(3, 2)),
        ),
    ]
    for mode in ("update", "add", "sub", "mul", "div", "max", "min"):
        cases.append(
            Case(
                f"scatter_nd_{mode}",
                op("scatter_nd", "data", "indices", "updates", mode=mode),
                (f(4, 3, 2), np.array([[0, 1], [3, 2], [1, 1]], np.int32), f(3, 2, low=0.5)),
                lambda d, v, u, mode=mode: _nd(d, v, u, mode),
            )
        )
    cases = [Case(case.name, case.build, case.inputs, case.expected, exact=True) for case in cases]
    cases.append(Case("quantize", _quantize("int8", np.int8(3)), (f(3, 4, low=-9, high=9),)))
    cases.append(Case("quantize_axis", _quantize("uint8", np.array([1, 2, 3], np.uint8), 0), (f(3, 4, high=9),)))
    cases.append(Case("where_bool", op("select", "cond", "a", "b"), (b(2, 3), b(2, 3), b(3)), exact=True))
    return cases


def _scatter_update(data: np.ndarray, indices: np.ndarray, updates: np.ndarray) -> np.ndarray:
    out = data.copy()
    out[:, indices] = updates
    return out


def _quantize(dtype: str, zero: Any, axis: int | None = None) -> Build:
    """Quantize and come back: integers of 8 bits do not leave a model."""
    scale = np.float32(0.07) if axis is None else np.array([0.05, 0.07, 0.09], np.float32)
    extra = {} if axis is None else {"axis": np.int32(axis)}

    def build(mb: Any, x: Any) -> Any:
        packed = mb.quantize(input=x, scale=scale, zero_point=zero, output_dtype=dtype, **extra)
        if not isinstance(x, np.ndarray):
            return mb.dequantize(input=packed, scale=scale, zero_point=zero, **extra)
        return _Value(mb.dequantize(input=packed, scale=scale, zero_point=zero, **extra))

    return build


class _Value:
    """A dequantized constant: coremltools keeps it packed until asked."""

    def __init__(self, var: Any) -> None:
        self.val = var.op.materialized_val_inference()
