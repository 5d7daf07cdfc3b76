"""The table of operations that move, read or write elements."""

from __future__ import annotations

import numpy as np

from tests.mil.builder import Case
from tests.mil.cases import b, f, i, op


def shapes() -> list[Case]:
    """Moving, repeating."""
    x = f(2, 3, 4)
    cases = [
        Case("identity", op("identity", "x"), (x,)),
        Case("reshape", op("reshape", "x", shape=[4, -1]), (x,)),
        Case("transpose", op("transpose", "x", perm=[2, 0, -2]), (x,)),
        Case("expand_dims", op("expand_dims", "x", axes=[0, -1]), (x,)),
        Case("tile", op("tile", "x", reps=[2, 1, 3]), (x,)),
        Case("split_sizes", op("split", "x", split_sizes=[1, 3], axis=2), (x,)),
        Case("concat", lambda mb, a, c: mb.concat(values=(a, c), axis=1), (f(2, 1), f(2, 3))),
        Case("stack", lambda mb, a, c: mb.stack(values=(a, c), axis=-1), (f(2, 3), f(2, 3))),
    ]
    return [Case(case.name, case.build, case.inputs, case.expected, exact=True) for case in cases]


def indexing() -> list[Case]:
    """Slices, gathers."""
    x = f(4, 5, 6)
    at = i(2, 3, low=0, high=4)
    cases = [
        Case(
            "slice",
            op("slice_by_index", "x", begin=[1, 0, -4], end=[3, 5, -1], stride=[1, 2, 1]),
            (x,),
        ),
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
        Case(
            "slice_back",
            op("slice_by_index", "x", begin=[3, 0, 0], end=[0, 5, 6], stride=[-1, 1, 1]),
            (x,),
        ),
        Case(
            "slice_update_runtime",
            op("slice_update", "x", "update", "begin", "end"),
            (x, f(2, 5, 6), np.array([2, 0, 0], np.int32), np.array([4, 5, 6], np.int32)),
            lambda x, u, b, e: np.concatenate([x[:2], u]),
        ),
        Case("gather", op("gather", "x", "indices", axis=0), (x, at)),
        Case("gather_axis", op("gather", "x", "indices", axis=-2), (x, i(3, low=0, high=5))),
        Case("gather_int", op("gather", "x", "indices"), (i(9), i(3, low=0, high=9))),
    ]
    cases = [Case(case.name, case.build, case.inputs, case.expected, exact=True) for case in cases]
    cases.append(
        Case("where_bool", op("select", "cond", "a", "b"), (b(2, 3), b(2, 3), b(3)), exact=True)
    )
    return cases
