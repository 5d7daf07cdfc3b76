"""Packages that are damaged, cut short or edited: one clear error, whatever the bytes."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("coremltools", reason="Core ML packages are made with coremltools")

from ssdevice.errors import BundleError, SSDeviceError
from ssdevice.mil import schema
from ssdevice.mil.operations import UnsupportedOpError
from ssdevice.mil.program import Program
from ssdevice.mil.reader import Package
from ssdevice.mil.schema import BlobRef
from tests.mil.builder import convert, coremltools

MODEL = Path("Data/com.apple.CoreML/model.mlmodel")
WEIGHTS = Path("Data/com.apple.CoreML/weights/weight.bin")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with a float16, a float32 and an int4 weight and one operation on each."""
    ct = coremltools()
    from coremltools.converters.mil.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    rng = np.random.default_rng(0)
    half = rng.standard_normal((8, 64)).astype(np.float16)
    scale = rng.uniform(0.1, 1, (8, 2)).astype(np.float16)

    @mb.program(
        input_specs=[mb.TensorSpec(shape=(2, 64), dtype=types.fp16)], opset_version=ct.target.iOS18
    )
    def program(x: Any) -> Any:
        packed = mb.constexpr_blockwise_shift_scale(
            data=rng.integers(-8, 8, (8, 64)).astype(types.np_int4_dtype), scale=scale
        )
        sum_of_both = mb.add(x=mb.linear(x=x, weight=half), y=mb.linear(x=x, weight=packed))
        wide = mb.add(
            x=mb.cast(x=sum_of_both, dtype="fp32"), y=rng.standard_normal((2, 8)).astype(np.float32)
        )
        return mb.identity(x=wide, name="y")

    path = tmp_path_factory.mktemp("whole") / "whole.mlpackage"
    convert(program, path)
    return path


@pytest.fixture
def package(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(whole, tmp_path / "damaged.mlpackage"))


def edit_manifest(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def apply(package: Path) -> None:
        manifest = json.loads((package / "Manifest.json").read_text())
        change(manifest)
        (package / "Manifest.json").write_text(json.dumps(manifest))

    return apply


def _path(value: Any) -> Callable[[Path], None]:
    def change(manifest: Any) -> None:
        manifest["itemInfoEntries"][manifest["rootModelIdentifier"]]["path"] = value

    return edit_manifest(change)


def edit_program(change: Callable[[Any], None]) -> Callable[[Path], None]:
    """Change the model file through coremltools' protobuf classes: ``change`` gets the operations
    of main.
    """

    def apply(package: Path) -> None:
        from coremltools.proto import Model_pb2

        model = Model_pb2.Model.FromString((package / MODEL).read_bytes())
        function = model.mlProgram.functions["main"]
        change(function.block_specializations[function.opset].operations)
        (package / MODEL).write_bytes(model.SerializeToString())

    return apply


def _stored(operations: Any) -> Any:
    """The first constant in the weight file: the int4 data."""
    return next(
        op.attributes["val"]
        for op in operations
        if "val" in op.attributes and op.attributes["val"].HasField("blobFileValue")
    )


def _blob_offset(value: int) -> Callable[[Path], None]:
    def change(operations: Any) -> None:
        _stored(operations).blobFileValue.offset = value

    return edit_program(change)


def _blob_file(value: str) -> Callable[[Path], None]:
    def change(operations: Any) -> None:
        _stored(operations).blobFileValue.fileName = value

    return edit_program(change)


def _blob_shape(operations: Any) -> None:
    _stored(operations).type.tensorType.dimensions[0].constant.size = 1 << 30


def _blob_axis(operations: Any) -> None:
    _stored(operations).type.tensorType.dimensions[0].constant.size = 1 << 62


def _cut(path: Path, size: int) -> Callable[[Path], None]:
    def apply(package: Path) -> None:
        content = (package / path).read_bytes()
        (package / path).write_bytes(content[: size if size >= 0 else len(content) + size])

    return apply


def _patch(path: Path, at: int, data: bytes) -> Callable[[Path], None]:
    def apply(package: Path) -> None:
        content = bytearray((package / path).read_bytes())
        content[at : at + len(data)] = data
        (package / path).write_bytes(content)

    return apply


def _link_out(package: Path) -> None:
    outside = package.parent / "elsewhere.bin"
    shutil.move(package / WEIGHTS, outside)
    (package / WEIGHTS).symlink_to(outside)


def _rename_op(operations: Any) -> None:
    next(op for op in operations if op.type == "add").type = "frobnicate"


def _undefined(operations: Any) -> None:
    next(op for op in operations if op.type == "add").inputs["x"].arguments[0].name = "nowhere"


DAMAGE = {
    "no manifest": (lambda p: (p / "Manifest.json").unlink(), "Manifest.json: no such file"),
    "manifest is no JSON": (lambda p: (p / "Manifest.json").write_text("{"), "not JSON"),
    "manifest is a list": (lambda p: (p / "Manifest.json").write_text("[]"), "not a JSON object"),
    "no root": (edit_manifest(lambda m: m.pop("rootModelIdentifier")), "names no root model"),
    "path leaves": (_path("../../../etc/passwd"), "leaves the package"),
    "path is absolute": (_path("/etc/passwd"), "leaves the package"),
    "path is a number": (_path(7), "has no path"),
    "model missing": (
        lambda p: (p / MODEL).unlink(),
        "model.mlmodel is named in Manifest.json but missing",
    ),
    "model cut": (_cut(MODEL, -40), "not a usable model file"),
    "model empty": (_cut(MODEL, 0), "holds no ML program"),
    "weights missing": (lambda p: (p / WEIGHTS).unlink(), "weight.bin: no such file"),
    "weights empty": (_cut(WEIGHTS, 0), "shorter than its header"),
    "weights cut": (_cut(WEIGHTS, -65), "cut short|outside the file"),
    "weights of version 1": (_patch(WEIGHTS, 4, struct.pack("<I", 1)), "version 1, expected 2"),
    "no sentinel": (_patch(WEIGHTS, 64, b"\0\0\0\0"), "has no metadata"),
    "another type": (_patch(WEIGHTS, 68, struct.pack("<I", 14)), "is int32, expected int4"),
    "a type from the future": (
        _patch(WEIGHTS, 68, struct.pack("<I", 99)),
        "of type 99, expected int4",
    ),
    "another size": (_patch(WEIGHTS, 72, struct.pack("<Q", 1 << 60)), "elements of int4 need"),
    "data far away": (_patch(WEIGHTS, 80, struct.pack("<Q", 1 << 62)), "cut short or edited"),
    "offset far away": (_blob_offset(1 << 40), "outside the file"),
    "offset unaligned": (_blob_offset(65), "not 64-aligned"),
    "offset of nothing": (_blob_offset(128), "has no metadata"),
    "an enormous shape": (edit_program(_blob_shape), r"elements of \w+ need"),
    "an enormous axis": (edit_program(_blob_axis), "elements along one axis"),
    "weight file leaves": (
        _blob_file("@model_path/../../../../elsewhere.bin"),
        "leaves the package",
    ),
    "weight file elsewhere": (_blob_file("/etc/passwd"), "does not begin with @model_path/"),
    "weight file is a link out": (_link_out, "through a link"),
    "an undefined name": (edit_program(_undefined), "reads 'nowhere' before it is defined"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_in_one_line(name: str, package: Path) -> None:
    damage, message = DAMAGE[name]
    damage(package)
    with pytest.raises(BundleError, match=message) as caught:
        Package.open(package)
    assert "\n" not in str(caught.value) and "damaged.mlpackage" in str(caught.value)


def test_a_path_that_is_no_package(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="is not a folder"):
        Package.open(tmp_path / "nothing.mlpackage")


def test_an_unknown_operation_is_refused(package: Path) -> None:
    edit_program(_rename_op)(package)
    opened = Package.open(package)
    with pytest.raises(
        UnsupportedOpError, match="function 'main', frobnicate '.*'.* is not supported"
    ):
        Program(opened).plan("main")


def test_an_unknown_function_is_refused(whole: Path) -> None:
    with pytest.raises(BundleError, match="no function 'step'; it has main"):
        Program(Package.open(whole)).plan("step")


def test_reader_and_interpreter_need_no_framework(whole: Path, repository: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from ssdevice.mil.program import Program; "
        "from ssdevice.mil.reader import Package;"
        f"Program(Package.open({str(whole)!r})).plan('main');"
        "print(sorted({'torch', 'coremltools'} & {name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=repository, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_package_needs_coremltools(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "find_spec", lambda name: None)
    schema.model_class.cache_clear()
    with pytest.raises(ModuleNotFoundError) as caught:
        Package.open(whole)
    assert caught.value.name == "coremltools"


def test_weights_equal_coremltools_own_reader(whole: Path) -> None:
    from coremltools.libmilstoragepython import _BlobStorageReader

    package = Package.open(whole)
    reader = _BlobStorageReader(str(whole / WEIGHTS))
    seen = set()
    for value in package.functions["main"].constants.values():
        if isinstance(value.data, BlobRef):
            assert value.type is not None and value.type.dtype is not None
            dtype = value.type.dtype.name
            read = {
                "float16": reader.read_fp16_data,
                "float32": reader.read_float_data,
                "int4": reader.read_int4_data,
            }[dtype]
            expected = np.array(read(value.data.offset))
            ours = package.constant(value).reshape(-1)
            if dtype == "float16":
                expected = expected.view(np.float16)
            np.testing.assert_array_equal(ours, expected.astype(ours.dtype))
            seen.add(dtype)
    assert seen == {"float16", "float32", "int4"}


fuzzed = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@fuzzed
@given(data=st.data())
def test_flipped_bytes_never_end_in_a_traceback(
    whole: Path, package: Path, data: st.DataObject
) -> None:
    """Any damage to the files gives a result or an error of ours, in little memory."""
    target = data.draw(st.sampled_from([MODEL, WEIGHTS]))
    content = bytearray((whole / target).read_bytes())
    # The metadata and the program's structure matter; most of a weight file is data.
    limit = len(content) if target == MODEL else 192
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, limit - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    (package / MODEL).write_bytes((whole / MODEL).read_bytes())
    (package / WEIGHTS).write_bytes((whole / WEIGHTS).read_bytes())
    (package / target).write_bytes(content)
    try:
        opened = Package.open(package)
        for function in opened.functions:
            opened.spec(function)
            Program(opened).run(function, {"x": np.ones((2, 64), np.float16)})
    except SSDeviceError as error:
        assert str(error)
