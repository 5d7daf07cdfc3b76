"""What the audit says about a converted decoder in its plain and compressed forms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("coremltools", reason="Core ML packages are made with coremltools")
pytest.importorskip("torch", reason="the decoder is a torch module")

from ssdevice.mil import audit as audits
from ssdevice.mil.audit import audit
from ssdevice.mil.reader import Package
from tests.mil.builder import convert, coremltools
from tests.mil.conftest import Conversions
from tests.mil.decoder import CACHE, EXPORT, LAYERS, MASK, SLICE, TRACE
from tests.mil.test_compression import compressed


@pytest.fixture(scope="module")
def base(conversions: Conversions) -> Path:
    return conversions(SLICE, TRACE)


def codes(found: audits.Audit) -> set[str]:
    return {warning.code for warning in found.warnings}


def test_contents_of_a_plain_package(base: Path) -> None:
    found = audit(Package.open(base))
    assert found.operations["main"]["softmax"] == LAYERS
    assert "const" not in found.operations["main"]
    assert found.state_bytes == 2 * 2 * CACHE[0] * CACHE[1] * CACHE[2] * CACHE[3]
    weights = {group.form: group for group in found.weights}
    assert weights["float16"].tensors > 4 * LAYERS
    assert (
        sum(group.bytes for group in found.weights)
        <= (base / "Data/com.apple.CoreML/weights/weight.bin").stat().st_size
    )


def test_forms_of_compressed_weights(base: Path, tmp_path: Path) -> None:
    forms = {}
    for kind in ("int8", "int4", "palette"):
        found = audit(Package.open(compressed(base, kind, tmp_path)))
        forms[kind] = {group.form for group in found.weights} - {"float16", "int32"}
        assert ("block-scales" in codes(found)) == (kind == "int4")
    assert forms["int8"] == {"int8, per channel"}
    assert forms["int4"] == {"int4, blocks of 32"}
    assert forms["palette"] == {"palette of uint4 indices"}


def test_a_write_at_a_runtime_offset_is_named(base: Path, conversions: Conversions) -> None:
    found = audit(Package.open(base))
    subjects = [warning.subject for warning in found.warnings if warning.code == "runtime-offset"]
    assert len(subjects) == 2 * LAYERS
    assert all(warning.source for warning in found.warnings)
    # Half of CACHE's last two sizes, the head dimension, is not a multiple of 32.
    assert {warning.subject for warning in found.warnings if warning.code == "state-size"} == {"keys", "values"}
    by_mask = audit(Package.open(conversions(MASK, EXPORT)))
    assert "runtime-offset" not in codes(by_mask)


@pytest.fixture
def attention(tmp_path: Path) -> Callable[[int], Package]:
    """``attention(rows)``: one attention with that many query rows, in float32."""

    def make(rows: int) -> Package:
        ct = coremltools()
        from coremltools.converters.mil.mil import Builder as mb

        specs = [mb.TensorSpec(shape=(1, 2, rows, 32)), mb.TensorSpec(shape=(1, 2, 64, 32))]

        @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
        def program(q: Any, k: Any) -> Any:
            fused = mb.scaled_dot_product_attention(query=q, key=k, value=k)
            scores = mb.softmax(x=mb.matmul(x=fused, y=k, transpose_y=True), axis=-1)
            return mb.reduce_argmax(x=scores, axis=-1, name="best")

        path = tmp_path / f"{rows}.mlpackage"
        convert(program, path)
        return Package.open(path)

    return make


@pytest.mark.parametrize(("rows", "warned"), [(16, 0), (17, 2)])
def test_query_rows(attention: Callable[[int], Package], rows: int, warned: int) -> None:
    found = audit(attention(rows))
    assert sum(warning.code == "query-rows" for warning in found.warnings) == warned
    assert {"wide-type", "argmax-ties"} <= codes(found)
