"""safetensors without torch: what the library writes is read, and what is broken is one line."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from ssdevice.adapters.storage import read_floats, read_tensors, write_tensors
from ssdevice.errors import InputError


def write(file: Path, header: object, body: bytes = b"", size: int | None = None) -> Path:
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + body)
    return file


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_all_kinds_of_floats_are_read(tmp_path: Path) -> None:
    values = np.array([[1.5, -2.0], [0.25, 3.0]])
    kinds = {"F64": values, "F32": values.astype("<f4"), "F16": values.astype("<f2")}
    kinds["BF16"] = (values.astype("<f4").view(np.uint32) >> 16).astype("<u2")
    for kind, stored in kinds.items():
        data = stored.tobytes()
        file = write(
            tmp_path / kind,
            {"__metadata__": {"a": "b"}, "x": entry(kind, [2, 2], 0, len(data))},
            data,
        )
        np.testing.assert_array_equal(read_floats(file)["x"], values.astype(np.float32))


@pytest.mark.parametrize(
    ("header", "body", "message"),
    [
        ({"x": entry("I8", [2], 0, 2)}, b"ab", "is I8"),
        ({"x": entry("F32", [2], 0, 4)}, bytes(4), "invalid shape"),
        ({"x": entry("F32", [1], 4, 8)}, bytes(4), "not a safetensors file"),
        ({"x": entry("F32", [-1], 0, 4)}, bytes(4), "not a safetensors file"),
        ({"x": entry("F32", [1], 4, 0)}, bytes(4), "not a safetensors file"),
        ({"x": entry("F32", [2**63, 2], 0, 0)}, b"", "not a safetensors file"),
        ({"x": entry("F32", [2**63, 0], 0, 0)}, b"", "has shape"),
        ({"x": entry("F32", [1] * 65, 0, 4)}, bytes(4), "has shape"),
        ({"x": entry("I64", [1], 0, 8)}, bytes(8), "is I64, expected F64, F32"),
        ({"x": {"dtype": "F32"}}, b"", "not a safetensors file"),
        ({"x": entry("F32", [1], 0, 4)}, bytes(8), "not a safetensors file"),
        ([1], b"", "not a safetensors file"),
    ],
)
def test_broken_files_are_refused(
    tmp_path: Path, header: object, body: bytes, message: str
) -> None:
    with pytest.raises(InputError, match=message) as found:
        read_floats(write(tmp_path / "x", header, body))
    assert "\n" not in str(found.value)


def test_a_header_longer_than_its_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a safetensors file"):
        read_floats(write(tmp_path / "x", {}, b"", size=1 << 60))
    (tmp_path / "short").write_bytes(b"abc")
    with pytest.raises(InputError, match="not a safetensors file"):
        read_floats(tmp_path / "short")
    with pytest.raises(InputError, match="no such file"):
        read_floats(tmp_path / "none")


def test_nothing_is_copied_of_tensors_that_share_their_bytes(tmp_path: Path) -> None:
    size = 1 << 20
    names = 200
    shared = {f"t{index}": entry("I8", [size], 0, size) for index in range(names)}
    file = write(tmp_path / "x", shared, bytes(size))
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="invalid offset"):
            read_floats(file)
        assert tracemalloc.get_traced_memory()[1] < 4 * file.stat().st_size
    finally:
        tracemalloc.stop()


def test_sizes_of_thousands_of_digits_are_not_multiplied(tmp_path: Path) -> None:
    shape = [10**4299] * 40
    with pytest.raises(InputError, match="number out of range"):
        read_floats(
            write(
                tmp_path / "x",
                {"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}},
                bytes(4),
            )
        )


@pytest.mark.parametrize(("dtype", "bytes_each"), [(np.float32, 4), (np.float16, 2), (np.int8, 1)])
def test_what_is_written_is_read_again_and_by_the_library(
    tmp_path: Path, dtype: type, bytes_each: int
) -> None:
    tensors = {"b": np.arange(6).reshape(2, 3).astype(dtype), "a": np.zeros((0, 2), dtype)}
    file = tmp_path / "adapter.safetensors"
    write_tensors(file, {**tensors, "turned": tensors["b"].T})
    found = read_tensors(file)
    assert list(found) == ["a", "b", "turned"]
    assert all(
        np.array_equal(found[name], tensors[name]) and found[name].dtype == dtype
        for name in tensors
    )
    assert all(value.flags.writeable for value in found.values())
    np.testing.assert_array_equal(found["turned"], tensors["b"].T)
    assert file.stat().st_size % 8 == 2 * 6 * bytes_each % 8
