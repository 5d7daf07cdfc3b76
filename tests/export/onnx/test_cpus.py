"""The same bundle gives the same integers on every CPU: on this one, and on one with AVX2 and no
VNNI.

The second is emulated. Products are compared with integers of NumPy, not with each other.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ssdevice.cli import main
from ssdevice.export.onnx.quantization import INT4
from ssdevice.export.plan import Quant
from tests.export.onnx import calls, forms

EMULATOR = "qemu-x86_64"
HASWELL = (EMULATOR, "-cpu", "Haswell")
ROWS = (1, 2, 5, 8)
PROMPTS = ("a b c", "d e f g h i j k l m n o p q r s t u v w")
Outputs = dict[str, dict[str, np.ndarray]]
needs_emulator = pytest.mark.skipif(
    shutil.which(EMULATOR) is None or platform.machine() != "x86_64",
    reason=f"needs {EMULATOR} on an x86-64 machine (Debian: apt-get install qemu-user)",
)
CPUS = [
    pytest.param((), id="this"),
    pytest.param(HASWELL, id="haswell", marks=[needs_emulator, pytest.mark.wide]),
]


def run(cpu: tuple[str, ...], *command: str) -> str:
    """Python on a CPU; its standard output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*cpu, sys.executable, *command],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


WIDE = [drawn(1, 96, 576), drawn(2, 40, 576)]
"""Merged, as q/k/v are; their columns are no multiple of a kernel's."""
FLAT = [
    np.random.default_rng(3).uniform(0.4, 1, (50, 705)).astype(np.float32)
    * np.sign(drawn(4, 50, 705))
]
"""Every value near its column's largest, where neighbours add up to most, and an odd number of
inputs.
"""
TABLE = drawn(5, 400, 64)
BASE = drawn(6, 48, 384)
DOWN = drawn(7, 384, 24)
IDS = np.random.default_rng(8).integers(0, 400, (1, 8))


def inputs(seed: int, weight: np.ndarray) -> np.ndarray:
    """``[1, 8, K]``: rows at random, rows that drive columns of ``weight [N, K]`` to their ends, a
    row of zeros.
    """
    x = drawn(seed, 1, 8, weight.shape[1])
    x[0, 1] = np.sign(weight[0])
    x[0, 4] = -np.sign(weight[-1])
    x[0, 6] = 1
    x[0, 7] = 0
    return x


X = inputs(10, WIDE[0])
Y = inputs(11, FLAT[0])
Z = inputs(12, BASE)
FORMS: dict[str, tuple[Callable[[int], bytes], dict[str, np.ndarray], str]] = {
    "merged": (lambda n: forms.linears_model(n, WIDE, Quant.INT8), {"x": X}, "x"),
    "flat": (lambda n: forms.linears_model(n, FLAT, Quant.INT8), {"x": Y}, "x"),
    "tied": (lambda n: forms.tied_model(n, TABLE, Quant.INT8), {"ids": IDS}, "ids"),
    "slot": (
        lambda n: forms.slot_model(n, BASE, 24, Quant.INT8),
        {"x": Z, **forms.slot_feeds(BASE, DOWN)},
        "x",
    ),
    "int4": (lambda n: forms.linears_model(n, WIDE, Quant.INT4), {"x": X}, "x"),
}
"""A graph by its number of rows, its inputs, and the one that holds the rows."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every form for 1, 2, 5 and 8 rows; the graphs of fewer rows get the first of the eight."""
    made = tmp_path_factory.mktemp("forms")
    for name, (model, feeds, of_rows) in FORMS.items():
        for rows in ROWS:
            file = made / f"{name}-{rows}.onnx"
            file.write_bytes(model(rows))
            np.savez(file.with_suffix(".npz"), **{**feeds, of_rows: feeds[of_rows][:, :rows]})
    return made


@pytest.fixture(scope="module", params=CPUS)
def outputs(request: pytest.FixtureRequest, folder: Path) -> Outputs:
    """What a CPU makes of them."""
    run(request.param, str(Path(calls.__file__)), str(folder))
    found = {}
    for file in folder.glob("*.out.npz"):
        with np.load(file) as arrays:
            found[file.name.removesuffix(".out.npz")] = dict(arrays)
        file.unlink()
    return found


@pytest.mark.parametrize("rows", ROWS)
def test_int8_products_are_those_of_integers_in_every_bit(outputs: Outputs, rows: int) -> None:
    merged = forms.int8_product(X, np.concatenate(WIDE).T)
    expected = {
        "merged": np.split(merged, [96], axis=2),
        "flat": [forms.int8_product(Y, FLAT[0].T)],
        "tied": [forms.int8_product(forms.embedded(IDS, TABLE), np.ascontiguousarray(TABLE.T))],
        "slot": [forms.int8_slot_product(Z, BASE.T, DOWN)],
    }
    for name, wanted in expected.items():
        for i, whole in enumerate(wanted):
            np.testing.assert_array_equal(
                outputs[f"{name}-{rows}"][f"y{i}"], whole[:, :rows], err_msg=name
            )


def test_int4_rows_are_the_same_among_any_number_and_alone(outputs: Outputs) -> None:
    for i, weight in enumerate(WIDE):
        y = {rows: outputs[f"int4-{rows}"][f"y{i}"] for rows in ROWS}
        for rows in (1, 2, 5):
            np.testing.assert_array_equal(y[rows], y[8][:, :rows])
        exact = X @ INT4.rounds(torch.from_numpy(weight)).dequantized().numpy().T
        assert np.abs(y[8] - exact).max() <= 0.01 * np.abs(y[8]).max()


ANSWERS = """
import json, sys
from ssdevice.runtime.session import Session
told = []
with Session.open(sys.argv[1], threads=1) as session:
    for mode in ("speculative", "plain"):
        for prompt in sys.argv[2:]:
            list(session.runs(session.prompt_ids(prompt), max_tokens=16, mode=mode))
            told.append(session.last.tokens)
print(json.dumps(told))
"""


@needs_emulator
@pytest.mark.slow
@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_a_bundle_keeps_its_promise_on_the_other_cpu(
    quant: str, base: Path, adapter: Path, tmp_path: Path
) -> None:
    """Speculative output is plain output there; between CPUs tokens may part at near-ties, since
    floats round apart.
    """
    out = str(tmp_path / "bundle")
    flags = [
        "--context",
        "96",
        "--chunk",
        "16",
        "--tree",
        "chain:3",
        "--quant",
        quant,
        "--quiet",
        "--out",
        out,
    ]
    assert (
        main(
            [
                "export",
                "--model",
                str(base),
                "--adapter",
                f"app={adapter}",
                "--target",
                "onnx",
                *flags,
            ]
        )
        == 0
    )
    told = json.loads(run(HASWELL, "-c", ANSWERS, out, *PROMPTS))
    assert told[: len(PROMPTS)] == told[len(PROMPTS) :] and all(told)
