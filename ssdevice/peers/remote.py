"""The side of a worker that measures: it starts the process, asks it, and says what went wrong."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import ssdevice
from ssdevice.bench.runner import Measured
from ssdevice.errors import SSDeviceError
from ssdevice.peers.arm import Arm, Json, UnavailableError
from ssdevice.runtime.generation import Generation

# The interpreter may be another one, which does not know this package. Once the package is loaded,
# the folder that holds it is taken off the path again: the packages beside it are not for that
# interpreter.
START = """
import sys
sys.path.insert(0, sys.argv[1])
from ssdevice.peers.worker import main
del sys.path[0]
main()
"""
SETTLE_SECONDS = 0.1
"""Pause before an answer.

In this time the threads of the engine before stop to wait busily for more work.
"""


class Worker:
    """Context manager: an arm's engine in a process of its own, and what was ``measured`` of it.

    ``version``, ``weights``: see ``Engine``. ``resident_mb``: MB (10⁶ bytes) of memory after the
    last answer; ``peak_mb``: at its most. Raises UnavailableError if the arm cannot be opened,
    SSDeviceError if it fails later.
    """

    def __init__(self, arm: Arm) -> None:
        self.arm = arm
        self.measured = Measured(arm.name)
        self.resident_mb = 0.0
        self.peak_mb = 0.0
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  closed by close
        root = str(Path(ssdevice.__file__).resolve().parents[1])
        try:
            self._process = subprocess.Popen(
                [arm.python, "-P", "-c", START, root],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                encoding="utf-8",
            )
        except OSError as error:
            self._log.close()
            raise UnavailableError(
                f"{arm.python} cannot be started ({error.strerror or error})"
            ) from error
        try:
            opened = self._ask({"module": arm.module, "settings": arm.settings})
            if "missing" in opened:
                raise UnavailableError(f"{opened['missing']} is not installed for {arm.python}")
        except SSDeviceError as error:
            self.close()
            raise UnavailableError(str(error)) from error
        self.version = str(opened["version"])
        self.weights = str(opened["weights"])

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Generation:
        """The answer to a prompt; its times are the worker's own."""
        import psutil

        found = self._ask({"prompt": list(prompt), "max_tokens": max_tokens})
        self.peak_mb = found.pop("peak_mb")
        self.resident_mb = float(psutil.Process(self.pid).memory_info().rss) / 1e6
        return Generation(len(prompt), **found)

    def _ask(self, request: Json) -> Json:
        """The process's reply; raises SSDeviceError for an error in it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended; reading says so
            print(json.dumps(request), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        reply: Json = json.loads(line) if line else {"error": self._last_words()}
        if "error" in reply:
            raise SSDeviceError(f"{self.arm.name}: {reply['error']}")
        return reply

    def _last_words(self) -> str:
        """How a process ended, which is waited for."""
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        if not lines:
            return f"its process ended with code {code}"
        return f"its process ended with code {code}: {lines[-1]}"

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._process.kill()  # it may be in the middle of a long answer
        self.close()
