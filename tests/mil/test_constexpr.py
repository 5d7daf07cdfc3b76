"""Decompression kernels against coremltools' own functions, on random sizes and block shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("coremltools", reason="the reference is coremltools")

import ssdevice.mil.plan  # noqa: F401  (registers the kernels)
from ssdevice.mil.dtypes import BY_NAME, unpack
from ssdevice.mil.registry import KERNELS, Node
from ssdevice.mil.schema import TensorType


def run(kind: str, **parameters: Any) -> Any:
    """A kernel applied to its parameters."""
    constants = {name: [np.asarray(value)] for name, value in parameters.items()}
    node = Node(kind, "test", 18, (TensorType(BY_NAME["float16"], ()),), constants, list(KERNELS[kind].operands))
    function = KERNELS[kind].build(node)
    names = [name.rstrip("?") for name in node.operands]
    operands = [np.asarray(parameters[name]) for name in names if name in parameters]
    return function(*[value.astype(np.float32) if value.dtype.kind == "f" else value for value in operands])


def ops(name: str) -> Any:
    """The coremltools class of an operation as of iOS 18."""
    from coremltools.converters.mil.mil.ops.defs.iOS18 import compression

    return getattr(compression, name)


blocks = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=3)
seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=30)
@given(blocks=blocks, seed=seeds, offset=st.booleans())
def test_blockwise_shift_scale(blocks: list[tuple[int, int]], seed: int, offset: bool) -> None:
    rng = np.random.default_rng(seed)
    counts = [count for count, _ in blocks]
    data = rng.integers(-8, 8, [count * size for count, size in blocks]).astype(np.int8)
    scale = rng.uniform(0.001, 1, counts).astype(np.float16)
    shift = rng.integers(-8, 8, counts).astype(np.int8) if offset else None
    expected = ops("constexpr_blockwise_shift_scale").decompress(data, scale, shift)
    given = {"data": data, "scale": scale} | ({"offset": shift} if offset else {})
    result = run("constexpr_blockwise_shift_scale", **given)
    np.testing.assert_array_equal(result.astype(np.float16), expected)


@settings(max_examples=30)
@given(blocks=blocks, seed=seeds, bits=st.sampled_from([1, 2, 3, 4, 6, 8]), vector=st.integers(1, 3))
def test_lut_to_dense(blocks: list[tuple[int, int]], seed: int, bits: int, vector: int) -> None:
    rng = np.random.default_rng(seed)
    indices = rng.integers(0, 1 << bits, [count * size for count, size in blocks]).astype(np.uint8)
    lut = rng.standard_normal([*(count for count, _ in blocks), 1 << bits, vector]).astype(np.float16)
    axis = int(rng.integers(len(blocks)))
    if vector > 1:
        # coremltools' own function mixes blocks up when blocks and vectors lie on different axes.
        lut = lut[tuple(slice(0, 1) if at != axis else slice(None) for at in range(len(blocks)))]
    expected = ops("constexpr_lut_to_dense").decompress(indices, lut, np.int32(axis))
    result = run("constexpr_lut_to_dense", indices=indices, lut=lut, vector_axis=np.int32(axis))
    np.testing.assert_array_equal(result, expected.astype(np.float32))


@given(seed=seeds, count=st.integers(1, 40))
def test_sparse_to_dense(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    mask = rng.integers(0, 2, (count, 2)).astype(np.uint8)
    data = rng.standard_normal(int(mask.sum())).astype(np.float16)
    expected = ops("constexpr_sparse_to_dense").decompress(data, mask)
    np.testing.assert_array_equal(run("constexpr_sparse_to_dense", nonzero_data=data, mask=mask), expected)


def test_sparse_chains() -> None:
    """Sparse palettes and sparse quantized values, as joint compression writes them."""
    rng = np.random.default_rng(3)
    mask = rng.integers(0, 2, (4, 6)).astype(np.uint8)
    count = int(mask.sum())
    indices, lut = rng.integers(0, 4, count).astype(np.uint8), rng.standard_normal((1, 2, 4, 1)).astype(np.float16)
    expected = ops("constexpr_lut_to_sparse").decompress(mask, indices, lut, None)
    result = run("constexpr_lut_to_sparse", indices_mask=mask, indices_nonzero_data=indices, lut=lut)
    np.testing.assert_array_equal(result[0], expected[0])
    np.testing.assert_array_equal(result[1], expected[1].astype(np.float32))
    data, scale = rng.integers(-8, 8, count).astype(np.int8), rng.uniform(0.1, 1, (4, 2)).astype(np.float16)
    expected = ops("constexpr_sparse_blockwise_shift_scale").decompress(mask, data, scale, None)
    result = run("constexpr_sparse_blockwise_shift_scale", data_mask=mask, nonzero_data=data, scale=scale)
    np.testing.assert_array_equal(result[1].astype(np.float16), expected[1])


def test_forms_before_ios_18() -> None:
    """Per-channel affine weights, one packed palette, a packed mask."""
    from coremltools.converters.mil.mil.ops.defs.iOS16 import constexpr_ops
    from coremltools.optimize._utils import pack_elements_into_bits

    rng = np.random.default_rng(4)
    data, zero = rng.integers(0, 255, (3, 5)).astype(np.uint8), rng.integers(0, 255, 3).astype(np.uint8)
    scale = rng.uniform(0.001, 1, 3).astype(np.float32)
    expected = constexpr_ops.constexpr_affine_dequantize.decompress(data, zero, scale, 0)
    result = run("constexpr_affine_dequantize", quantized_data=data, zero_point=zero, scale=scale, axis=np.int32(0))
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    for bits in (1, 2, 4, 6, 8):
        lut = rng.standard_normal(1 << bits).astype(np.float16)
        packed = pack_elements_into_bits(rng.integers(0, 1 << bits, 15).astype(np.uint8), bits)
        shape = np.array([3, 5], np.uint32)
        expected = constexpr_ops.constexpr_lut_to_dense.decompress(lut, packed, shape)
        np.testing.assert_array_equal(run("constexpr_lut_to_dense", lut=lut, indices=packed, shape=shape), expected)
    mask = np.packbits(rng.integers(0, 2, 15).astype(np.uint8), bitorder="little")
    values = rng.standard_normal(int(np.unpackbits(mask).sum())).astype(np.float16)
    shape = np.array([3, 5], np.uint32)
    result = run("constexpr_sparse_to_dense", nonzero_data=values, mask=mask, shape=shape)
    dense = np.zeros(15, np.float16)
    dense[np.unpackbits(mask, bitorder="little")[:15] != 0] = values
    np.testing.assert_array_equal(result, dense.reshape(3, 5))


@given(
    seed=seeds, count=st.integers(0, 50), name=st.sampled_from(["int4", "uint1", "uint2", "uint3", "uint4", "uint6"])
)
def test_packed_bits(seed: int, count: int, name: str) -> None:
    from coremltools.optimize._utils import pack_elements_into_bits

    dtype = BY_NAME[name]
    low = -(1 << (dtype.bits - 1)) if dtype.storage.kind == "i" else 0
    values = np.random.default_rng(seed).integers(low, low + (1 << dtype.bits), count).astype(dtype.storage)
    packed = pack_elements_into_bits(values, dtype.bits) if count else np.empty(0, np.uint8)
    np.testing.assert_array_equal(unpack(packed, dtype, count), values)
