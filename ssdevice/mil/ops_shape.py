"""Kernels that make, move or repeat elements without looking at their values."""

from __future__ import annotations

import numpy as np

from ssdevice.mil.registry import ExecutionError, Function, Node, Tensor, define, kernel


@kernel("identity", "x", view=True)
def _identity(node: Node) -> Function:
    return lambda x: x


def target_shape(shape: tuple[int, ...], wanted: list[int]) -> list[int]:
    """A reshape target with 0 (keep this size) replaced; -1 is left to NumPy."""
    if 0 in wanted and len(wanted) == len(shape):
        return [shape[axis] if size == 0 else size for axis, size in enumerate(wanted)]
    return wanted


@kernel("reshape", "x", view=True)
def _reshape(node: Node) -> Function:
    if node.known("shape"):
        wanted = node.ints("shape")
        if 0 not in wanted:
            return lambda x: x.reshape(wanted)
        return lambda x: x.reshape(target_shape(x.shape, wanted))
    node.take("x", "shape")
    return lambda x, shape: x.reshape(target_shape(x.shape, shape.tolist()))


@kernel("transpose", "x", view=True)
def _transpose(node: Node) -> Function:
    order = node.ints("perm")
    return lambda x: x.transpose(order)


@kernel("expand_dims", "x", view=True)
def _expand_dims(node: Node) -> Function:
    axes = tuple(node.ints("axes"))
    return lambda x: np.expand_dims(x, axes)


@kernel("squeeze", "x", view=True)
def _squeeze(node: Node) -> Function:
    if not node.has("axes"):
        return lambda x: np.squeeze(x)
    axes = node.ints("axes")
    # Sizes other than 1 stay, as in torch.
    return lambda x: np.squeeze(x, tuple(axis for axis in axes if x.shape[axis] == 1))


@kernel("flatten2d", "x", view=True)
def _flatten2d(node: Node) -> Function:
    axis = node.integer("axis", 1)
    return lambda x: x.reshape(int(np.prod(x.shape[:axis])), -1)


@kernel("split", "x", view=True)
def _split(node: Node) -> Function:
    axis = node.integer("axis")
    if len(node.outputs) == 1:
        return lambda x: x
    if node.has("split_sizes"):
        cuts = np.cumsum(node.ints("split_sizes"))[:-1]
        return lambda x: np.split(x, cuts, axis)
    count = node.integer("num_splits")
    return lambda x: np.split(x, count, axis)


@kernel("tile", "x", exact=True)
def _tile(node: Node) -> Function:
    if not node.known("reps"):
        node.take("x", "reps")
        return lambda x, reps: np.tile(x, reps.tolist())
    reps = node.ints("reps")
    return lambda x: np.tile(x, reps)


@kernel("concat", "values*", exact=True)
def _concat(node: Node) -> Function:
    axis = node.integer("axis")
    if node.flag("interleave"):

        def interleave(*values: Tensor) -> Tensor:
            stacked = np.stack(values, axis % values[0].ndim + 1)
            shape = list(values[0].shape)
            shape[axis] *= len(values)
            return stacked.reshape(shape)

        return interleave
    if node.outputs[0].shape and len(node.outputs[0].shape) == 1:
        # Scalars count as vectors of one element: shapes and slice bounds are put together this way.
        return lambda *values: np.concatenate([np.reshape(value, -1) for value in values])
    return lambda *values: np.concatenate(values, axis)


@kernel("stack", "values*", exact=True)
def _stack(node: Node) -> Function:
    axis = node.integer("axis")
    return lambda *values: np.stack(values, axis)


@kernel("reverse", "x", view=True)
def _reverse(node: Node) -> Function:
    axes = tuple(node.ints("axes")) if node.has("axes") else None
    return lambda x: np.flip(x, axes)


@kernel("pad", "x", exact=True)
def _pad(node: Node) -> Function:
    mode = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}.get(node.text("mode", "constant"))
    if mode is None:
        raise node.unsupported(f"mode {node.text('mode')!r}")
    fill = node.array("constant_val").reshape(()) if node.has("constant_val") else np.float32(0)

    def run(x: Tensor, pad: Tensor) -> Tensor:
        around = [(0, 0)] * (x.ndim - len(pad) // 2) + [(int(a), int(b)) for a, b in pad.reshape(-1, 2)]
        if mode == "constant":
            return np.pad(x, around, "constant", constant_values=fill)
        return np.pad(x, around, "reflect" if mode == "reflect" else "edge")

    if node.known("pad"):
        pad = node.array("pad")
        return lambda x: run(x, pad)
    node.take("x", "pad")
    return run


@kernel("fill", "shape", exact=True)
def _fill(node: Node) -> Function:
    value = node.array("value").reshape(()) if node.has("value") else np.float32(0)
    return lambda shape: np.full(shape.tolist(), value)


@kernel("fill_like", "ref_tensor", exact=True)
def _fill_like(node: Node) -> Function:
    value = node.array("value").reshape(()) if node.has("value") else np.float32(0)
    return lambda ref: np.full(ref.shape, value)


define("shape", "x", lambda x: np.array(x.shape, np.int32), exact=True)
define("non_zero", "x", lambda x: np.argwhere(x), exact=True)


@kernel("range_1d", "start end step")
def _range(node: Node) -> Function:
    def run(start: Tensor, end: Tensor, step: Tensor) -> Tensor:
        if step == 0:
            raise ExecutionError("a range with step 0")
        return np.arange(start.item(), end.item(), step.item())

    return run


@kernel("one_hot", "indices", exact=True)
def _one_hot(node: Node) -> Function:
    axis = node.integer("axis", -1)
    on = node.array("on_value").reshape(()) if node.has("on_value") else np.float32(1)
    off = node.array("off_value").reshape(()) if node.has("off_value") else np.float32(0)

    def run(indices: Tensor, size: Tensor) -> Tensor:
        hits = np.expand_dims(indices, axis)
        shape = [1] * hits.ndim
        shape[axis] = -1
        return np.where(hits == np.arange(int(size)).reshape(shape), on, off)

    if node.known("one_hot_vector_size"):
        size = node.array("one_hot_vector_size").reshape(())
        return lambda indices: run(indices, size)
    node.take("indices", "one_hot_vector_size")
    return run


@kernel("band_part", "x", exact=True)
def _band_part(node: Node) -> Function:
    lower, upper = node.integer("lower", -1), node.integer("upper", -1)

    def run(x: Tensor) -> Tensor:
        below = np.arange(x.shape[-2])[:, None] - np.arange(x.shape[-1])
        kept = np.ones(below.shape, np.bool_)
        if lower >= 0:
            kept &= below <= lower
        if upper >= 0:
            kept &= -below <= upper
        return np.where(kept, x, x.dtype.type(0))

    return run
