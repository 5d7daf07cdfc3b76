"""Five hundred hostile bundles and adapters: refused in one line or decoded as before; nothing
raises or hangs.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.fuzz import pristine
from tests.fuzz.mutator import Case, Oracle, Subject, change
from tests.fuzz.pool import Process, run_cases
from tests.fuzz.worker import MAX_GROWTH_MB, Result, Tried, judge

SEED = 20
COUNT = 500
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="sizes of processes are read from /proc"
)


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pristine.make(tmp_path_factory.mktemp("fuzz") / "pristine")


@pytest.mark.wide
def test_every_change_is_refused_or_harmless(subjects: Path) -> None:
    results = run_cases(subjects, SEED, range(COUNT), 2, lambda _: None)
    bugs = [result for result in results if result.outcome == "BUG"]
    assert not bugs, (
        f"{len(bugs)} bugs, the first: {bugs[0]}; see it with python -m tests.fuzz --seed {SEED} "
        "--only N"
    )
    assert len(results) == COUNT
    for subject in Subject:
        found = {result.outcome for result in results if result.subject == subject}
        # Nothing but what is not part of a bundle can be done to a signed one.
        passed = subject is Subject.SIGNED or found & {"same", "other"}
        assert "refused" in found and passed, f"{subject}: only {found}: the cases are too easy"


@pytest.mark.wide
def test_a_case_is_the_same_every_time(subjects: Path, tmp_path: Path) -> None:
    for index in range(12):
        subject = list(Subject)[index % 4]
        places = [tmp_path / f"{index}-{turn}" for turn in range(2)]
        cases = [change(5, index, subject, subjects, place) for place in places]
        assert cases[0] == cases[1]
        assert contents(places[0]) == contents(places[1])


def contents(place: Path) -> dict[str, bytes]:
    """All files below a folder, by path."""
    files = [path for path in place.rglob("*") if path.is_file()]
    return {str(path.relative_to(place)): path.read_bytes() for path in files}


@pytest.mark.wide
def test_the_oracle_tells_changed_tokens_from_unchanged_ones(
    subjects: Path, tmp_path: Path
) -> None:
    shutil.copytree(subjects, tmp_path / "changed")
    weights = tmp_path / "changed" / "bundle" / "weights.bin"
    data = bytearray(weights.read_bytes())
    data[: len(data) // 2] = bytes(len(data) // 2)
    weights.write_bytes(data)
    assert judged(Tried(0, [1, 2], ""), Oracle.SAME) == "same"
    assert judged(Tried(0, [1, 3], ""), Oracle.SAME) == "BUG"
    assert judged(Tried(0, [1, 3], ""), Oracle.ANY) == "other"
    assert judged(Tried(0, [1, 2], ""), Oracle.REFUSE) == "BUG"
    with pytest.raises(Exception, match="the worker ended with 1"):
        Process(tmp_path / "changed", adapter=False)


@pytest.mark.parametrize(
    "tried",
    [
        Tried(-1, None, "", "Traceback"),
        Tried(1, None, "ssdevice: error: it failed\n"),
        Tried(2, None, "ssdevice: error: one\nand another\n"),
        Tried(2, None, "[E:onnxruntime] a log\n"),
        Tried(2, None, "ssdevice: error: \x1b[31m\n"),
        Tried(2, None, f"ssdevice: error: {'x' * 2000}\n"),
        Tried(0, None, ""),
    ],
)
def test_what_users_must_never_see_is_a_bug(tried: Tried) -> None:
    assert judged(tried, Oracle.ANY) == "BUG"


def test_memory_is_part_of_the_oracle() -> None:
    refused = Tried(2, None, "ssdevice: error: no\n")
    assert judged(refused, Oracle.SAME) == "refused"
    assert judged(refused, Oracle.SAME, grown=MAX_GROWTH_MB + 1) == "BUG"


def judged(tried: Tried, oracle: Oracle, grown: float = 0.0) -> str:
    return judge(Case(Subject.FOLDER, oracle, False, "nothing"), tried, [1, 2], grown)[0]


@pytest.mark.wide
def test_a_worker_that_dies_is_counted_and_replaced(
    subjects: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(subjects, adapter=False)
    try:
        first = process.process.pid
        process.process.kill()
        process.process.wait()
        lost = process.run(1, 0, Subject.FOLDER)
        assert isinstance(lost, Result) and lost.outcome == "BUG"
        assert process.process.pid != first
        assert process.run(1, 0, Subject.FOLDER).outcome in ("refused", "same", "other")
    finally:
        process.close()
