"""Decompression kernels against coremltools' own functions, on random sizes and block shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("coremltools", reason="the reference is coremltools")

from ssdevice.mil.operations import KERNELS, ExecutionError
from ssdevice.mil.weights import BY_NAME, decode


def run(kind: str, **parameters: Any) -> Any:
    """A kernel applied to its operands."""
    names = [name.rstrip("?") for name in KERNELS[kind].operands]
    operands = [np.asarray(parameters[name]) for name in names if name in parameters]
    return KERNELS[kind].function(
        *[value.astype(np.float32) if value.dtype.kind == "f" else value for value in operands]
    )


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
@given(blocks=blocks, seed=seeds, bits=st.sampled_from([1, 2, 3, 4, 6, 8]))
def test_lut_to_dense(blocks: list[tuple[int, int]], seed: int, bits: int) -> None:
    rng = np.random.default_rng(seed)
    indices = rng.integers(0, 1 << bits, [count * size for count, size in blocks]).astype(np.uint8)
    lut = rng.standard_normal([*(count for count, _ in blocks), 1 << bits, 1]).astype(np.float16)
    expected = ops("constexpr_lut_to_dense").decompress(indices, lut, np.int32(0))
    result = run("constexpr_lut_to_dense", indices=indices, lut=lut)
    np.testing.assert_array_equal(result, expected.astype(np.float32))


def test_a_palette_of_vectors_is_refused() -> None:
    with pytest.raises(ExecutionError, match="palettes of vectors are not supported"):
        run(
            "constexpr_lut_to_dense",
            indices=np.zeros((2, 2), np.uint8),
            lut=np.zeros((1, 1, 4, 2), np.float16),
        )


@given(seed=seeds, count=st.integers(0, 50), name=st.sampled_from(["int4", "uint4"]))
def test_packed_bits(seed: int, count: int, name: str) -> None:
    from coremltools.optimize._utils import pack_elements_into_bits

    dtype = BY_NAME[name]
    low = -(1 << (dtype.bits - 1)) if dtype.storage.kind == "i" else 0
    values = (
        np.random.default_rng(seed)
        .integers(low, low + (1 << dtype.bits), count)
        .astype(dtype.storage)
    )
    packed = pack_elements_into_bits(values, dtype.bits) if count else np.empty(0, np.uint8)
    np.testing.assert_array_equal(decode(packed, dtype, count), values)
