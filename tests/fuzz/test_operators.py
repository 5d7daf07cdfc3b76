"""Some hundred hostile graphs for the kernels, under AddressSanitizer and UBSan: no report, no end,
no hang; and every kernel is reached.
"""

from __future__ import annotations

import pytest

from ssdevice.runtime.onnx import kernels
from tests.compiled_kernels import COMPILER, NO_COMPILER, built, preloaded
from tests.fuzz import operators, sanitized
from tests.fuzz.operator_graphs import attentions, hostile

SEED = 20
COUNT = 350
KINDS = (*kernels.IN_REGIONS, kernels.INT8_ARGMAX, kernels.REGION)


@pytest.mark.wide
@pytest.mark.skipif(preloaded() is None, reason="needs a C++ compiler with AddressSanitizer, GCC's")
def test_graphs_are_refused_or_run() -> None:
    outcomes, bugs = sanitized.run(operators.MODULE, SEED, 0, COUNT)
    assert not bugs, f"{len(bugs)} bugs, the first: {next(iter(bugs.items()))}"
    assert outcomes.total() == COUNT
    assert all(outcomes[operators.ran(kind)] for kind in KINDS), outcomes
    by_kernel = sum(outcomes[operators.refused(kind)] for kind in KINDS)
    assert by_kernel > COUNT // 5 and outcomes[operators.BEFORE] > COUNT // 10, outcomes


@pytest.mark.skipif(COMPILER is None, reason=NO_COMPILER)
def test_attention_is_refused_by_its_kernel_or_runs() -> None:
    """Its schema lets all of them through, so that what is tested is the kernel."""
    library = str(built("native"))
    outcomes = [operators.outcome(library, node) for node in attentions()]
    reached = [operators.ran(node.kind) for node in attentions()]
    refused = [operators.refused(node.kind) for node in attentions()]
    words = [outcome.split(" ")[0] for outcome in outcomes]
    assert all(word in pair for word, *pair in zip(words, reached, refused, strict=True)), outcomes
    assert set(words) == {*reached, *refused}


def test_cases_are_the_same_every_time_and_of_every_operator() -> None:
    assert all(hostile(SEED, index).model() == hostile(SEED, index).model() for index in range(40))
    nodes = [hostile(SEED, index) for index in range(COUNT)]
    texts = [f"{node.kind} {node.attributes}" for node in nodes]
    for kind in (*kernels.IN_REGIONS, kernels.INT8_ARGMAX):
        assert any(kind in text for text in texts), kind
