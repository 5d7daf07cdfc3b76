"""Processes in which grammars are compiled and followed: none of them can end this one, take its
memory, or hold it up for longer than it allows.
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from math import inf
from pathlib import Path
from threading import RLock, Timer
from time import monotonic
from typing import Any
from weakref import WeakSet, finalize

from ssdevice.errors import InputError
from ssdevice.runtime.sampling.grammar_tokens import Spelled
from ssdevice.runtime.sampling.matching import KEPT, OUT_OF_MEMORY, GrammarError

PROGRAM = Path(__file__).with_name("matching.py")
IDLE = 2
"""Processes that are kept for the next answers, with what they compiled."""
KEPT_BYTES = 1 << 26
"""Of grammars in an idle process; one that has taken more is ended, which gives its memory back."""


@dataclass(frozen=True)
class Allowance:
    """What an answer's grammar may take.

    ``seconds``: of processor time, each token adds some; ``memory``: bytes beside interpreter and
    tokenizer. ``wait``: seconds for one reply, where the system cannot limit processor time;
    elsewhere a busy machine may take longer.
    """

    seconds: float = 2.0
    memory: int = 1 << 28
    wait: float = inf if hasattr(signal, "setitimer") else 20.0


class _Ended(Exception):
    """The process ended, and why. ``late``: because the time was over."""

    def __init__(self, reason: str, late: bool) -> None:
        super().__init__(reason)
        self.late = late


class _Process:
    """One process.

    ``grown``: bytes that it took for grammars. ``known``: hashes of those that it has compiled
    lately, most of which it still has.
    """

    def __init__(
        self,
        tokenizer_json: bytes,
        vocab: int,
        stops: list[int],
        spelled: Spelled,
        allowance: Allowance,
    ) -> None:
        self.allowance = allowance
        self.known: dict[int, None] = {}
        self.grown = 0
        # -P: an llguidance.py in the current folder is none of ours.
        command = [
            *(sys.executable, "-P", str(PROGRAM)),
            *(str(allowance.seconds), str(allowance.memory)),
        ]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
                # One arena: each reserves addresses, which count where memory is limited.
                env={**os.environ, "MALLOC_ARENA_MAX": "1"},
            )
        except OSError as error:
            raise InputError(
                f"structures need {command[0]!r}, which cannot be started: {error}"
            ) from error
        head = {"bytes": len(tokenizer_json), "vocab": vocab, "stops": stops, "spelled": spelled}
        try:
            self._exchange(json.dumps(head).encode() + b"\n" + tokenizer_json)
        except GrammarError as error:
            self.end()
            raise InputError(f"no structures with this tokenizer: {error}") from error
        except _Ended as error:
            raise InputError(
                f"the process that compiles structures ended when it began: {error}"
            ) from error

    def ask(self, name: str, argument: Any = None) -> Any:
        """The reply to a request, see ``matching``. Raises GrammarError, _Ended."""
        return self._exchange(json.dumps([name, argument]).encode() + b"\n", name == "mask")

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _exchange(self, request: bytes, mask: bool = False) -> Any:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        begun = monotonic()
        timer = None
        if self.allowance.wait < inf:
            timer = Timer(self.allowance.wait, process.kill)
            timer.start()
        try:
            process.stdin.write(request)
            process.stdin.flush()
            line = process.stdout.readline()
            if line.endswith(b"\n"):
                reply = json.loads(line)
                if "reason" in reply:
                    raise GrammarError(reply["reason"])
                value = reply["value"]
                return process.stdout.read(value) if mask else value
        except OSError:  # it ended
            pass
        except GrammarError:
            raise
        except BaseException:
            self.end()  # a reply that nobody waits for would be taken for the next one
            raise
        finally:
            if timer is not None:
                timer.cancel()
        code = process.wait()
        self.end()
        raise self._ending(code, monotonic() - begun)

    def _ending(self, code: int, seconds: float) -> _Ended:
        allowed = self.allowance
        if seconds >= allowed.wait:
            return _Ended(f"it takes more than the {allowed.wait:g} s that it is allowed", True)
        if code == -getattr(signal, "SIGPROF", 0):
            return _Ended(
                f"it takes more than the {allowed.seconds:g} s of processor time allowed", True
            )
        if code in (-signal.SIGABRT, OUT_OF_MEMORY):  # so Rust ends where memory is refused
            return _Ended(
                f"it takes more than the {allowed.memory >> 20} MB of memory allowed", False
            )
        return _Ended(f"it broke the process that compiles it (exit code {code})", False)


class Processes:
    """The processes for one tokenizer, see ``matching.tokens_of``: each serves one answer at a
    time.
    """

    def __init__(
        self,
        tokenizer_json: bytes,
        vocab: int,
        stops: list[int],
        spelled: Spelled = None,
        allowance: Allowance | None = None,
    ) -> None:
        self._given = (tokenizer_json, vocab, stops, spelled)
        self.allowance = allowance or Allowance()
        self._lock = RLock()  # a collected answer gives its process back in any thread
        self._idle: list[_Process] = []
        _all.add(self)
        finalize(self, _end_all, self._idle)

    def open(self, kind: str, source: str) -> "Remote":
        """A grammar at the beginning of an answer, see ``matching.compiled``.

        Raises GrammarError, and InputError where no process can be started.
        """
        key = hash((kind, source))
        process = self._taken(key)
        try:
            return self._opened(process, kind, source)
        except _Ended as error:
            if error.late or not process.known:
                raise GrammarError(str(error)) from error
        # Perhaps the grammars that the process had left too little memory.
        try:
            return self._opened(self._started(), kind, source)
        except _Ended as error:
            raise GrammarError(str(error)) from error

    def _opened(self, process: _Process, kind: str, source: str) -> "Remote":
        try:
            process.grown = process.ask("open", (kind, source))
        except GrammarError:
            self.settle(process)
            raise
        key = hash((kind, source))
        process.known.pop(key, None)
        process.known[key] = None
        if len(process.known) > KEPT:
            del process.known[next(iter(process.known))]
        return Remote(self, process)

    def _taken(self, key: int) -> _Process:
        """A process that nobody uses: one that has compiled this already, or the one with least to
        lose.
        """
        with self._lock:
            for process in self._idle:
                if key in process.known:
                    self._idle.remove(process)
                    return process
            if self._idle:
                process = min(self._idle, key=lambda each: len(each.known))
                self._idle.remove(process)
                return process
        return self._started()

    def _started(self) -> _Process:
        # A frozen app (PyInstaller) has no interpreter: sys.executable is the app, which would
        # start itself again.
        if getattr(sys, "frozen", False) or not sys.executable or not PROGRAM.is_file():
            raise InputError(
                "this structure is compiled by an interpreter of Python, which this app does not "
                "have: use a small JSON schema without patterns"
            )
        return _Process(*self._given, self.allowance)

    def settle(self, process: _Process) -> None:
        """Keep a process whose answer has ended for the next one, or end it."""
        try:
            process.grown = process.ask("close")
        except _Ended:
            return
        with self._lock:
            if len(self._idle) < IDLE and process.grown <= KEPT_BYTES:
                self._idle.append(process)
                return
        process.end()

    def end_idle(self) -> None:
        """End the processes that no answer has."""
        with self._lock:
            ended = [*self._idle]
            self._idle.clear()
        _end_all(ended)

    def forked(self) -> None:
        """In a child, which must not talk to its parent's processes, nor wait for a lock that no
        thread of its own holds.
        """
        self._lock = RLock()
        self._idle.clear()


class Remote:
    """``matching.Matching`` in another process, which this answer has until it is closed."""

    def __init__(self, processes: Processes, process: _Process) -> None:
        self._process: _Process | None = process
        self._owner = os.getpid()
        self._return = finalize(self, _return, processes, process, self._owner)

    def mask(self) -> bytes:
        bits: bytes = self._ask("mask")
        return bits

    def accept(self, token: int) -> None:
        self._ask("accept", token)

    def allows(self, token: int) -> bool:
        return bool(self._ask("allows", token))

    def forced(self) -> list[int]:
        tokens: list[int] = self._ask("forced")
        return tokens

    def close(self) -> None:
        self._process = None
        self._return()

    def _ask(self, name: str, argument: Any = None) -> Any:
        if self._process is None or self._owner != os.getpid():
            raise GrammarError("its answer has ended")
        try:
            return self._process.ask(name, argument)
        except _Ended as error:
            self._process = None
            self._return.detach()
            raise GrammarError(str(error)) from error
        except GrammarError:
            raise
        except BaseException:
            self._process = None
            self._return.detach()
            raise


_all: "WeakSet[Processes]" = WeakSet()


def _return(processes: Processes, process: _Process, owner: int) -> None:
    """When an answer has ended."""
    if owner == os.getpid():
        processes.settle(process)


def _end_all(idle: list[_Process]) -> None:
    for process in idle:
        process.end()


def _forked() -> None:
    for processes in list(_all):
        processes.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
