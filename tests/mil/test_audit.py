"""What the audit says about an exported step in its plain and compressed forms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("coremltools", reason="Core ML packages are made with coremltools")
pytest.importorskip("torch", reason="the step is a torch module")

from ssdevice.export.mlprogram.options import KVWrite
from ssdevice.export.mlprogram.program import MAIN
from ssdevice.mil.audit import audit
from ssdevice.mil.reader import Package
from tests.export.coreml.tiny import GEOMETRY, package
from tests.mil.builder import convert, coremltools
from tests.mil.test_compression import compressed, step


@pytest.fixture(scope="module")
def base() -> Path:
    return step()


def counts(found: dict[str, Any]) -> dict[str, int]:
    """How many warnings of each code there are."""
    return {warning["code"]: warning["count"] for warning in found["warnings"]}


def test_contents_of_a_plain_package(base: Path) -> None:
    found = audit(Package.open(base))
    assert found["functions"][MAIN]["kinds"]["softmax"] == GEOMETRY.layers
    assert "const" not in found["functions"][MAIN]["kinds"]
    assert (
        found["memory"]["state"] == 2 * 2 * GEOMETRY.layers * GEOMETRY.capacity * GEOMETRY.row_width
    )
    weights = {group["form"]: group for group in found["weights"]}
    assert weights["float16"]["tensors"] > 4 * GEOMETRY.layers
    assert (
        sum(group["bytes"] for group in found["weights"])
        <= (base / "Data/com.apple.CoreML/weights/weight.bin").stat().st_size
    )


@pytest.mark.wide
def test_forms_of_compressed_weights(base: Path, tmp_path: Path) -> None:
    forms = {}
    for kind in ("int8", "int4", "palette"):
        found = audit(Package.open(compressed(base, kind, tmp_path)))
        forms[kind] = {group["form"] for group in found["weights"]} - {"float16", "int32", "uint16"}
        assert ("block-scales" in counts(found)) == (kind == "int4")
    assert forms["int8"] == {"int8, per channel"}
    assert forms["int4"] == {
        "int4, blocks of 32",
        "int4, per channel",
    }  # a matrix of 32 inputs is one block
    assert forms["palette"] == {"palette of uint4 indices"}


@pytest.mark.wide
def test_a_write_at_a_runtime_offset_is_named(base: Path) -> None:
    found = audit(Package.open(base))
    assert counts(found)["runtime-offset"] == 2
    assert all(warning["source"] for warning in found["warnings"])
    # One of a state's last two sizes, the head dimension, is not a multiple of 32.
    assert counts(found)["state-size"] == 2  # keys and values
    by_mask = audit(Package.open(package(write=KVWrite.MASK)))
    assert "runtime-offset" not in counts(by_mask)


@pytest.fixture
def attention(tmp_path: Path) -> Callable[[int], Package]:
    """``attention(rows)``: one attention with that many query rows, in float32."""

    def make(rows: int) -> Package:
        ct = coremltools()
        from coremltools.converters.mil.mil import Builder as mb

        specs = [mb.TensorSpec(shape=(1, 2, rows, 32)), mb.TensorSpec(shape=(1, 2, 64, 32))]

        @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
        def program(q: Any, k: Any) -> Any:
            scores = mb.softmax(x=mb.matmul(x=q, y=k, transpose_y=True), axis=-1)
            return mb.reduce_argmax(x=scores, axis=-1, name="best")

        path = tmp_path / f"{rows}.mlpackage"
        convert(program, path)
        return Package.open(path)

    return make


@pytest.mark.parametrize(("rows", "warned"), [(16, 0), (17, 1)])
def test_query_rows(attention: Callable[[int], Package], rows: int, warned: int) -> None:
    found = audit(attention(rows))
    assert counts(found).get("query-rows", 0) == warned
    assert {"wide-type", "argmax-ties"} <= counts(found).keys()
