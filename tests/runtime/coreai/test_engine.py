"""The Core AI engine: conversations that do not see each other, and errors in words."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ssdevice.bundle.manifest import Precision
from ssdevice.errors import BundleError, MissingExtraError
from ssdevice.export.target import exporter
from ssdevice.runtime.engine import EngineOptions, open_engine
from tests.export.coreai.bundles import ABSENT, Cell, bundle, options
from tests.runtime.turns import answer, taking_turns

ONE = [7, 21, 3, 44]
OTHER = [50, 2, 17]


def test_missing_packages_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name
        for name in sys.modules
        if name.split(".")[0].startswith("coreai") or ".coreai." in name
    ]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("coreai", "coreai_torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ssdevice\[coreai\]'"):
        exporter(options(Cell(), tmp_path))
    bundle = SimpleNamespace(manifest=SimpleNamespace(target="coreai"))
    with pytest.raises(MissingExtraError, match=r"pip install 'ssdevice\[coreai\]'"):
        open_engine(cast(Any, bundle), None, EngineOptions())


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    pytest.importorskip("coreai_torch", reason=ABSENT)
    opened = open_engine(bundle(Cell(Precision.INT4)), None, EngineOptions())
    yield opened
    opened.close()


def test_conversations_taking_turns_give_what_each_gives_alone(engine: Any) -> None:
    alone = [answer(engine.new_conversation(), prompt, 3) for prompt in (ONE, OTHER)]
    both = [engine.new_conversation(), engine.new_conversation()]
    assert taking_turns(both, (ONE, OTHER), 3) == alone


def test_it_runs_below_an_event_loop(engine: Any) -> None:
    async def notebook() -> list[int]:
        return answer(engine.new_conversation(), ONE, 2)

    assert asyncio.run(notebook()) == answer(engine.new_conversation(), ONE, 2)


def test_a_damaged_asset_is_refused(engine: Any, tmp_path: Path) -> None:
    from ssdevice.runtime.coreai.engine import PROGRAM, CoreAIEngine

    damaged = tmp_path / engine.source.name
    shutil.copytree(engine.source, damaged)
    (damaged / PROGRAM).write_bytes(b"nothing")
    with pytest.raises(BundleError, match="main.mlirb is damaged"):
        CoreAIEngine(damaged, engine.geometry, engine.names)


def test_a_function_that_the_asset_lacks_is_named(engine: Any) -> None:
    with pytest.raises(BundleError, match="no function 'another'"):
        engine.asset.function("another")
