"""safetensors without torch: what the library writes is read, and what is broken is one line."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from ssdevice.adapters.safetensors_file import read_floats, read_tensors, write_tensors
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
        file = write(tmp_path / kind, {"__metadata__": {"a": "b"}, "x": entry(kind, [2, 2], 0, len(data))}, data)
        np.testing.assert_array_equal(read_floats(file)["x"], values.astype(np.float32))


@pytest.mark.parametrize(
    ("header", "body", "message"),
    [
        ({"x": entry("I8", [2], 0, 2)}, b"ab", "is I8"),
        ({"x": entry("F32", [2], 0, 4)}, bytes(4), "do not hold its shape"),
        ({"x": entry("F32", [1], 4, 8)}, bytes(4), "do not hold its shape"),
        ({"x": entry("F32", [-1], 0, 4)}, bytes(4), "whole numbers"),
        ({"x": entry("F32", [1], 4, 0)}, bytes(4), "do not hold its shape"),
        ({"x": {"dtype": "F32"}}, b"", "not a safetensors file"),
        ([1], b"", "not a safetensors file"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, header: object, body: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_floats(write(tmp_path / "x", header, body))


def test_a_header_longer_than_its_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="more than the file has"):
        read_floats(write(tmp_path / "x", {}, b"", size=1 << 60))
    (tmp_path / "short").write_bytes(b"abc")
    with pytest.raises(InputError, match="not a safetensors file"):
        read_floats(tmp_path / "short")
    with pytest.raises(InputError, match="cannot be read"):
        read_floats(tmp_path / "none")


@pytest.mark.parametrize(("dtype", "bytes_each"), [(np.float32, 4), (np.float16, 2), (np.int8, 1)])
def test_what_is_written_is_read_again_and_by_the_library(tmp_path: Path, dtype: type, bytes_each: int) -> None:
    tensors = {"b": np.arange(6).reshape(2, 3).astype(dtype), "a": np.zeros((0, 2), dtype)}
    file = tmp_path / "adapter.safetensors"
    write_tensors(file, tensors)
    found = read_tensors(file)
    assert list(found) == ["a", "b"]
    assert all(np.array_equal(found[name], tensors[name]) and found[name].dtype == dtype for name in tensors)
    assert file.stat().st_size % 8 == 6 * bytes_each % 8
    load_file = pytest.importorskip("safetensors.numpy").load_file
    assert all(np.array_equal(load_file(file)[name], tensors[name]) for name in tensors)
