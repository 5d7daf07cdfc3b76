"""Changed bundles for the C++ host, built with sanitizers: ``python -m tests.fuzz.host --seed 1
--count 10000``.

Most changes are to the manifest. A case must be refused in one line or decode as before (see
``mutator.Oracle``); a report of a sanitizer, another exit code, a hang, or a bundle that Python
refuses and the host does not is a bug.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from ssdevice.bundle.folder import Bundle
from ssdevice.errors import BundleError
from tests.apps.cpp_host.build import host
from tests.fuzz import files, json_values, mutator
from tests.fuzz.mutator import MANIFEST, Oracle
from tests.fuzz.worker import MAX_LINE, Result
from tests.runtime.tiny_bundle import tiny_bundle

OF_ONNX_RUNTIME = (
    ("AddressSanitizer: allocator is out of memory", "libonnxruntime"),
    ("/gcc-toolset-", "Assertion '"),
)
"""What ends the process inside ONNX Runtime: a size that it cannot allocate, an error without the
sanitizer, and assertions of the compiler that its releases are built with, where it infers shapes
from sizes near 2**31.
"""
TIMEOUT_S = 300
"""Sanitizers make a manifest of a megabyte take seconds, and other work on the machine takes
more.
"""
PROMPT = "1 2 3\n"


def change(seed: int, index: int, folder: Path) -> tuple[Oracle, str]:
    """Put case ``index`` at ``folder``, which does not exist; what may come of it, and what was
    done.
    """
    rng = Random(f"{seed}/{index}/host")
    shutil.copytree(tiny_bundle("fp32", choose=samples(index)).folder, folder)
    kind = rng.choices(["manifest", "geometry", "bytes", "folder"], [10, 3, 2, 3])[0]
    file = folder / MANIFEST
    document = json.loads(file.read_text("utf-8"))
    if kind == "folder":
        return mutator.change_folder(rng, folder)
    if kind == "bytes":
        return Oracle.ANY, rng.choice(files.CONTENT)(rng, file)
    if kind == "geometry":
        done = mutator.change_geometry(rng, document)
        file.write_text(json.dumps(document), "utf-8")
        return Oracle.ANY, done
    data, done = json_values.mutate(rng, document)
    file.write_bytes(data)
    return Oracle.ANY, done


def samples(index: int) -> bool:
    """Whether the host samples in a case, from a bundle that leaves the choice of tokens to it."""
    return index % 4 == 3


def try_case(seed: int, index: int, expected: str) -> Result:
    """What comes of a case; ``expected``: the answer of the unchanged bundle."""
    with tempfile.TemporaryDirectory(prefix="ssdevice-fuzz-") as scratch:
        folder = Path(scratch) / "bundle"
        oracle, done = change(seed, index, folder)
        outcome, detail = _judge(folder, oracle, expected, samples(index))
    return Result(seed, index, "host", outcome, detail.replace(scratch, ""), done, 0.0, 0.0)


def _judge(folder: Path, oracle: Oracle, expected: str, sampled: bool) -> tuple[str, str]:
    try:
        code, said, error = answer(folder, sampled)
    except subprocess.TimeoutExpired:
        return "BUG", f"hang: no answer in {TIMEOUT_S} s"
    if (
        code == 2
        and not said
        and error.count("\n") == 1
        and error.isascii()
        and len(error) <= MAX_LINE
    ):
        return "refused", error.strip()
    for report in OF_ONNX_RUNTIME:
        if all(part in error for part in report):
            return "ended by ONNX Runtime", ""
    if code:
        return "BUG", f"exit code {code}: {said[:100]} {error[:1000]}"
    try:
        Bundle.open(folder)
    except BundleError as problem:
        return "BUG", f"accepted, where Python says: {problem}"
    if said == expected:
        return "same", ""
    return (
        ("other", "")
        if oracle is Oracle.ANY
        else ("BUG", f"tokens: {said[:300]}, expected {expected}")
    )


def answer(folder: Path, sampled: bool) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the host for one prompt."""
    command = [str(host()), str(folder), "--threads", "1", "--max-tokens", "8", "--no-kernels"]
    command += ["--temperature", "0.9", "--top-p", "0.95"] * sampled
    done = subprocess.run(
        command,
        input=PROMPT,
        capture_output=True,
        text=True,
        errors="backslashreplace",
        timeout=TIMEOUT_S,
    )
    return done.returncode, done.stdout, done.stderr


def run_cases(seed: int, indices: Iterable[int], workers: int) -> list[Result]:
    """Try cases, so many at a time."""
    expected = {}
    for sampled in (False, True):
        code, expected[sampled], error = answer(tiny_bundle("fp32", choose=sampled).folder, sampled)
        assert code == 0, error
    with ThreadPoolExecutor(workers) as pool:
        return list(
            pool.map(lambda index: try_case(seed, index, expected[samples(index)]), indices)
        )


def main() -> int:
    """Run, print counts and bugs; the exit code is 1 if there is a bug."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.host", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--only", type=int, help="the index of one case to show")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    indices = range(options.count) if options.only is None else [options.only]
    results = run_cases(options.seed, indices, options.workers)
    for result in results:
        if result.outcome == "BUG" or options.only is not None:
            print(f"{result.index}: {result.done}: {result.outcome} {result.detail}")
    print(f"C++ host, seed {options.seed}: {dict(Counter(result.outcome for result in results))}")
    return int(any(result.outcome == "BUG" for result in results))


if __name__ == "__main__":
    sys.exit(main())
