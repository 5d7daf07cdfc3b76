"""Hostile graphs for the kernels, under AddressSanitizer and UBSan: ``python -m
tests.fuzz.operators --count 10000``.

A process tries one graph after the other (operator_graphs.py). Each must be refused by ONNX Runtime
or give outputs; a report of a sanitizer, the end of the process or a minute without an answer is a
bug.
"""

from __future__ import annotations

import argparse
import os
import select
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

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


def answer(library: str, seed: int, first: int, end: int) -> None:
    """Try cases and print a line for each: what runs in the process of its own."""
    import onnxruntime as ort

    from tests.fuzz.operator_graphs import hostile

    ort.set_default_logger_severity(4)
    for index in range(first, end):
        node = hostile(seed, index)
        outcome = "ran"
        try:
            model = node.model()
        except Exception as error:  # onnx refuses to write some
            print(f"unwritten {error}".split("\n")[0], flush=True)
            continue
        try:
            options = ort.SessionOptions()
            options.intra_op_num_threads = 1
            options.register_custom_ops_library(library)
            session = ort.InferenceSession(model, options)
            feeds = node.feeds()
            for fill in (None, np.nan, np.inf):
                for name, array in feeds.items():
                    if fill is not None and array.dtype.kind == "f":
                        feeds[name] = np.full_like(array, fill)
                for output in session.run(None, feeds):
                    np.asarray(output).tobytes()
        except Exception as error:  # the bindings derive their errors from Exception itself
            outcome = f"refused {error}".split("\n")[0]
        print(outcome, flush=True)


def run(seed: int, first: int, end: int) -> tuple[Counter[str], dict[int, str]]:
    """Outcomes of cases and how often each came, and the bugs by index."""
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
            command = [
                sys.executable,
                "-m",
                __spec__.name,
                "--library",
                str(library),
                "--seed",
                str(seed),
            ]
            child = subprocess.Popen(
                [*command, "--first", str(first), "--count", str(end - first)],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=said,
                bufsize=0,
            )
            assert child.stdout is not None
            with child, child.stdout as lines:
                while first < end:
                    late = not select.select([lines], [], [], TIMEOUT_S)[0]
                    line = b"" if late else lines.readline()
                    if not line:
                        child.kill()
                        said.seek(0)
                        text = said.read().decode("utf-8", "replace")
                        at = max(
                            text.find("ERROR: AddressSanitizer"), text.find("runtime error"), 0
                        )
                        bugs[first] = (
                            "hang" if late else f"ended with {child.wait()}: {text[at:][:1500]}"
                        )
                    outcomes[line.decode().split(" ")[0].strip() or "BUG"] += 1
                    first += 1
                    if not line:
                        break
    return outcomes, bugs


def main() -> int:
    """Run, print counts and bugs; the exit code is 1 if there is a bug."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.operators", description=__doc__)
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
        print(
            "tests.fuzz.operators: needs GCC with AddressSanitizer, nothing is tested",
            file=sys.stderr,
        )
        return 0
    outcomes, bugs = run(options.seed, options.first, end)
    for index, bug in bugs.items():
        print(f"case {index}: {bug}")
    print(
        f"operators, seed {options.seed}, {options.count} cases: "
        + ", ".join(f"{n} {c}" for n, c in outcomes.items())
    )
    return int(bool(bugs))


if __name__ == "__main__":
    sys.exit(main())
