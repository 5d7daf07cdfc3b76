"""Right calls of every operator of ONNX that regions take."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def drawn(kind: type[np.generic], *shape: int) -> np.ndarray:
    """Small numbers of this type."""
    return np.random.default_rng(sum(shape)).integers(-4, 5, shape).astype(kind)


F, H, N, J, B = np.float32, np.float16, np.int32, np.int64, np.bool_
PAIRS = [((3, 1, 4), (2, 1)), ((), (5,)), ((2, 3), (2, 3)), ((1,), ()), ((2, 1, 3, 1), (4, 1, 5)), ((0, 3), (1, 3))]
IDS = (np.array(1, J), np.array([2, -3, 0], N), np.array([[0], [1]], J))
BOUNDS = ((1, 1 << 62, 1, 1), (-4, -1, 1, 1), (0, 9, 1, 2), (2, 1, 0, 1), (-99, 2, 0, 1))
RANGES = ((0, 7, 1), (-3, 8, 2), (5, 5, 1))
Step = tuple[str, dict[str, object], list[np.ndarray]]


def _steps() -> Iterator[Step]:
    """Every operator that regions take, with inputs of all its types."""
    for a, b in PAIRS:
        for t in (F, N, J):
            for kind in ("Add", "Sub", "Mul", "Less", "LessOrEqual", "Equal"):
                yield kind, {}, [drawn(t, *a), drawn(t, *b)]
            yield "Where", {}, [drawn(B, *a), drawn(t, *b), drawn(t, 1)]
        yield "And", {}, [drawn(B, *a), drawn(B, *b)]
    for t in (F, H, N, J, B):
        if t is not H:
            yield from (("Cast", {"to": to}, [drawn(t, 3, 7)]) for to in (1, 6, 7, 9))
        for axis in (0, 1):
            yield "Concat", {"axis": axis}, [drawn(t, 2, 3, 4), drawn(t, 2, 3, 4)]
            yield from (("Gather", {"axis": axis}, [drawn(t, 3, 4), ids]) for ids in IDS)
        yield "Expand", {}, [drawn(t, 2, 1, 3), np.array([4, 1, 5, 1], J)]
        yield "Reshape", {}, [drawn(t, 2, 3, 4), np.array([0, -1, 2], J)]
        yield "Shape", {"start": 1, "end": 3}, [drawn(t, 2, 3, 4)]
    yield "Cast", {"to": 10}, [np.linspace(-7e4, 7e4, 77, dtype=F)]
    yield "Concat", {"axis": 1}, [drawn(F, 2, 1, 4), drawn(F, 2, 0, 4), drawn(F, 2, 3, 4)]
    yield from (("Slice", {}, [drawn(F, 3, 9), *(np.array([b], J) for b in bounds)]) for bounds in BOUNDS)
    yield from (("Range", {}, [np.array(each, t) for each in bounds]) for t in (N, J) for bounds in RANGES)
    yield "MatMul", {}, [drawn(F, 5, 4), drawn(F, 4, 1)]
    yield from (("ArgMax", {"axis": -1, "keepdims": 0}, [drawn(F, *shape)]) for shape in ((1, 9), (2, 3, 40)))


STEPS = tuple(_steps())
