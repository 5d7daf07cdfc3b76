"""Every kernel against coremltools' own evaluation, torch or NumPy, from a saved package."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("coremltools", reason="Core ML packages are made with coremltools")

from ssdevice.mil.operations import KERNELS
from ssdevice.mil.program import Program
from ssdevice.mil.reader import Package
from tests.mil import cases, cases_index
from tests.mil.builder import Case, package, value_by_coremltools

CASES = [
    *cases.elementwise(),
    *cases.reductions(),
    *cases.linear(),
    *cases_index.shapes(),
    *cases_index.indexing(),
]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Package]:
    path = tmp_path_factory.mktemp("ops") / "ops.mlpackage"
    package(CASES, path)
    yield Package.open(path)


@pytest.fixture(scope="module")
def results(opened: Package) -> dict[str, np.ndarray]:
    inputs = {
        f"in_{case.name}_{index}": array.astype(np.int32) if array.dtype == bool else array
        for case in CASES
        for index, array in enumerate(case.inputs)
    }
    return Program(opened).run("main", inputs)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_operation_gives_its_reference(case: Case, results: dict[str, np.ndarray]) -> None:
    expected = value_by_coremltools(case) if case.expected is None else case.expected(*case.inputs)
    assert expected is not None
    many = isinstance(expected, list)
    for index, value in enumerate(expected if many else [expected]):
        value = np.asarray(value)
        result = results[f"{case.name}_out{index}" if many else case.name]
        assert result.shape == value.shape
        if case.exact:
            np.testing.assert_array_equal(result, value.astype(result.dtype))
        else:
            np.testing.assert_allclose(result, value, rtol=3e-6, atol=3e-6)


def test_every_kernel_is_in_the_table(opened: Package) -> None:
    used = {operation.kind for operation in opened.functions["main"].operations}
    untested = {kind for kind in KERNELS.keys() - used if not kind.startswith("constexpr_")}
    assert untested == set()
