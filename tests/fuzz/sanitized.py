"""Cases for compiled code, tried one after another in a process of their own, with AddressSanitizer
and UBSan.

A module of cases calls ``main`` with its ``answer``, which tries cases and prints a line for each:
the first word is the outcome, and ``BUG`` is one that no case may have. A report of a sanitizer,
the end of the process or a minute without an answer is a bug as well; the cases after it go on in a
new process.
"""

from __future__ import annotations

import argparse
import os
import select
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import IO

from tests.compiled_kernels import preloaded, sanitized

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60
OPTIONS = {
    # Python leaks; without memory an allocation fails, as it does elsewhere.
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=512",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "OMP_NUM_THREADS": "1",
    "PYTHONMALLOC": "malloc",
}
Answer = Callable[[str, int, int, int], None]
"""``(library, seed, first, end)``: tries cases of a seed with the sanitized library in a file."""


def run(module: str, seed: int, first: int, end: int) -> tuple[Counter[str], dict[int, str]]:
    """Outcomes of a module's cases and how often each came, and the bugs by index."""
    library = sanitized()
    outcomes = Counter[str]()
    bugs = dict[int, str]()
    environment = {
        **os.environ,
        **OPTIONS,
        "LD_PRELOAD": preloaded() or "",
        "PYTHONPATH": str(ROOT),
    }
    while first < end:
        with tempfile.TemporaryFile() as said:
            command = [sys.executable, "-m", module, "--library", str(library)]
            command += ["--seed", str(seed), "--first", str(first), "--count", str(end - first)]
            child = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=said, bufsize=0
            )
            assert child.stdout is not None
            with child, child.stdout as lines:
                while first < end:
                    late = not select.select([lines], [], [], TIMEOUT_S)[0]
                    line = "" if late else lines.readline().decode().strip()
                    if not line:
                        child.kill()
                        bugs[first] = "hang" if late else f"ended with {child.wait()}: {told(said)}"
                    elif line.startswith("BUG"):
                        bugs[first] = line
                    outcomes[line.split(" ")[0] or "BUG"] += 1
                    first += 1
                    if not line:
                        break
    return outcomes, bugs


def told(said: IO[bytes]) -> str:
    """What a sanitizer reported, or else how the output begins."""
    said.seek(0)
    text = said.read().decode("utf-8", "replace")
    at = max(text.find("ERROR: AddressSanitizer"), text.find("runtime error"), 0)
    return text[at:][:1500]


def main(module: str, what: str, answer: Answer) -> int:
    """The command line of a module: run, print counts and bugs; the exit code is 1 if there are
    bugs.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--library", help=argparse.SUPPRESS)
    options = parser.parse_args()
    end = options.first + options.count
    if options.library:
        answer(options.library, options.seed, options.first, end)
        return 0
    if preloaded() is None:
        print(f"{module}: needs GCC with AddressSanitizer, nothing is tested", file=sys.stderr)
        return 0
    outcomes, bugs = run(module, options.seed, options.first, end)
    for index, bug in bugs.items():
        print(f"case {index}: {bug}")
    counts = ", ".join(f"{name} {count}" for name, count in outcomes.items())
    print(f"{what}, seed {options.seed}, {options.count} cases: {counts}")
    return int(bool(bugs))
