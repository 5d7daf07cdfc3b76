"""Renders chat templates in a process of its own that is killed when a template takes too long or
too much.
"""

import json
import os
import signal
import subprocess
import sys
from math import inf
from pathlib import Path
from threading import Lock, Timer
from time import monotonic
from typing import Any
from weakref import WeakSet

from ssdevice.errors import ConfigError

SECONDS = 5.0
"""Of processor time for one request: many times what a prompt of a million tokens takes."""
MEMORY = 1 << 29
"""Bytes of address space."""
WAIT = inf if hasattr(signal, "setitimer") else 20.0
"""Seconds until the process is killed where processor time has no limit; elsewhere a busy machine
may take longer.
"""
PROGRAM = Path(__file__).with_name("chat_environment.py")
_all: "WeakSet[Renderer]" = WeakSet()


class Renderer:
    """One process, which starts with the first request, and anew when it was killed or a template
    broke it.
    """

    def __init__(self, seconds: float = SECONDS, memory: int = MEMORY, wait: float = WAIT) -> None:
        self.seconds = seconds
        self.memory = memory
        self.wait = wait
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        _all.add(self)

    def ask(self, request: dict[str, Any]) -> Any:
        """The answer of ``chat_environment``.

        Raises ConfigError for a template that exceeds its limits.
        """
        with self._lock:
            process = self._running()
            timer = Timer(self.wait, process.kill)
            begun = monotonic()
            if self.wait < inf:
                timer.start()
            try:
                answer = _exchange(process, json.dumps(request).encode() + b"\n")
                if answer.endswith(b"\n"):
                    found = json.loads(answer)
                    if found["last"]:
                        self.close()
                    return found
                ending = process.wait()
                late = monotonic() - begun >= self.wait
            except BaseException:
                self.close()  # an answer that nobody waits for would be taken for the next one
                raise
            finally:
                timer.cancel()
            self.close()
        if ending == -getattr(signal, "SIGPROF", 0) or late:
            allowed = f"{self.wait:g} s" if late else f"{self.seconds:g} s of processor time"
            raise ConfigError(f"the chat template takes more than the {allowed} that it is allowed")
        raise ConfigError(
            f"the chat template broke the process that renders it (exit code {ending})"
        )

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            # A frozen app (PyInstaller) has no interpreter: sys.executable is the app, which would
            # start itself again.
            if getattr(sys, "frozen", False) or not sys.executable or not PROGRAM.is_file():
                raise ConfigError(
                    "chat templates are rendered by an interpreter of Python, which this app does "
                    "not have: export the bundle with a chat template that only puts texts around "
                    "messages"
                )
            # -P: a jinja2.py in the current folder is none of ours.
            command = [sys.executable, "-P", str(PROGRAM), str(self.seconds), str(self.memory)]
            window = getattr(subprocess, "CREATE_NO_WINDOW", 0)
            pipe = subprocess.PIPE
            nothing = subprocess.DEVNULL
            try:
                self._process = subprocess.Popen(
                    command, stdin=pipe, stdout=pipe, stderr=nothing, creationflags=window
                )
            except OSError as error:
                raise ConfigError(
                    f"chat templates need {command[0]!r}, which cannot be started: {error}"
                ) from error
        return self._process

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process = None


def _forked() -> None:
    """A child must not talk to its parent's process, nor wait for a lock that no thread of its own
    holds.
    """
    for renderer in list(_all):
        renderer._lock = Lock()
        renderer._process = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _exchange(process: subprocess.Popen[bytes], line: bytes) -> bytes:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
        return process.stdout.readline()
    except OSError:  # it ended
        return b""
