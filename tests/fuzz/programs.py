"""Changed ExecuTorch programs, each in a child process: ``python -m tests.fuzz.programs --seed 1
--count 10000``.

Changes are to the header and the flatbuffer, not to weights. A refusal in one line is right, and so
is any answer; any other exception, the end of the process or a hang is a bug.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import signal
import struct
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

from ssdevice.bundle.folder import Bundle
from ssdevice.errors import SSDeviceError
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.executorch.engine import PROGRAM, ExecutorchEngine
from ssdevice.runtime.executorch.program import OPERATORS
from tests import once
from tests.export.executorch import programs
from tests.fuzz.worker import Result

TIMEOUT_S = 60
WORDS = (0, 1, 2, 3, 255, 256, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
REFUSED = 2
RAISED = 3


def mutate(rng: Random, data: bytes) -> tuple[bytes, str]:
    """A program with one to four changes before its segments, and what was done."""
    (size,) = struct.unpack_from("<Q", data, 16)
    changed = bytearray(data)
    notes = []
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(size)
        kind = rng.choices(["byte", "bit", "word", "cut"], [4, 2, 3, 1])[0]
        notes.append(f"{kind} at {at}")
        if kind == "byte":
            changed[at] = rng.randrange(256)
        elif kind == "bit":
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == "word":
            struct.pack_into(
                "<I", changed, at // 4 * 4, rng.choice([*WORDS, rng.randrange(1 << 32)])
            )
        else:
            del changed[rng.choice([at, len(data) - at]) :]
            changed += bytes(max(0, size - len(changed)))
    return bytes(changed), ", ".join(notes)


def run_cases(seed: int, indices: Iterable[int]) -> Iterator[Result]:
    """Try cases one after the other.

    Nothing of ExecuTorch may have run in this process: its threads are not forked.
    """
    importlib.import_module("executorch.runtime")
    importlib.import_module(OPERATORS)
    bundle = programs.choosing()
    data = bundle.file(PROGRAM).read_bytes()
    with tempfile.TemporaryDirectory(prefix="ssdevice-fuzz-") as scratch:
        for index in indices:
            changed, done = mutate(Random(f"{seed}/{index}/program"), data)
            file = Path(scratch) / "model.pte"
            said = Path(scratch) / "said"
            file.write_bytes(changed)
            sys.stdout.flush()
            child = os.fork()
            if not child:
                _decode(bundle, file, said)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            outcome = {0: "decoded", REFUSED: "refused"}.get(code, "BUG")
            detail = said.read_text("utf-8", "replace")[-300:] if outcome == "BUG" else ""
            ended = f"{signal.Signals(-code).name}: " if code < 0 else ""
            yield Result(seed, index, "program", outcome, ended + detail, done, 0.0, 0.0)


def _decode(bundle: Bundle, file: Path, said: Path) -> None:
    """Load the program and call its functions; ends this process."""
    handle = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    signal.alarm(TIMEOUT_S)
    code = 0
    try:
        engine = ExecutorchEngine(
            file, bundle.geometry, list(bundle.functions), EngineOptions(threads=1)
        )
        conversation = engine.new_conversation()
        root = conversation.prefill([7, 21, 3, 44])
        conversation.length = 4
        root = conversation.step_plain(root)
        conversation.length += 1
        tokens = conversation.step(root)
        conversation.length += len(tokens)
        conversation.chooser = lambda logits: int(logits.argmax())
        tokens = conversation.step(tokens[-1])
        conversation.length += len(tokens)
        conversation.step_plain(tokens[-1])
    except SSDeviceError as error:
        code = RAISED if "\n" in str(error) else REFUSED
    except BaseException:
        traceback.print_exc()
        code = RAISED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> int:
    """Run, print counts and bugs; the exit code is 1 if there is a bug."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.programs", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=10_000)
    options = parser.parse_args()
    os.environ[once.VARIABLE] = str(once.folder())
    export = multiprocessing.get_context("spawn").Process(
        target=programs.choosing
    )  # it runs what it exports
    export.start()
    export.join()
    counts = Counter[str]()
    for result in run_cases(options.seed, range(options.count)):
        counts[result.outcome] += 1
        if result.outcome == "BUG":
            print(f"{result.index}: {result.done}: {result.detail!r}", flush=True)
    print(f"ExecuTorch programs, seed {options.seed}: {dict(counts)}")
    return int("BUG" in counts)


if __name__ == "__main__":
    sys.exit(main())
