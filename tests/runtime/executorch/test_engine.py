"""The ExecuTorch engine: conversations that do not see each other, and errors that say what is
wrong.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("executorch")

from ssdevice.bundle.manifest import SCHEMA_VERSION
from ssdevice.contract import FUNCTIONS, Geometry
from ssdevice.errors import BundleError, InputError
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.executorch import engine as target
from ssdevice.runtime.executorch.engine import PROGRAM, ExecutorchEngine
from ssdevice.runtime.executorch.program import POOL, SCHEMA, load_program
from ssdevice.runtime.session import Session
from tests.export.executorch import programs
from tests.runtime.turns import answer, taking_turns

ONE = [7, 21, 3, 44]
OTHER = [50, 2, 17]


@pytest.fixture(scope="module")
def file() -> Path:
    return programs.bundle().file(PROGRAM)


@pytest.fixture(scope="module")
def geometry() -> Geometry:
    return programs.bundle().geometry


@pytest.fixture
def engine(file: Path, geometry: Geometry) -> Iterator[ExecutorchEngine]:
    opened = ExecutorchEngine(file, geometry, FUNCTIONS, EngineOptions())
    yield opened
    opened.close()


def test_conversations_taking_turns_give_what_each_gives_alone(engine: ExecutorchEngine) -> None:
    alone = [answer(engine.new_conversation(), prompt, 4) for prompt in (ONE, OTHER)]
    first = engine.new_conversation()
    second = engine.new_conversation()
    assert taking_turns((first, second), (ONE, OTHER), 4) == alone
    assert not np.array_equal(first.cache.rows(0, 3), second.cache.rows(0, 3))


def test_two_engines_of_one_file_share_nothing(
    file: Path, geometry: Geometry, engine: ExecutorchEngine
) -> None:
    other = ExecutorchEngine(file, geometry, FUNCTIONS, EngineOptions())
    mine = engine.new_conversation()
    mine.prefill(ONE)
    before = mine.cache.rows(0, len(ONE))
    other.new_conversation().prefill(OTHER)
    np.testing.assert_array_equal(mine.cache.rows(0, len(ONE)), before)
    other.close()


def test_a_conversation_begins_anew_at_length_zero_without_loading_again(
    engine: ExecutorchEngine,
) -> None:
    conversation = engine.new_conversation()
    first = answer(conversation, ONE, 4)
    conversation.length = 0
    assert answer(conversation, ONE, 4) == first


def test_all_functions_write_one_cache(engine: ExecutorchEngine) -> None:
    conversation = engine.new_conversation()
    root = conversation.prefill(ONE)
    conversation.length = len(ONE)
    after = conversation.step_plain(root)
    conversation.length += 1
    # The step reads the rows of both: its first token is what plain decoding goes on with.
    expected = conversation.step_plain(after)
    assert conversation.step(after)[0] == expected


def test_a_program_says_all_a_host_needs(file: Path, geometry: Geometry) -> None:
    program = load_program(file)
    found = {
        name: program.load_method(name).execute([])[0]
        for name in program.method_names - set(FUNCTIONS)
    }
    assert found.pop("stop_tokens").tolist() == [1]
    assert found == {
        "schema_version": SCHEMA_VERSION,
        "gamma": geometry.gamma,
        "k": geometry.k,
        "tree_size": geometry.tree.size,
        "emitted": geometry.tree.emitted,
        "context": geometry.context,
        "capacity": geometry.capacity,
        "chunk": geometry.chunk,
        "vocab": geometry.vocab,
        "layers": geometry.layers,
        "hidden": 0,
    }


def test_a_session_decodes_text() -> None:
    with Session.open(programs.bundle()) as session:
        texts = [
            "".join(session.generate("a b", max_tokens=8, speculate=speculate))
            for speculate in (True, False)
        ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("part", [0, 3, 100, 0.5, 0.99])
def test_a_cut_program_is_refused_without_a_line_of_executorch(
    file: Path, geometry: Geometry, tmp_path: Path, part: float, capfd: pytest.CaptureFixture[str]
) -> None:
    data = file.read_bytes()
    cut = tmp_path / "model.pte"
    cut.write_bytes(data[: int(part * len(data)) if isinstance(part, float) else part])
    with pytest.raises(BundleError, match="model.pte"):
        engine = ExecutorchEngine(cut, geometry, FUNCTIONS, EngineOptions())
        engine.new_conversation().prefill(ONE)
    assert capfd.readouterr().err == ""


def test_a_file_that_is_missing_is_refused(geometry: Geometry, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no such program"):
        ExecutorchEngine(tmp_path / "model.pte", geometry, FUNCTIONS, EngineOptions())


def test_a_program_without_a_function_is_refused(file: Path, geometry: Geometry) -> None:
    found = pytest.raises(BundleError, match="the program has no rewind; it has .*step_plain")
    with found, pytest.MonkeyPatch.context() as patch:
        patch.setattr(target.contract, "functions", lambda *_: {"rewind": None})
        ExecutorchEngine(file, geometry, ["rewind"], EngineOptions())


def test_a_program_of_another_geometry_is_refused(file: Path, geometry: Geometry) -> None:
    engine = ExecutorchEngine(
        file, replace(geometry, chunk=geometry.chunk + 1), FUNCTIONS, EngineOptions()
    )
    with pytest.raises(BundleError, match="prefill takes tensors of shapes .*the manifest says"):
        engine.new_conversation().prefill(ONE)
    engine.close()


class Impostor:
    """A program whose methods fail to load, or say another schema."""

    def __init__(self, program: Any, schema: int, error: str) -> None:
        self.program = program
        self.schema = schema
        self.error = error
        self.method_names = program.method_names

    def load_method(self, name: str) -> Any:
        if name == SCHEMA:
            return self
        raise RuntimeError(self.error)

    def execute(self, _: list[Any]) -> list[int]:
        return [self.schema]


@pytest.mark.parametrize(
    ("schema", "error", "message"),
    [
        (SCHEMA_VERSION + 1, "", "a program with schema 2, this runtime reads 1; export it again"),
        (
            SCHEMA_VERSION,
            "loading method failed with error 0x14",
            "an operator of the program is not in this runtime",
        ),
        (
            SCHEMA_VERSION,
            "loading method failed with error 0x20",
            "the program's delegate is not in this runtime",
        ),
    ],
)
def test_what_this_runtime_cannot_load_is_said_in_one_line(
    file: Path, geometry: Geometry, schema: int, error: str, message: str
) -> None:
    engine = ExecutorchEngine(file, geometry, FUNCTIONS, EngineOptions())
    engine.program._program = Impostor(engine.program._program, schema, error)
    with pytest.raises(BundleError, match=message) as found:
        engine.new_conversation().prefill(ONE)
    assert "\n" not in str(found.value)
    engine.close()


def test_the_thread_pool_is_let_go_whatever_happens(file: Path, geometry: Geometry) -> None:
    before = POOL.loaded
    engine = ExecutorchEngine(file, geometry, FUNCTIONS, EngineOptions())
    program, engine.program._program = engine.program._program, None
    with pytest.raises(InputError, match="closed"):
        engine.new_conversation().prefill(ONE)
    engine.program._program = program
    with pytest.raises(MemoryError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            engine.program, "_load", lambda function: (_ for _ in ()).throw(MemoryError())
        )
        engine.new_conversation().prefill(ONE)
    assert POOL.loaded == before
    engine.new_conversation().prefill(ONE)
    assert POOL.loaded > before
    del engine, program  # nobody closed it
    gc.collect()
    assert POOL.loaded == before


def test_threads_are_fixed_while_a_program_is_loaded(
    file: Path, geometry: Geometry, engine: ExecutorchEngine
) -> None:
    engine.new_conversation().prefill(ONE)
    other = ExecutorchEngine(file, geometry, FUNCTIONS, EngineOptions(threads=61))
    with pytest.raises(InputError, match="61 threads: ExecuTorch has one pool per process"):
        other.new_conversation().prefill(ONE)
    other.close()


def test_a_closed_engine_says_so(file: Path, geometry: Geometry) -> None:
    engine = ExecutorchEngine(file, geometry, FUNCTIONS, EngineOptions())
    conversation = engine.new_conversation()
    engine.close()
    with pytest.raises(InputError, match="closed"):
        conversation.prefill(ONE)


def test_a_damaged_bundle_is_refused_before_the_program_is_read(tmp_path: Path) -> None:
    copied = tmp_path / "bundle"
    shutil.copytree(programs.bundle().folder, copied)
    program = next(copied.glob("*.pte"))
    data = bytearray(program.read_bytes())
    data[len(data) // 2] ^= 1
    program.write_bytes(bytes(data))
    with pytest.raises(BundleError, match="damaged"):
        Session.open(copied)
