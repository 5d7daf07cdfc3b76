"""A process that tries cases one after the other: ``python -m tests.fuzz.worker PRISTINE SCRATCH
bundle|adapter``.

It reads ``{"seed":, "index":, "subject":}`` lines and answers each with one line of JSON. A case
runs through the command line's own entry, with both standard streams kept, so that what native code
prints is seen too. The pool that started it (pool.py) sees hangs and deaths.

Memory: a case may raise the resident size by at most MAX_GROWTH_MB at its peak, and the address
space of the process is limited to ADDRESS_SPACE_MB more than it has when it starts, so that nothing
can take the machine with it.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import shutil
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from tests.fuzz.mutator import Case, Oracle, Subject, change
from tests.fuzz.pristine import SLOT_APP

MAX_GROWTH_MB = 256
ADDRESS_SPACE_MB = 3072
MAX_LINE = 1500
PROMPT = "abc def"
MAX_TOKENS = 12


@dataclass(frozen=True)
class Result:
    """What came of a case: ``refused``, ``same``, ``other`` tokens (allowed), or ``BUG``, of which
    ``detail`` tells.
    """

    seed: int
    index: int
    subject: str
    outcome: str
    detail: str
    done: str
    peak_mb: float
    seconds: float


@dataclass(frozen=True)
class Tried:
    """One call: its exit code, the tokens on standard output, all of standard error, and a
    traceback if it raised.
    """

    code: int
    tokens: list[int] | None
    error: str
    raised: str = ""


class Worker:
    """Pristine subjects, the scratch folder, and the tokens that an unchanged subject gives."""

    def __init__(self, pristine: Path, scratch: Path, adapter: bool) -> None:
        self.pristine = pristine
        self.scratch = scratch
        self.files = [
            os.open(scratch / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC) for name in ("out", "err")
        ]
        for number, handle in enumerate(self.files, 1):
            os.dup2(handle, number)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
        if adapter:
            _quiet_torch()
            self.expected = {(Subject.ADAPTER, False): self._adapter(pristine / "adapter").tokens}
        else:
            self.expected = {}
            for plain in (False, True):
                whole = self._bundle(pristine / "bundle", plain).tokens
                self.expected |= {(s, plain): whole for s in (Subject.FOLDER, Subject.SIGNED)}
                self.expected[Subject.SLOTS, plain] = self._bundle(
                    pristine / "slots", plain, app=SLOT_APP
                ).tokens
        assert all(self.expected.values()), "an unchanged subject does not decode"
        gc.collect()
        # before each case there is a search for garbage, which need not go over all modules
        gc.freeze()
        limit = _status("VmSize") * 1024 + (ADDRESS_SPACE_MB << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def run(self, seed: int, index: int, subject: Subject) -> Result:
        """Try one case."""
        place = self.scratch / "case"
        shutil.rmtree(place, ignore_errors=True)
        case = change(seed, index, subject, self.pristine, place)
        (self.scratch / "done").write_text(
            case.done, "utf-8"
        )  # for the pool, should this process end here
        gc.collect()
        before = _reset_peak()
        clock = perf_counter()
        tried = self._try(case, place)
        seconds = perf_counter() - clock
        grown = (_status("VmHWM") - before) / 1024
        outcome, detail = judge(case, tried, self.expected[case.subject, case.plain], grown)
        detail = detail.replace(str(place), "")
        return Result(
            seed,
            index,
            subject.value,
            outcome,
            detail,
            case.done,
            round(grown, 1),
            round(seconds, 3),
        )

    def _try(self, case: Case, place: Path) -> Tried:
        if case.subject is Subject.ADAPTER:
            return self._adapter(place / "adapter")
        signed = case.subject is Subject.SIGNED
        app = SLOT_APP if case.subject is Subject.SLOTS else None
        return self._bundle(
            place / "bundle", case.plain, self.pristine / "public.pem" if signed else None, app
        )

    def _bundle(
        self, folder: Path, plain: bool, key: Path | None = None, app: str | None = None
    ) -> Tried:
        options = [
            *(["--app", app] if app else []),
            *(["--no-speculate"] if plain else []),
            *(["--require-signature", str(key)] if key else []),
        ]
        fixed = [
            "--prompt",
            PROMPT,
            "--max-tokens",
            str(MAX_TOKENS),
            "--threads",
            "1",
            "--json",
            "--quiet",
        ]
        return self._call(["run", str(folder), *fixed, *options])

    def _call(self, arguments: list[str]) -> Tried:
        from ssdevice.cli import main

        return self._captured(lambda: main(arguments))

    def _adapter(self, folder: Path) -> Tried:
        """Load an adapter as ``export`` does, and print what the reference decodes with it."""

        def decode() -> int:
            from ssdevice.cli import one_line
            from ssdevice.errors import SSDeviceError
            from tests.fuzz.reference_tokens import tokens

            try:
                print(json.dumps({"tokens": tokens(self.pristine / "base", folder)}))
            except SSDeviceError as error:  # as ssdevice.cli prints it
                print(f"ssdevice: error: {one_line(str(error))}", file=sys.stderr)
                return error.exit_code
            return 0

        return self._captured(decode)

    def _captured(self, call: Callable[[], int]) -> Tried:
        sys.stdout.flush()
        sys.stderr.flush()
        for handle in self.files:
            os.ftruncate(handle, 0)
            os.lseek(handle, 0, os.SEEK_SET)
        raised = ""
        try:
            code = call()
        except (
            BaseException
        ):  # what the rest of Python calls an exit, and Rust's panics, are bugs as well here
            code = -1
            raised = traceback.format_exc(limit=-6)
        sys.stdout.flush()
        sys.stderr.flush()
        out, err = (
            os.pread(handle, 1 << 20, 0).decode("utf-8", "replace") for handle in self.files
        )
        try:
            tokens = json.loads(out)["tokens"] if code == 0 else None
        except (ValueError, KeyError):
            tokens = None
        return Tried(code, tokens, err, raised)


def judge(case: Case, tried: Tried, expected: list[int] | None, grown_mb: float) -> tuple[str, str]:
    """Outcome and detail of a case by its oracle; see mutator.py."""
    if tried.raised:
        return "BUG", f"traceback: {tried.raised}"
    if grown_mb > MAX_GROWTH_MB:
        return "BUG", f"memory: {grown_mb:.0f} MB, bound {MAX_GROWTH_MB}"
    if tried.code == 0:
        if tried.tokens is None:
            return "BUG", "output: no line of JSON with tokens"
        if case.oracle is Oracle.REFUSE:
            return "BUG", f"accepted: {case.done}"
        if tried.tokens == expected:
            return "same", ""
        return (
            ("other", "")
            if case.oracle is Oracle.ANY
            else ("BUG", f"tokens: {tried.tokens}, expected {expected}")
        )
    lines = tried.error.splitlines()
    if tried.code != 2:
        return "BUG", f"exit code {tried.code}: {tried.error[:300]}"
    if len(lines) != 1 or not lines[0].startswith("ssdevice: error: ") or len(lines[0]) > MAX_LINE:
        return "BUG", f"not one line: {tried.error[:600]}"
    if not lines[0].isprintable():
        return "BUG", f"not printable: {ascii(lines[0])[:300]}"
    return "refused", lines[0].removeprefix("ssdevice: error: ")


def _quiet_torch() -> None:
    """One thread; no progress bars and warnings, which would hide whether the error is one line."""
    import warnings

    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")


def _status(key: str) -> int:
    """A value of /proc/self/status in kB."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1])
    raise KeyError(key)


def _reset_peak() -> int:
    """Make VmHWM start again from the present size, which is returned in kB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def main() -> None:
    """Answer cases until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    worker = Worker(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "adapter")
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        result = worker.run(asked["seed"], asked["index"], Subject(asked["subject"]))
        print(json.dumps(asdict(result)), file=answers, flush=True)


if __name__ == "__main__":
    main()
