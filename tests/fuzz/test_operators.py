"""Some hundred hostile graphs for the kernels, under AddressSanitizer and UBSan: no report, no end,
no hang.
"""

from __future__ import annotations

import pytest

from ssdevice.runtime.onnx import kernels
from tests.compiled_kernels import preloaded
from tests.fuzz.operator_graphs import hostile
from tests.fuzz.operators import run

SEED = 20
COUNT = 250


@pytest.mark.wide
@pytest.mark.skipif(preloaded() is None, reason="needs a C++ compiler with AddressSanitizer, GCC's")
def test_graphs_are_refused_or_run() -> None:
    outcomes, bugs = run(SEED, 0, COUNT)
    assert not bugs, f"{len(bugs)} bugs, the first: {next(iter(bugs.items()))}"
    assert outcomes.total() == COUNT and min(outcomes["ran"], outcomes["refused"]) > COUNT // 5


def test_cases_are_the_same_every_time_and_of_every_operator() -> None:
    assert all(hostile(SEED, index).model() == hostile(SEED, index).model() for index in range(20))
    texts = [
        f"{node.kind} {node.attributes}"
        for node in (hostile(SEED, index) for index in range(COUNT))
    ]
    for kind in (*kernels.IN_REGIONS, kernels.INT8_ARGMAX):
        assert any(kind in text for text in texts), kind
