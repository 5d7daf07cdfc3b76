"""The test vectors that hosts in other languages follow are what Python does."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.vectors.sampling import FILE, record, text

HOW = "python -m tests.vectors writes them again"


def test_the_vectors_are_what_python_does() -> None:
    stored = json.loads(FILE.read_text("utf-8"))
    found = json.loads(text(record()))
    for name in ("philox", "logits", "choices", "rows", "options"):
        assert stored[name] == found[name], HOW
    for one, other in zip(stored["noise"], found["noise"], strict=True):
        # Libraries' logarithms may differ in the last bit.
        assert one.pop("noise") == pytest.approx(other.pop("noise"), rel=1e-14) and one == other, (
            HOW
        )


def test_the_vectors_have_all_that_a_host_must_know() -> None:
    """Stop tokens that are banned and not, rows that truncation cuts and not, and both kinds of
    noise.
    """
    vectors = json.loads(FILE.read_text("utf-8"))
    assert len(FILE.read_bytes()) < 200_000
    assert {1, 5, 7, 256, 257, 5000} <= {
        left for case in vectors["choices"] for left in case["left"]
    }
    assert {case["kind"] for case in vectors["philox"]} == {0, 1}
    refusals = Counter(case.get("refused") for case in vectors["rows"])
    assert min(refusals[None], refusals["model"], refusals["request"]) > 10
    late = [case for case in vectors["choices"] if "min_new_tokens" in case["sampling"]]
    assert all(0 not in case["tokens"][:6] and 0 in case["tokens"][6:] for case in late)
