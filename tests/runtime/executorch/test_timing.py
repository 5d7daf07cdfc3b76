"""Times by instruction: they add up, each instruction has its part, and nothing is left behind. No time is asserted."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("executorch")

from ssdevice.bundle.folder import Bundle
from ssdevice.cli import main
from ssdevice.contract import FUNCTIONS, PLAIN, STEP
from ssdevice.errors import BundleError, InputError
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.executorch import timing as timed
from ssdevice.runtime.executorch.engine import PROGRAM, ExecutorchEngine
from ssdevice.runtime.executorch.file import DelegateCalls, read_calls
from ssdevice.runtime.executorch.timing import TOGETHER, MethodTimes, rising, time_methods
from ssdevice.runtime.target import runtime_target
from tests.export.executorch import programs

COMMITTED = 7


def silent(*_: Any) -> None:
    pass


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return programs.bundle()


@pytest.fixture(scope="module")
def times(bundle: Bundle) -> dict[str, MethodTimes]:
    return time_methods(bundle, EngineOptions(), COMMITTED, silent, seconds=0.5)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary files go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path


def test_the_parts_add_up_to_the_whole(times: dict[str, MethodTimes]) -> None:
    assert set(times) == set(FUNCTIONS)
    for found in times.values():
        assert found.outside > 0 and found.rounds >= timed.MIN_ROUNDS and found.rounds % 2 == 0
        assert all(part.seconds >= 0 for part in found.parts)
        assert found.outside + sum(part.seconds for part in found.parts) == pytest.approx(found.whole, rel=1e-9)


def test_every_instruction_has_its_part(bundle: Bundle, times: dict[str, MethodTimes]) -> None:
    for name, calls in read_calls(bundle.file(PROGRAM)).items():
        parts = times[name].parts
        assert len(parts) == len(calls.instructions) and all(part.calls == 1 for part in parts)
        delegates = [part.name for part in parts if part.name.startswith("delegate ")]
        assert delegates == [f"delegate {i} ({one.nodes} operators)" for i, one in enumerate(calls.delegates, 1)]
        assert Counter(part.name for part in parts if part.name not in delegates) == calls.kernels
        order = [one for one in calls.instructions if not isinstance(one, DelegateCalls)]
        assert [part.name for part in parts if part.name not in delegates] == order


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=6))
def test_rising_values_are_the_nearest(values: list[int]) -> None:
    found = rising(np.array(values, np.float64))
    assert found.sum() == pytest.approx(sum(values))
    assert (np.diff(found) >= 0).all()
    # The largest of the least means of the runs around a place: the same fit in closed form.
    size = range(len(values))
    assert found.tolist() == pytest.approx(
        [max(min(np.mean(values[a : b + 1]) for b in size[i:]) for a in size[: i + 1]) for i in size]
    )


def test_of_a_slow_method_kernels_in_a_row_are_timed_as_one(bundle: Bundle) -> None:
    found = time_methods(bundle, EngineOptions(), COMMITTED, silent, seconds=0)
    for name, calls in read_calls(bundle.file(PROGRAM)).items():
        parts = found[name].parts
        assert [part.calls for part in parts if not part.name.startswith("delegate ")] == [n for n in calls.runs if n]
        assert sum(part.calls for part in parts if part.name == TOGETHER) == sum(n for n in calls.runs if n > 1)


def test_a_cut_call_stops_where_it_was_cut(bundle: Bundle, folder: Path) -> None:
    """The first cache row is written by the calls of one instruction more, and by none of fewer."""
    copy = folder / "model.pte"
    copy.write_bytes(bundle.file(PROGRAM).read_bytes())
    calls = read_calls(copy)[PLAIN]
    writes = [i for i, one in enumerate(calls.instructions) if one == "aten::index_put_"]
    engine = ExecutorchEngine.of(bundle, None, EngineOptions(), copy)
    conversation = engine.new_conversation()
    with copy.open("r+b") as opened, timed.mmap.mmap(opened.fileno(), 0) as window:
        method = timed._Method(conversation, window, PLAIN, calls)
        states = engine.program.states(PLAIN)
        for state in states:
            state.zero_()
        seen = []
        for count in range(method.size + 1):
            method.run(count)
            seen.append(sum(bool(state.any()) for state in states))
        assert seen == [sum(at < count for at in writes) for count in range(method.size + 1)]
    engine.close()


def test_the_bundle_is_left_alone_and_the_copy_removed(bundle: Bundle, folder: Path) -> None:
    file = bundle.file(PROGRAM)
    before = file.read_bytes(), file.stat().st_mtime_ns
    time_methods(bundle, EngineOptions(), 0, silent, seconds=0)
    assert (file.read_bytes(), file.stat().st_mtime_ns) == before
    assert not list(folder.iterdir())
    Bundle.open(bundle.folder)


def test_a_program_that_branches_is_refused(bundle: Bundle, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def branching(file: Path) -> Any:
        return {name: replace(calls, counts_at=calls.counts_at * 2) for name, calls in read_calls(file).items()}

    monkeypatch.setattr(timed, "read_calls", branching)
    with pytest.raises(BundleError, match=r"model.pte: step branches"):
        time_methods(bundle, EngineOptions(), 0, silent, seconds=0)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("committed", [-1, programs.CONTEXT + 1])
def test_more_tokens_than_the_context_are_refused(bundle: Bundle, committed: int) -> None:
    with pytest.raises(InputError, match=f"{committed} committed tokens, the bundle's context holds 0 to 24"):
        time_methods(bundle, EngineOptions(), committed, silent)


def test_a_full_context_is_timed(bundle: Bundle) -> None:
    assert time_methods(bundle, EngineOptions(), programs.CONTEXT, silent, seconds=0)[STEP].whole > 0


def test_inspect_prints_tables_and_one_json_object(
    bundle: Bundle, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timed.time_methods, "__defaults__", (0.2,))
    command = ["inspect", str(bundle.folder), "--time", "--threads", "0"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "12 tokens in the cache" in out and "delegate 2 (" in out and "all portable operators" in out
    assert main([*command, "--json", "--committed", "3"]) == 0
    found = json.loads(capsys.readouterr().out)["times"]
    assert found["committed"] == 3
    for name, calls in read_calls(bundle.file(PROGRAM)).items():
        method = found["methods"][name]
        counts = {part["name"]: part["calls"] for part in method["parts"][len(calls.delegates) :]}
        assert counts == dict(calls.kernels)
        parts = method["outside_ms"] + method["delegates_ms"] + method["kernels_ms"]
        assert parts == pytest.approx(method["whole_ms"], rel=1e-9)


@pytest.mark.parametrize("target", ["onnx", "coreml"])
def test_bundles_of_other_targets_are_refused_in_one_line(bundle: Bundle, target: str) -> None:
    other = Bundle(bundle.folder, replace(bundle.manifest, target=target))
    with pytest.raises(InputError, match=f"is for {target}: use `ssdevice bench BUNDLE --data FILE --profile`") as e:
        runtime_target(target).check_timed(other)
    assert "\n" not in str(e.value)
