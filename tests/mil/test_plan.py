"""What the compiler may share, overwrite and drop: the meaning of a program stays that of its
values.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("coremltools", reason="Core ML packages are made with coremltools")

from ssdevice.mil.operations import ExecutionError
from ssdevice.mil.program import Program, State, check_type
from ssdevice.mil.reader import Package
from ssdevice.mil.schema import TensorType
from ssdevice.mil.weights import BY_NAME
from tests.mil.builder import convert, coremltools

SHAPE = (4, 3)
Made = tuple[Program, State]


@pytest.fixture
def program(tmp_path: Path) -> Callable[[Callable[..., Any]], Made]:
    """``program(body)``: a program with input x [4, 3] and states s and t [4, 3], all float16."""

    def make(body: Callable[..., Any]) -> Made:
        ct = coremltools()
        from coremltools.converters.mil.mil import Builder as mb
        from coremltools.converters.mil.mil import types

        specs = [mb.TensorSpec(shape=SHAPE, dtype=types.fp16)]
        specs += [mb.StateTensorSpec(shape=SHAPE, dtype=types.fp16) for _ in "st"]

        @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
        def built(x: Any, s: Any, t: Any) -> Any:
            for state in (s, t):  # an input nothing reads cannot be converted
                mb.read_state(input=state)
            outputs = body(mb, x, s, t)
            return tuple(mb.identity(x=one, name=f"y{index}") for index, one in enumerate(outputs))

        path = tmp_path / "plan.mlpackage"
        convert(built, path)
        made = Program(Package.open(path))
        return made, made.make_state()

    return make


def update(mb: Any, x: Any, row: int, value: Any) -> Any:
    return mb.slice_update(x=x, update=value, begin=[row, 0], end=[row + 1, 3])


def row(mb: Any, x: Any) -> Any:
    return mb.slice_by_index(x=x, begin=[0, 0], end=[1, 3])


ONES = np.ones(SHAPE, np.float16)


def test_the_value_read_before_a_write_stays(program: Any) -> None:
    def body(mb: Any, x: Any, s: Any, t: Any) -> Any:
        before = mb.read_state(input=s)
        after = mb.coreml_update_state(state=s, value=update(mb, before, 1, row(mb, x)))
        return mb.add(x=before, y=np.float16(0)), after

    made, state = program(body)
    result = made.run("main", {"x": ONES}, state)
    assert not result["y0"].any()
    assert result["y1"].sum() == 3
    np.testing.assert_array_equal(state["s"], result["y1"])


def test_a_view_of_the_old_value_stays(program: Any) -> None:
    def body(mb: Any, x: Any, s: Any, t: Any) -> Any:
        before = mb.read_state(input=s)
        view = mb.transpose(x=before, perm=[1, 0])
        after = mb.coreml_update_state(state=s, value=update(mb, before, 1, row(mb, x)))
        return view, mb.mul(x=after, y=np.float16(2))

    made, state = program(body)
    assert not made.run("main", {"x": ONES}, state)["y0"].any()
    assert made.run("main", {"x": ONES}, state)["y0"].sum() == 3


def test_an_update_that_is_not_written_back_leaves_the_state(program: Any) -> None:
    def body(mb: Any, x: Any, s: Any, t: Any) -> Any:
        return update(mb, mb.read_state(input=s), 1, row(mb, x)), mb.read_state(input=s)

    made, state = program(body)
    result = made.run("main", {"x": ONES}, state)
    assert result["y0"].sum() == 3 and not result["y1"].any() and not state["s"].any()


def test_a_state_set_to_an_input_is_a_copy(program: Any) -> None:
    def body(mb: Any, x: Any, s: Any, t: Any) -> Any:
        first = mb.coreml_update_state(state=s, value=x)
        return mb.coreml_update_state(
            state=s, value=update(mb, first, 0, row(mb, mb.mul(x=x, y=np.float16(5))))
        ), x

    made, state = program(body)
    given = ONES.copy()
    result = made.run("main", {"x": given}, state)
    assert result["y0"].sum() == 9 + 15 and result["y1"].sum() == 12
    given[:] = 7
    assert state["s"].sum() == 24


def test_two_states_of_one_value_part_again(program: Any) -> None:
    def body(mb: Any, x: Any, s: Any, t: Any) -> Any:
        double = mb.mul(x=x, y=np.float16(2))
        first = mb.coreml_update_state(state=s, value=double)
        second = mb.coreml_update_state(state=t, value=double)
        changed = mb.coreml_update_state(state=s, value=update(mb, first, 0, row(mb, x)))
        return mb.add(x=changed, y=second), second

    made, state = program(body)
    made.run("main", {"x": ONES}, state)
    assert state["s"].sum() == 3 + 18 and state["t"].sum() == 24
    assert not np.shares_memory(state["s"], state["t"])


def test_swapped_states(program: Any) -> None:
    def body(mb: Any, x: Any, s: Any, t: Any) -> Any:
        one = mb.read_state(input=s)
        two = mb.read_state(input=t)
        new = mb.coreml_update_state(state=s, value=mb.add(x=two, y=x))
        old = mb.coreml_update_state(state=t, value=one)
        return new, old

    made, state = program(body)
    for _ in range(3):
        made.run("main", {"x": ONES}, state)
    assert state["s"][0, 0] == 2 and state["t"][0, 0] == 1
    assert not np.shares_memory(state["s"], state["t"])


def test_an_update_by_its_own_rows(program: Any) -> None:
    def body(mb: Any, x: Any, s: Any, t: Any) -> Any:
        value = mb.coreml_update_state(state=s, value=mb.add(x=mb.read_state(input=s), y=x))
        moved = mb.slice_update(
            x=value,
            update=mb.slice_by_index(x=value, begin=[0, 0], end=[3, 3]),
            begin=[1, 0],
            end=[4, 3],
        )
        return mb.coreml_update_state(state=s, value=moved), x

    made, state = program(body)
    given = np.arange(12, dtype=np.float16).reshape(SHAPE)
    result = made.run("main", {"x": given}, state)["y0"]
    np.testing.assert_array_equal(result, given[[0, 0, 1, 2]])


def test_outputs_do_not_change_with_the_state(program: Any) -> None:
    def body(mb: Any, x: Any, s: Any, t: Any) -> Any:
        read = mb.read_state(input=s)
        return mb.coreml_update_state(state=s, value=mb.add(x=read, y=x)), mb.cast(
            x=x, dtype="fp32"
        )

    made, state = program(body)
    first = made.run("main", {"x": ONES}, state)["y0"]
    made.run("main", {"x": ONES}, state)
    assert first.sum() == 12 and not np.shares_memory(first, state["s"])


def test_half_precision_overflows_and_rounds_where_the_program_says(program: Any) -> None:
    def body(mb: Any, x: Any, s: Any, t: Any) -> Any:
        mb.coreml_update_state(state=s, value=mb.add(x=mb.read_state(input=s), y=x))
        return mb.mul(x=x, y=x), mb.sub(x=mb.add(x=x, y=np.float16(0.01)), y=x)

    made, state = program(body)
    result = made.run("main", {"x": ONES * 300}, state)
    assert np.isinf(result["y0"]).all() and result["y0"].dtype == np.float16
    assert not result["y1"].any()  # 300.01 is 300 in float16
    exact = Program(made.package, "fp32")
    result = exact.run("main", {"x": ONES * 300}, exact.make_state())
    assert (result["y0"] == 90000).all() and result["y0"].dtype == np.float32
    np.testing.assert_allclose(result["y1"], 0.01, atol=1e-4)


def test_values_are_dropped(program: Any) -> None:
    """Every step's reads are live, and a value nothing reads again does not stay."""

    def body(mb: Any, x: Any, s: Any, t: Any) -> Any:
        value = x
        for _ in range(20):
            value = mb.mul(x=value, y=np.float16(1.5))
        return value, x

    made, state = program(body)
    plan = made.plan("main")
    freed = [name for step in plan.steps for name in step.frees]
    assert len(freed) == len(set(freed)) >= 19
    made.run("main", {"x": ONES}, state)


def test_an_error_names_operation_function_and_output(program: Any) -> None:
    def body(mb: Any, x: Any, s: Any, t: Any) -> Any:
        index = mb.cast(x=mb.slice_by_index(x=x, begin=[0, 0], end=[1, 1]), dtype="int32")
        return mb.gather(x=x, indices=index, axis=0, name="picked"), x

    made, state = program(body)
    with pytest.raises(
        ExecutionError, match="function 'main', gather 'picked': index 9 is out of range for size 4"
    ):
        made.run("main", {"x": ONES * 9}, state)


def test_a_result_of_another_shape_or_type_is_refused() -> None:
    kind = TensorType(BY_NAME["float16"], (2, 7))
    check_type(np.zeros((2, 7), np.float32), kind, "here")
    with pytest.raises(ExecutionError, match=r"shape \[3, 7\], the program declares \[2, 7\]"):
        check_type(np.zeros((3, 7), np.float32), kind, "here")
    with pytest.raises(ExecutionError, match="its result is int32, declared float16"):
        check_type(np.zeros((2, 7), np.int32), kind, "here")
