"""Programs whose numbers contradict each other are refused before ExecuTorch sees them: it would
end the process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from random import Random

import pytest
import torch

pytest.importorskip("executorch")

from executorch.exir import to_edge

from ssdevice.errors import BundleError
from ssdevice.runtime.executorch import checks
from ssdevice.runtime.executorch.checks import INT, TENSOR, TENSORS, check_program
from ssdevice.runtime.executorch.engine import PROGRAM
from ssdevice.runtime.executorch.file import (
    DELEGATE,
    KERNEL,
    Data,
    Table,
    instructions,
    read_program,
    segment,
)
from ssdevice.runtime.executorch.program import load_program
from tests.export.executorch import programs
from tests.fuzz.programs import mutate

Place = Callable[[Table], int]
"""Where a change goes: its offset in the file, found from a method of the program."""
WORD = 4
BYTE = 1


@pytest.fixture(scope="module")
def file() -> Path:
    return programs.bundle().file(PROGRAM)


def field(table: Table, number: int) -> int:
    found = table._field(number)
    assert found is not None
    return found


def call(plan: Table, kind: int) -> Table:
    """The first call of a kernel or a delegate that is not the first of its table, which the file
    leaves out.
    """
    calls = (one.table(1) for one in instructions(plan) if one.byte(0) == kind)
    return next(found for found in calls if found.integer(0))


def instruction(plan: Table) -> Table:
    return next(instructions(plan))


def value(plan: Table, kind: int) -> Table:
    """The first value of a kind."""
    return next(entry for entry in plan.tables(2) if entry.byte(0) == kind)


NUMBER = -1
FLAT = -2
"""What means below the index of a value that is no tensor, and of a tensor of one dimension."""


def index_of(plan: Table, wanted: int) -> int:
    """The first value of the kind that is wanted."""
    values = list(plan.tables(2))
    if wanted == NUMBER:
        return [entry.byte(0) for entry in values].index(INT)
    return next(
        i for i, e in enumerate(values) if e.byte(0) == TENSOR and len(e.table(1).integers(2)) == 1
    )


def payload(plan: Table) -> int:
    """Where the data of the first delegate begins."""
    segments = list(Table.root(plan.data, 0).tables(4))
    return segment(plan.data, segments[next(plan.tables(7)).table(1).integer(1)])[0]


def write(plan: Table) -> Table:
    """The first call that writes rows into a cache."""
    names = [entry.text(0) for entry in plan.tables(6)]
    calls = (one.table(1) for one in instructions(plan) if one.byte(0) == KERNEL)
    return next(found for found in calls if names[found.integer(0)] == "aten::index_put_")


def first_argument(plan: Table) -> Table:
    return list(plan.tables(2))[call(plan, KERNEL).integers(1)[0]]


def inner(plan: Table) -> Table:
    """The first tensor that has sizes, and a place in a buffer."""
    tensors = [entry.table(1) for entry in plan.tables(2) if entry.byte(0) == TENSOR]
    return next(tensor for tensor in tensors if tensor.integers(2) and tensor.has(6))


@pytest.mark.parametrize(
    ("place", "number", "width", "message"),
    [
        (lambda plan: field(call(plan, KERNEL), 0), 9999, WORD, "an operator has the index 9999"),
        (lambda plan: field(call(plan, DELEGATE), 0), 99, WORD, "a delegate has the index 99"),
        (
            lambda plan: call(plan, KERNEL).vector(1, 4)[0],
            9999,
            WORD,
            "an argument has the index 9999",
        ),
        (
            lambda plan: call(plan, DELEGATE).vector(1, 4)[0],
            1 << 31,
            WORD,
            "an argument has the index -2147483648",
        ),
        (lambda plan: call(plan, KERNEL).vector(1, 4)[0] - 4, 1, WORD, "values, a call has 1"),
        (lambda plan: plan.vector(3, 4)[0], 9999, WORD, "a value has the index 9999"),
        (lambda plan: field(instruction(plan), 0), 4, BYTE, "an instruction of kind 4"),
        (
            lambda plan: field(first_argument(plan), 0),
            INT,
            BYTE,
            "is called with a value of kind 2, expected",
        ),
        (lambda plan: field(value(plan, TENSOR), 0), 77, BYTE, "is of kind 77"),
        (lambda plan: next(plan.tables(6)).vector(0, 1)[0], 0xFF, BYTE, "utf-8"),
        (
            lambda plan: next(plan.tables(6)).vector(0, 1)[0] + 4,
            ord("x"),
            BYTE,
            "an operator called 'atenx:",
        ),
        (
            lambda plan: value(plan, TENSORS).table(1).vector(0, 4)[0],
            9999,
            WORD,
            "has the index 9999",
        ),
        (lambda plan: inner(plan).vector(2, 4)[0], 0xFFFFFFFF, WORD, "has sizes [-1"),
        (lambda plan: inner(plan).vector(2, 4)[0], 1 << 20, WORD, "in its place are"),
        (lambda plan: inner(plan).vector(3, 1)[0], 9, BYTE, "in order [9"),
        (lambda plan: field(inner(plan), 0), 99, BYTE, "has elements of type 99"),
        (
            lambda plan: field(inner(plan).table(6), 0),
            99,
            WORD,
            "a tensor's buffer has the index 99",
        ),
        (lambda plan: plan.vector(8, 8)[0] + 12, 0x7FFFFFFF, WORD, "memory of [0, 92233720"),
        (lambda plan: plan.vector(8, 8)[0] + 8, 1 << 20, WORD, "memory of [0, 1048576"),
        (
            lambda plan: plan.vector(8, 8)[0] + 4,
            0x80000000,
            WORD,
            "memory of [-9223372036854775808",
        ),
        (
            lambda plan: field(list(plan.tables(7))[1].table(1), 1),
            1,
            WORD,
            "a call of XNNPACK has ",
        ),
        (
            lambda plan: call(plan, DELEGATE).vector(1, 4)[0] - 4,
            1,
            WORD,
            "a call of XNNPACK has the index 1 of 1",
        ),
        (
            lambda plan: call(plan, DELEGATE).vector(1, 4)[0],
            0,
            WORD,
            "a call of XNNPACK has a tensor of",
        ),
        (
            lambda plan: call(plan, DELEGATE).vector(1, 4)[0],
            NUMBER,
            WORD,
            "a call of XNNPACK has a value of kind 2",
        ),
        (
            lambda plan: write(plan).vector(1, 4)[0] + 2 * WORD,
            FLAT,
            WORD,
            "writes a tensor of 1 dimensions into one of 3",
        ),
        (
            lambda plan: payload(plan) + 4,
            ord("Y"),
            BYTE,
            "a delegate of 'XnnpackBackend' that begins like b'YH00'",
        ),
    ],
)
def test_a_number_that_leads_nowhere_is_refused(
    file: Path, tmp_path: Path, place: Place, number: int, width: int, message: str
) -> None:
    at = read_program(
        file, lambda _, root: place(next(p for p in root.tables(1) if p.text(0) == "step"))
    )
    if number < 0:
        number = read_program(
            file,
            lambda _, root: index_of(
                next(p for p in root.tables(1) if p.text(0) == "step"), number
            ),
        )
    changed = bytearray(file.read_bytes())
    changed[at : at + width] = number.to_bytes(width, "little")
    target = tmp_path / "model.pte"
    target.write_bytes(changed)
    with pytest.raises(BundleError, match="not a whole ExecuTorch program") as found:
        load_program(target)
    assert message in str(found.value) and "\n" not in str(found.value)


def test_changed_programs_are_refused_or_read(file: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.pte"
    refused = 0
    for index in range(100):
        target.write_bytes(mutate(Random(index), file.read_bytes())[0])
        try:
            check_program(target)
        except BundleError:
            refused += 1
    assert 0 < refused < 100


def test_another_graph_of_the_same_method_is_refused(file: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.pte"
    data = file.read_bytes()

    def swaps(_: Data, root: Table) -> list[tuple[int, int]]:
        found = list[tuple[int, int]]()
        for plan in root.tables(1):
            found += permutations([field(entry.table(1), 1) for entry in plan.tables(7)], 2)
        return found

    for at, other in read_program(file, swaps):
        target.write_bytes(data[:at] + data[other : other + 4] + data[at + 4 :])
        with pytest.raises(BundleError, match="a call of XNNPACK has "):
            check_program(target)


def test_an_operator_that_torch_does_not_know_is_left_to_executorch() -> None:
    assert checks._arguments("aten::no_such_operator", "out") is None
    checks._check_call(("aten::no_such_operator", "out"), [TENSOR])


class Split(torch.nn.Module):
    """Its operator fills a list of tensors; the constant stands in a segment, as in every program
    of ours.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.split([1, 3], -1)
        return first + second + self.one


def test_an_operator_that_fills_a_list_is_taken(tmp_path: Path) -> None:
    target = tmp_path / "model.pte"
    target.write_bytes(
        to_edge(torch.export.export(Split(), (torch.ones(2, 4),))).to_executorch().buffer
    )
    operators = read_program(
        target, lambda _, root: {o.text(0) for p in root.tables(1) for o in p.tables(6)}
    )
    assert "aten::split_with_sizes_copy" in operators
    check_program(target)


@pytest.mark.slow
def test_changed_programs_do_not_end_the_process(repository: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz.programs", "--seed", "5", "--count", "100"]
    done = subprocess.run(
        command, cwd=repository, capture_output=True, text=True, env={**os.environ}
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
