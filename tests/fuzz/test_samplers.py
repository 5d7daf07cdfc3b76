"""Random options and logits: NumPy, the library, the C++ host and JavaScript choose the same
tokens, or refuse alike.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssdevice.errors import InputError
from ssdevice.runtime.sampling.options import Sampling
from tests.apps.cpp_host import build as cpp_host
from tests.apps.web_demo import host
from tests.compiled_kernels import COMPILER, NO_COMPILER, built, preloaded
from tests.fuzz import samplers, sanitized
from tests.vectors.sampling import row_case

SEED = 20
COUNT = 1200
QUICK = 150
OF_HOSTS = 600
MOST = 300
"""Tokens of rows for hosts: larger ones take long to write."""


@pytest.mark.wide
@pytest.mark.skipif(preloaded() is None, reason="needs a C++ compiler with AddressSanitizer, GCC's")
def test_both_samplers_choose_the_same_under_sanitizers() -> None:
    outcomes, bugs = sanitized.run(samplers.MODULE, SEED, 0, COUNT)
    assert not bugs, f"{len(bugs)} bugs, the first: {next(iter(bugs.items()))}"
    check(outcomes, COUNT)


@pytest.mark.skipif(COMPILER is None, reason=NO_COMPILER)
def test_both_samplers_choose_the_same() -> None:
    library = ctypes.CDLL(str(built("native")))
    said = [samplers.outcome(library, samplers.case(SEED, index)) for index in range(QUICK)]
    assert not [each for each in said if each.startswith("BUG")]
    check(Counter(each.split(" ")[0] for each in said), QUICK)


def check(outcomes: Counter[str], count: int) -> None:
    """All kinds of outcomes must have come."""
    assert outcomes.total() == count
    assert outcomes["chosen"] > count // 3, outcomes
    for kind in ("refused-by-model:", "refused-by-request:", "options"):
        assert outcomes[kind] > count // 50, outcomes


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows and options of the fuzz as test vectors, with what Python makes of them."""
    rows = []
    for index in range(OF_HOSTS):
        case = samplers.case(SEED, index)
        if case.rows.shape[1] <= MOST:
            rows += of_hosts(case)
    content = {"philox": [], "noise": [], "logits": [], "choices": [], "options": [], "rows": rows}
    file = tmp_path_factory.mktemp("samplers") / "rows.json"
    file.write_text(json.dumps(content), "utf-8")
    assert len({str(row.get("refused")) for row in rows}) == 3
    return file


def of_hosts(case: samplers.Case) -> list[dict[str, Any]]:
    """The rows of a case for hosts, which have no log-probabilities; none for refused options."""
    asked = {name: value for name, value in case.asked.items() if name != "logprobs"}
    try:
        Sampling(**asked)
    except InputError:
        return []
    biases = asked.pop("logit_bias", {})
    if -np.inf in biases.values():  # JSON has no such number
        return []
    seed = asked.pop("seed")
    if biases:
        asked["logit_bias"] = {str(token): bias for token, bias in biases.items()}
    words = {np.inf: "Infinity", -np.inf: "-Infinity"}
    made = []
    for row in case.rows:
        logits = ["NaN" if np.isnan(x) else words.get(float(x), repr(float(x))) for x in row]
        made.append(row_case(logits, asked, seed, case.prompt))
    return made


@pytest.mark.wide
@pytest.mark.skipif(bool(cpp_host.missing()), reason=cpp_host.missing())
def test_the_cpp_host_chooses_the_same(vectors: Path) -> None:
    done = subprocess.run([cpp_host.vectors(), vectors], capture_output=True, text=True)
    assert done.stdout.startswith("0 of "), (done.stdout + done.stderr)[-2000:]


@pytest.mark.wide
def test_the_page_chooses_the_same(vectors: Path) -> None:
    done = host.script("vectors.mjs", vectors)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(json.loads(done.stdout)) == ["cases"], done.stdout[:2000]
