"""The kernels of all operations that exported programs use.

They are NumPy functions of operands, which may be known only at run time, and of constant
parameters.

Floating-point operands are float32 whatever the program declares, and float64 for kernels that sum.
``Program`` rounds the result to the declared type.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ssdevice.errors import SSDeviceError
from ssdevice.mil.weights import BY_NAME, Array

Tensor: TypeAlias = Any
"""What kernels compute with: an array, or NumPy's scalar where the rank is 0."""
Function = Callable[..., Any]
Constant = Array | str


class UnsupportedOpError(SSDeviceError):
    """A program uses an operation, or a form of one, that has no kernel here."""


class ExecutionError(SSDeviceError):
    """An operation could not be executed.

    Such as: an index is out of range, shapes do not fit, a parameter is missing.
    """


@dataclass(frozen=True)
class Kernel:
    """One kernel: ``function(*operands, **parameters)``, which never writes into its operands.

    - ``exact``: it only moves or compares values, so its output needs no rounding.
    - ``weight``: it decompresses a constant, which keeps its declared type in every precision.
    - ``sums``: it adds values and gets float64 operands, so that the rounded sum does not depend on
      the order of its terms.
    """

    function: Function
    operands: tuple[str, ...]
    parameters: frozenset[str]
    exact: bool = False
    weight: bool = False
    sums: bool = False


KERNELS: dict[str, Kernel] = {}


def kernel(kind: str, operands: str, **traits: bool) -> Callable[[Function], Function]:
    """Register a function for an operation.

    The constants that it takes are its keyword-only parameters. ``operands``: names in order; ``?``
    marks one that may be absent, ``*`` one that takes a tuple. ``traits``: of Kernel.
    """

    def register(function: Function) -> Function:
        constants = set[str]()
        if not isinstance(function, np.ufunc):
            for name, parameter in inspect.signature(function).parameters.items():
                if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                    constants.add(name)
        names = tuple(operands.split())
        KERNELS[kind] = Kernel(function, names, frozenset(constants), **traits)
        return function

    return register


def plain(value: Constant) -> Any:
    """A constant as kernels take it.

    It is a text, a number, a list of integers or truth values, or an array of floats.
    """
    if isinstance(value, str):
        return value
    if value.ndim == 0:
        return value.item()
    if value.dtype.kind == "f":
        return value
    return value.reshape(-1).tolist()


# Elementwise: arithmetic, comparisons, activations, casts; and softmax.

kernel("add", "x y")(np.add)
kernel("sub", "x y")(np.subtract)
kernel("mul", "x y")(np.multiply)
kernel("real_div", "x y")(np.true_divide)
kernel("maximum", "x y", exact=True)(np.maximum)
kernel("equal", "x y", exact=True)(np.equal)
kernel("greater_equal", "x y", exact=True)(np.greater_equal)
kernel("less", "x y", exact=True)(np.less)
kernel("less_equal", "x y", exact=True)(np.less_equal)
kernel("logical_and", "x y", exact=True)(np.logical_and)


@kernel("sigmoid", "x")
def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x). e^-x may overflow to infinity, which gives the right 0."""
    return np.reciprocal(np.float32(1) + np.exp(-x))


erf = np.vectorize(math.erf, otypes=[np.float32])

kernel("abs", "x", exact=True)(np.abs)
kernel("erf", "x")(lambda x: erf(x))
kernel("relu", "x", exact=True)(lambda x: np.maximum(x, 0))
kernel("select", "cond a b", exact=True)(lambda cond, a, b: np.where(cond, a, b))
kernel("silu", "x")(lambda x: x * sigmoid(x))
kernel("softplus", "x")(lambda x: np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0))
kernel("sqrt", "x")(np.sqrt)
kernel("tanh", "x")(np.tanh)
kernel("clip", "x", exact=True)(lambda x, *, alpha, beta: np.minimum(np.maximum(x, alpha), beta))
kernel("inverse", "x")(lambda x, *, epsilon=1e-4: np.reciprocal(x + epsilon))
kernel("rsqrt", "x")(lambda x, *, epsilon=1e-12: np.reciprocal(np.sqrt(x + epsilon)))


@kernel("gelu", "x")
def _gelu(x: Tensor, *, mode: str = "EXACT") -> Tensor:
    if mode == "EXACT":
        return 0.5 * x * (1 + erf(x * np.float32(math.sqrt(0.5))))
    if mode == "TANH_APPROXIMATION":
        root = np.float32(math.sqrt(2 / math.pi))
        return 0.5 * x * (1 + np.tanh(root * (x + np.float32(0.044715) * x * x * x)))
    raise ExecutionError(f"mode {mode!r} is not supported")


@kernel("softmax", "x")
def _softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """Shifted by the maximum. The sum is float64, as in kernels that sum."""
    shifted = np.exp(x - x.max(axis=axis, keepdims=True))
    shifted /= shifted.sum(axis=axis, keepdims=True, dtype=np.float64).astype(x.dtype)
    return shifted


@kernel("cast", "x")
def _cast(x: Tensor, *, dtype: str) -> Tensor:
    # Floats are float32 here; every output is rounded to its declared type, which does the
    # narrowing to float16.
    names = {"fp16": "float16", "fp32": "float32"}
    kind = BY_NAME.get(names.get(dtype, dtype))
    if kind is None:
        raise ExecutionError(f"type {dtype!r} is not supported")
    return x.astype(kind.held, copy=False)


# Products of matrices.

BLOCK = 1 << 17
"""Elements of a weight that are widened to float64 at a time: they fit a CPU's cache."""


@kernel("linear", "x", sums=True)
def _linear(x: Tensor, *, weight: Array, bias: Array | None = None) -> Tensor:
    width, inputs = weight.shape
    step = max(1, BLOCK // max(1, inputs))
    rows = x.reshape(-1, inputs)
    out = np.empty((rows.shape[0], width))
    for at in range(0, width, step):
        np.matmul(rows, weight[at : at + step].astype(np.float64).T, out=out[:, at : at + step])
    if bias is not None and bias.any():
        out += bias
    return out.reshape(*x.shape[:-1], width)


@kernel("matmul", "x y", sums=True)
def _matmul(
    x: Tensor, y: Tensor, *, transpose_x: bool = False, transpose_y: bool = False
) -> Tensor:
    if transpose_x:
        x = x.swapaxes(-1, -2)
    if transpose_y:
        y = y.swapaxes(-1, -2)
    return np.matmul(x, y)


# Reductions and normalization.

kernel("reduce_max", "x", exact=True)(
    lambda x, *, axes, keep_dims=False: x.max(tuple(axes), keepdims=keep_dims)
)
kernel("reduce_mean", "x", sums=True)(
    lambda x, *, axes, keep_dims=False: x.mean(tuple(axes), keepdims=keep_dims)
)


@kernel("reduce_argmax", "x", exact=True)
def _argmax(
    x: Tensor, *, axis: int = -1, keep_dims: bool = False, output_dtype: str = "int32"
) -> Tensor:
    # MIL does not specify ties. Here the lowest index wins, as in NumPy and in the step contract.
    return np.argmax(x, axis=axis, keepdims=keep_dims)


@kernel("layer_norm", "x", sums=True)
def _layer_norm(
    x: Tensor,
    *,
    axes: Sequence[int] = (),
    gamma: Array | None = None,
    beta: Array | None = None,
    epsilon: float = 1e-5,
) -> Tensor:
    over = tuple(sorted(axis % x.ndim for axis in (axes or range(x.ndim))))
    shape = [size if axis in over else 1 for axis, size in enumerate(x.shape)]
    centred = x - x.mean(axis=over, keepdims=True)
    out = centred / np.sqrt((centred * centred).mean(axis=over, keepdims=True) + epsilon)
    if gamma is not None:
        out = out * gamma.reshape(shape)
    if beta is not None:
        out = out + beta.reshape(shape)
    return out


# Elements moved or repeated, whatever their values.

kernel("identity", "x", exact=True)(lambda x: x)
kernel("reshape", "x", exact=True)(lambda x, *, shape: x.reshape(shape))
kernel("transpose", "x", exact=True)(lambda x, *, perm: x.transpose(perm))
kernel("expand_dims", "x", exact=True)(lambda x, *, axes: np.expand_dims(x, tuple(axes)))
kernel("split", "x", exact=True)(
    lambda x, *, axis, split_sizes: np.split(x, np.cumsum(split_sizes)[:-1], axis)
)
kernel("tile", "x", exact=True)(lambda x, *, reps: np.tile(x, reps))
kernel("stack", "values*", exact=True)(lambda *values, axis: np.stack(values, axis))


@kernel("concat", "values*", exact=True)
def _concat(*values: Tensor, axis: int, interleave: bool = False) -> Tensor:
    if interleave:
        raise ExecutionError("interleave is not supported")
    return np.concatenate(values, axis)


# Slices and gathers. Core ML leaves the result of an out-of-range index undefined. A program that
# relies on one is wrong on some device, so it fails here.


@kernel("slice_by_index", "x", exact=True)
def _slice_by_index(
    x: Tensor,
    *,
    begin: Sequence[int],
    end: Sequence[int],
    stride: Sequence[int] | None = None,
    begin_mask: Sequence[bool] | None = None,
    end_mask: Sequence[bool] | None = None,
    squeeze_mask: Sequence[bool] | None = None,
) -> Tensor:
    rank = len(begin)
    strides = stride or [1] * rank
    from_start = begin_mask or [False] * rank
    to_end = end_mask or [False] * rank
    squeezed = squeeze_mask or [False] * rank
    parts: list[int | slice] = []
    for axis in range(rank):
        start = None if from_start[axis] else begin[axis]
        stop = None if to_end[axis] else end[axis]
        if squeezed[axis]:
            parts.append(start or 0)
        else:
            parts.append(slice(start, stop, strides[axis]))
    return x[tuple(parts)]


@kernel("slice_update", "x update begin end", exact=True)
def _slice_update(x: Tensor, update: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    places = list(zip(begin.tolist(), end.tolist(), x.shape, strict=True))
    for axis, (first, last, size) in enumerate(places):
        if not 0 <= first <= last <= size:
            raise ExecutionError(f"slice {first}:{last} on axis {axis} of size {size}")
    out = x.copy()
    target = out[tuple(slice(first, last) for first, last, _ in places)]
    if target.shape != update.shape:
        raise ExecutionError(
            f"an update of shape {list(update.shape)} for a slice of {list(target.shape)}"
        )
    target[...] = update
    return out


@kernel("gather", "x indices", exact=True)
def _gather(
    x: Tensor,
    indices: Tensor,
    *,
    axis: int = 0,
    batch_dims: int = 0,
    validate_indices: bool = False,
) -> Tensor:
    if batch_dims:
        raise ExecutionError("batch_dims is not supported")
    size = x.shape[axis]
    if indices.size:
        low = int(indices.min())
        high = int(indices.max())
        if high >= size:
            raise ExecutionError(f"index {high} is out of range for size {size}")
        if low < 0:  # since iOS 17 negative indices do not count from the end
            raise ExecutionError(f"index {low} is out of range for size {size}")
    return np.take(x, indices, axis)


# Decompression of weights, in float32 with one rounding to the declared type, in which coremltools
# computes. The results agree for integer offsets: the difference is exact then, and only the
# product is rounded.


def _spread(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``values``, one per block, repeated along each axis to the sizes of ``shape``."""
    for axis, size in enumerate(shape):
        if size % values.shape[axis]:
            raise ExecutionError(
                f"{values.shape[axis]} blocks do not divide axis {axis} of size {size}"
            )
        if values.shape[axis] not in (1, size):
            values = np.repeat(values, size // values.shape[axis], axis)
    return values


@kernel("constexpr_blockwise_shift_scale", "data scale offset?", weight=True)
def _shift_scale(data: Tensor, scale: Tensor, offset: Tensor | None = None) -> Tensor:
    values = data.astype(np.float32)
    if offset is not None:
        values -= _spread(offset, data.shape)
    values *= _spread(scale, data.shape)
    return values


@kernel("constexpr_lut_to_dense", "indices lut", weight=True)
def _look_up(indices: Tensor, table: Tensor) -> Tensor:
    """Palette entries: ``table`` [blocks.., palettes, 1] for ``indices``."""
    if table.shape[-1] != 1:
        raise ExecutionError("palettes of vectors are not supported")
    palettes = table.shape[-2]
    if indices.size and int(indices.max()) >= palettes:
        raise ExecutionError(f"palette index {int(indices.max())} of {palettes}")
    # One number per palette in the flattened table, then one table lookup for all elements.
    blocks = np.arange(table.size // palettes).reshape(table.shape[:-2])
    return table.reshape(-1)[_spread(blocks, indices.shape) * palettes + indices]
