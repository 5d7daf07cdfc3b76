"""The kernels of all operations that exported programs use; ``registry`` says what a kernel is."""

from __future__ import annotations

import math

import numpy as np

from ssdevice.mil.dtypes import BY_NAME
from ssdevice.mil.registry import ExecutionError, Function, Node, Tensor, define, kernel

# Elementwise: arithmetic, comparisons, activations, casts; and softmax.

_ROUNDED: dict[str, Function] = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "real_div": np.true_divide}
_EXACT: dict[str, Function] = {
    "maximum": np.maximum,
    "equal": np.equal,
    "greater_equal": np.greater_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "logical_and": np.logical_and,
}
for _kind, _function in _ROUNDED.items():
    define(_kind, "x y", _function)
for _kind, _function in _EXACT.items():
    define(_kind, "x y", _function, exact=True)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x). e^-x may overflow to infinity, which gives the right 0."""
    return np.reciprocal(np.float32(1) + np.exp(-x))


erf = np.vectorize(math.erf, otypes=[np.float32])

define("abs", "x", np.abs, exact=True)
define("erf", "x", erf)
define("relu", "x", lambda x: np.maximum(x, 0), exact=True)
define("select", "cond a b", np.where, exact=True)
define("sigmoid", "x", sigmoid)
define("silu", "x", lambda x: x * sigmoid(x))
define("softplus", "x", lambda x: np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0))
define("sqrt", "x", np.sqrt)
define("tanh", "x", np.tanh)


@kernel("gelu", "x")
def _gelu(node: Node) -> Function:
    mode = node.text("mode", "EXACT")
    if mode == "EXACT":
        return lambda x: 0.5 * x * (1 + erf(x * np.float32(math.sqrt(0.5))))
    if mode == "TANH_APPROXIMATION":
        root = np.float32(math.sqrt(2 / math.pi))
        return lambda x: 0.5 * x * (1 + np.tanh(root * (x + np.float32(0.044715) * x * x * x)))
    raise node.unsupported(f"mode {mode!r}")


@kernel("softmax", "x")
def _softmax(node: Node) -> Function:
    """Shifted by the maximum. The sum is float64, as in kernels that sum."""
    axis = node.integer("axis", -1)

    def run(x: Tensor) -> Tensor:
        shifted = np.exp(x - x.max(axis=axis, keepdims=True))
        shifted /= shifted.sum(axis=axis, keepdims=True, dtype=np.float64).astype(x.dtype)
        return shifted

    return run


@kernel("clip", "x", exact=True)
def _clip(node: Node) -> Function:
    low, high = node.number("alpha"), node.number("beta")
    return lambda x: np.minimum(np.maximum(x, low), high)


@kernel("inverse", "x")
def _inverse(node: Node) -> Function:
    epsilon = node.number("epsilon", 1e-4)
    return lambda x: np.reciprocal(x + epsilon)


@kernel("rsqrt", "x")
def _rsqrt(node: Node) -> Function:
    epsilon = node.number("epsilon", 1e-12)
    return lambda x: np.reciprocal(np.sqrt(x + epsilon))


@kernel("cast", "x")
def _cast(node: Node) -> Function:
    # Floats are float32 here; every output is rounded to its declared type, which does the narrowing to float16.
    target = node.text("dtype")
    dtype = BY_NAME.get({"fp16": "float16", "fp32": "float32"}.get(target, target))
    if dtype is None:
        raise node.unsupported(f"type {target!r}")
    held = dtype.held
    return lambda x: x.astype(held, copy=False)


# Products of matrices.

BLOCK = 1 << 17
"""Elements of a weight that are widened to float64 at a time: few enough to stay in the processor's cache."""


@kernel("linear", "x", sums=True)
def _linear(node: Node) -> Function:
    weight = node.array("weight")
    bias = node.array("bias") if node.has("bias") else None
    if bias is not None and not bias.any():
        bias = None
    width, inputs = weight.shape
    step = max(1, BLOCK // max(1, inputs))

    def run(x: Tensor) -> Tensor:
        rows = x.reshape(-1, inputs)
        out = np.empty((rows.shape[0], width))
        for at in range(0, width, step):
            np.matmul(rows, weight[at : at + step].astype(np.float64).T, out=out[:, at : at + step])
        if bias is not None:
            out += bias
        return out.reshape(*x.shape[:-1], width)

    return run


@kernel("matmul", "x y", sums=True)
def _matmul(node: Node) -> Function:
    flip_x, flip_y = node.flag("transpose_x"), node.flag("transpose_y")
    return lambda x, y: np.matmul(x.swapaxes(-1, -2) if flip_x else x, y.swapaxes(-1, -2) if flip_y else y)


# Reductions and normalization.


@kernel("reduce_max", "x", exact=True)
def _reduce_max(node: Node) -> Function:
    axes, keep = tuple(node.ints("axes")), node.flag("keep_dims")
    return lambda x: x.max(axis=axes, keepdims=keep)


@kernel("reduce_mean", "x", sums=True)
def _reduce_mean(node: Node) -> Function:
    axes, keep = tuple(node.ints("axes")), node.flag("keep_dims")
    return lambda x: x.mean(axis=axes, keepdims=keep)


@kernel("reduce_argmax", "x", exact=True)
def _argmax(node: Node) -> Function:
    # MIL does not specify ties. Here the lowest index wins, as in NumPy and in the step contract.
    axis, keep = node.integer("axis", -1), node.flag("keep_dims")
    return lambda x: np.argmax(x, axis=axis, keepdims=keep)


@kernel("layer_norm", "x", sums=True)
def _layer_norm(node: Node) -> Function:
    epsilon = node.number("epsilon", 1e-5)
    gamma = node.array("gamma") if node.has("gamma") else None
    beta = node.array("beta") if node.has("beta") else None
    wanted = node.ints("axes") if node.has("axes") else None

    def run(x: Tensor) -> Tensor:
        axes = tuple(sorted(axis % x.ndim for axis in (wanted or range(x.ndim))))
        shape = [size if axis in axes else 1 for axis, size in enumerate(x.shape)]
        centred = x - x.mean(axis=axes, keepdims=True)
        out = centred / np.sqrt((centred * centred).mean(axis=axes, keepdims=True) + epsilon)
        if gamma is not None:
            out = out * gamma.reshape(shape)
        return out if beta is None else out + beta.reshape(shape)

    return run


# Elements moved or repeated, whatever their values.

define("identity", "x", lambda x: x, exact=True)


@kernel("reshape", "x", exact=True)
def _reshape(node: Node) -> Function:
    shape = node.ints("shape")
    return lambda x: x.reshape(shape)


@kernel("transpose", "x", exact=True)
def _transpose(node: Node) -> Function:
    order = node.ints("perm")
    return lambda x: x.transpose(order)


@kernel("expand_dims", "x", exact=True)
def _expand_dims(node: Node) -> Function:
    axes = tuple(node.ints("axes"))
    return lambda x: np.expand_dims(x, axes)


@kernel("split", "x", exact=True)
def _split(node: Node) -> Function:
    axis, ends = node.integer("axis"), np.cumsum(node.ints("split_sizes"))[:-1]
    return lambda x: np.split(x, ends, axis)


@kernel("tile", "x", exact=True)
def _tile(node: Node) -> Function:
    reps = node.ints("reps")
    return lambda x: np.tile(x, reps)


@kernel("concat", "values*", exact=True)
def _concat(node: Node) -> Function:
    axis = node.integer("axis")
    if node.flag("interleave"):
        raise node.unsupported("interleave")
    return lambda *values: np.concatenate(values, axis)


@kernel("stack", "values*", exact=True)
def _stack(node: Node) -> Function:
    axis = node.integer("axis")
    return lambda *values: np.stack(values, axis)


# Slices and gathers. Core ML leaves the result of an out-of-range index undefined. A program that relies on one is
# wrong on some device, so it fails here.


@kernel("slice_by_index", "x", exact=True)
def _slice_by_index(node: Node) -> Function:
    begin, end = node.ints("begin"), node.ints("end")
    stride = node.ints("stride") if node.has("stride") else [1] * len(begin)
    skip_begin, skip_end, squeeze = (
        node.ints(name) if node.has(name) else [0] * len(begin) for name in ("begin_mask", "end_mask", "squeeze_mask")
    )
    parts: list[int | slice] = []
    for axis, (first, last) in enumerate(zip(begin, end, strict=True)):
        start, stop = None if skip_begin[axis] else first, None if skip_end[axis] else last
        parts.append((start or 0) if squeeze[axis] else slice(start, stop, stride[axis]))
    index = tuple(parts)
    return lambda x: x[index]


@kernel("slice_update", "x update begin end", exact=True)
def _slice_update(node: Node) -> Function:
    if any(node.has(name) for name in ("stride", "begin_mask", "end_mask", "squeeze_mask")):
        raise node.unsupported("an update with strides or masks")

    def run(x: Tensor, update: Tensor, begin: Tensor, end: Tensor) -> Tensor:
        places = list(zip(begin.tolist(), end.tolist(), x.shape, strict=True))
        for axis, (first, last, size) in enumerate(places):
            if not 0 <= first <= last <= size:
                raise ExecutionError(f"slice {first}:{last} on axis {axis} of size {size}")
        out = x.copy()
        target = out[tuple(slice(first, last) for first, last, _ in places)]
        if target.shape != update.shape:
            raise ExecutionError(f"an update of shape {list(update.shape)} for a slice of {list(target.shape)}")
        target[...] = update
        return out

    return run


@kernel("gather", "x indices", exact=True)
def _gather(node: Node) -> Function:
    axis = node.integer("axis", 0)
    if node.integer("batch_dims", 0):
        raise node.unsupported("batch_dims")

    def run(x: Tensor, indices: Tensor) -> Tensor:
        size = x.shape[axis]
        low, high = (int(indices.min()), int(indices.max())) if indices.size else (0, size - 1)
        if low < 0 or high >= size:  # since iOS 17 negative indices do not count from the end
            raise ExecutionError(f"index {high if high >= size else low} is out of range for size {size}")
        return np.take(x, indices, axis)

    return run


# Decompression of weights, in float32 with one rounding to the declared type, in which coremltools computes. The
# results agree for integer offsets: the difference is exact then, and only the product is rounded.


def _spread(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``values``, one per block, repeated along each axis to the sizes of ``shape``."""
    for axis, size in enumerate(shape):
        if size % values.shape[axis]:
            raise ExecutionError(f"{values.shape[axis]} blocks do not divide axis {axis} of size {size}")
        if values.shape[axis] not in (1, size):
            values = np.repeat(values, size // values.shape[axis], axis)
    return values


def _shift_scale(data: Tensor, scale: Tensor, offset: Tensor | None = None) -> Tensor:
    values = data.astype(np.float32)
    if offset is not None:
        values -= _spread(offset, data.shape)
    values *= _spread(scale, data.shape)
    return values


def _look_up(indices: Tensor, table: Tensor) -> Tensor:
    """Palette entries: ``table`` [blocks.., palettes, 1] for ``indices``."""
    palettes = table.shape[-2]
    if indices.size and int(indices.max()) >= palettes:
        raise ExecutionError(f"palette index {int(indices.max())} of {palettes}")
    # One number per palette in the flattened table, then one table lookup for all elements.
    blocks = np.arange(table.size // palettes).reshape(table.shape[:-2])
    return table.reshape(-1)[_spread(blocks, indices.shape) * palettes + indices]


define("constexpr_blockwise_shift_scale", "data scale offset?", _shift_scale, weight=True)


@kernel("constexpr_lut_to_dense", "indices lut", weight=True)
def _lut_to_dense(node: Node) -> Function:
    if node.has("shape") or node.array("lut").shape[-1] != 1:  # the form before iOS 18, and palettes of vectors
        raise node.unsupported("this form of a palette")
    return _look_up
