"""Workers in processes of their own, so that a case that hangs or kills its process is seen,
counted and gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.fuzz.mutator import Subject
from tests.fuzz.worker import Result

TIMEOUT_S = 60.0
"""No case that does what it should takes a second; a machine that does other things too may take
tens of them.
"""
START_S = 300.0
ROOT = Path(__file__).resolve().parents[2]


class Lost(Exception):
    """A worker hung or died; says which."""


class Process:
    """One worker and its scratch folder."""

    def __init__(self, pristine: Path, adapter: bool) -> None:
        self.arguments = [str(pristine), "adapter" if adapter else "bundle"]
        self._start()

    def _start(self) -> None:
        self.scratch = tempfile.TemporaryDirectory(prefix="ssdevice-fuzz-")
        place, kind = self.arguments
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.worker", place, self.scratch.name, kind],
            cwd=ROOT,
            env={**environment, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._answer(START_S)

    def run(self, seed: int, index: int, subject: Subject) -> Result:
        """Try a case; a worker that is lost by it is replaced."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(
                (json.dumps({"seed": seed, "index": index, "subject": subject}) + "\n").encode()
            )
            self.process.stdin.flush()
            return Result(**self._answer(TIMEOUT_S))
        except (Lost, BrokenPipeError) as error:
            files = [Path(self.scratch.name) / name for name in ("err", "done")]
            said, done = (
                file.read_text("utf-8", "replace")[-400:] if file.exists() else "" for file in files
            )
            self.close()
            self._start()
            return Result(
                seed, index, subject.value, "BUG", f"{error}: {said}", done, 0.0, TIMEOUT_S
            )

    def _answer(self, seconds: float) -> dict[str, Any]:
        stream = self.process.stdout
        assert stream is not None
        if not select.select([stream], [], [], seconds)[0]:
            self.process.kill()
            raise Lost(f"hang: no answer in {seconds:.0f} s")
        line = stream.readline()  # workers write whole lines
        if not line:
            code = self.process.wait()
            if code < 0:
                raise Lost(f"crash: {signal.Signals(-code).name}")
            raise Lost(f"crash: the worker ended with {code}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the worker and remove its folder."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.scratch.cleanup()


def subject_of(index: int) -> Subject:
    """Which subject a case is of."""
    order = ("folder", "slots", "adapter", "folder", "slots", "signed")
    return Subject(order[index % len(order)])


def run_cases(
    pristine: Path,
    seed: int,
    indices: Iterable[int],
    bundle_workers: int,
    tell: Callable[[Result], None],
) -> list[Result]:
    """Try cases on ``bundle_workers`` processes, and those of adapters on one more; ``tell`` is
    called after each.
    """
    waiting: dict[bool, queue.SimpleQueue[int]] = {
        False: queue.SimpleQueue(),
        True: queue.SimpleQueue(),
    }
    for index in indices:
        adapter = subject_of(index) is Subject.ADAPTER
        waiting[adapter].put(index)
    results: list[Result] = []
    failures: list[BaseException] = []

    def work(adapter: bool) -> None:
        try:
            if waiting[adapter].empty():
                return
            process = Process(pristine, adapter)
            try:
                while not failures:
                    index = waiting[adapter].get_nowait()
                    result = process.run(seed, index, subject_of(index))
                    results.append(result)
                    tell(result)
            except queue.Empty:
                pass
            finally:
                process.close()
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=work, args=(adapter,))
        for adapter in [True, *[False] * bundle_workers]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return sorted(results, key=lambda result: result.index)
