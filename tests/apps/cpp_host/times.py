"""``python -m tests.apps.cpp_host.times BUNDLE``: the microseconds of a choice of a token, for
every option.

``BUNDLE``: SmolLM2-135M-Instruct, exported with ``--choose host``; rows are those of the first
tokens of its answers to ``PROMPTS``. Columns: C++ (``vectors --time``) with AVX-512 and without,
Python with the kernels, and Python between two calls of the model, which empties the caches; of
each the mean and, in parentheses, the median. All but the last one are the least of five times for
the same row and seed. Everything else should rest meanwhile.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssdevice.runtime import Session
from ssdevice.runtime.sampling.choice import Chooser
from ssdevice.runtime.sampling.options import Sampling
from tests.apps.cpp_host.build import SOURCES, package
from tests.compiled_kernels import COMPILER

PROMPTS = (
    "I have a potential project that requires collaboration with a local company. "
    "Can you assist me?",
    "I'm planning to create a promotional campaign for a sustainable fashion brand. "
    "Can you help me with a plan?",
    "Can you suggest a reliable social media platform for free that offers discounted plans "
    "for college students?",
)
TOKENS = 13
POSITIONS = 10
TIMES = 5
ALL = {"top_k": 50, "top_p": 0.95, "min_p": 0.05, "typical_p": 0.9}
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}
BIAS = {"logit_bias": {5: 3.0, 77: -3.0}}
OPTIONS: tuple[Mapping[str, Any], ...] = (
    {},
    *({"temperature": t} for t in (0.7, 1.0, 1.2)),
    *({"temperature": t, "top_p": 0.95} for t in (0.7, 1.0, 1.2)),
    *({"temperature": t, "top_k": 50} for t in (0.7, 1.2)),
    *({"temperature": t, "min_p": 0.05} for t in (0.7, 1.2)),
    *({"temperature": t, "typical_p": 0.9} for t in (0.7, 1.0, 1.2)),
    {"temperature": 0.7, **PENALTIES},
    {"temperature": 0.7, **BIAS},
    {"temperature": 0.7, "logprobs": 0},
    {"temperature": 0.7, "logprobs": 5},
    {"temperature": 1.2, "top_p": 0.95, "logprobs": 5},
    {"temperature": 0.7, **ALL, **PENALTIES, **BIAS, "logprobs": 5},
)


def compiled(file: Path, *flags: str) -> Path:
    """The program with the flags of the host's CMake file."""
    given = [
        "-std=c++17",
        "-O3",
        "-ffp-contract=off",
        "-fno-math-errno",
        f"-I{SOURCES}",
        f"-I{package() / 'include'}",
    ]
    subprocess.run(
        [str(COMPILER), *given, *flags, "-o", file, Path(__file__).with_name("vectors.cpp")],
        check=True,
    )
    return file


def decoded(session: Session, sampling: Sampling) -> list[float]:
    """The microseconds of the choices of three answers."""
    times: list[float] = []
    choose = Chooser.__call__

    def timed(self: Chooser, logits: NDArray[np.float32]) -> int:
        clock = perf_counter()
        token = choose(self, logits)
        times.append((perf_counter() - clock) * 1e6)
        return token

    Chooser.__call__ = timed  # type: ignore[method-assign]
    try:
        for prompt in PROMPTS:
            list(
                session.runs(
                    session.prompt_ids(prompt), max_tokens=TOKENS, mode="plain", sampling=sampling
                )
            )
    finally:
        Chooser.__call__ = choose  # type: ignore[method-assign]
    return times


def warm(rows: Sequence[NDArray[np.float32]], sampling: Sampling, library: object) -> list[float]:
    """The microseconds of choices one after another."""
    least = np.full(len(rows) * POSITIONS, np.inf)
    for _ in range(TIMES):
        choose = Chooser(sampling, [1, 2, 3], [0], len(rows[0]), library=library)
        for at in range(len(least)):
            row = rows[at % len(rows)].copy()
            clock = perf_counter()
            choose(row)
            least[at] = min(least[at], (perf_counter() - clock) * 1e6)
    return least.tolist()


def shown(times: Sequence[float]) -> str:
    return f"{mean(times):.0f} ({median(times):.0f})"


def main(bundle: str) -> None:
    """Print the table, in Markdown."""
    rows: list[NDArray[np.float32]] = []

    def keep(_: Sequence[int], scores: NDArray[np.float32]) -> NDArray[np.float32]:
        rows.append(scores.copy())
        return scores

    with TemporaryDirectory() as folder, Session.open(bundle) as session:
        programs = [
            compiled(Path(folder, "a")),
            compiled(Path(folder, "b"), "-DSSDEVICE_WITHOUT_VNNI"),
        ]
        decoded(session, Sampling(temperature=1.0, processors=(keep,)))
        file = Path(folder, "rows")
        np.stack(rows).tofile(file)
        print(
            "| | C++ | without AVX-512 | Python | between calls |\n|---|---|---|---|---|",
            flush=True,
        )
        for options in OPTIONS:
            named = {name: value for name, value in options.items() if name != "logprobs"}
            asked = {
                "sampling": named,
                "seed": "1",
                **{name: options[name] for name in options if name not in named},
            }
            cells = []
            for program in programs:
                found = subprocess.check_output([program, "--time", file, json.dumps(asked)])
                cells.append(shown(json.loads(found)))
            sampling = Sampling(**options, seed=1)
            for times in (warm(rows, sampling, session.engine.kernels), decoded(session, sampling)):
                cells.append(shown(times) if times else "")
            said = ", ".join(f"{name} {value}" for name, value in options.items())
            print(f"| {said or 'greedy'} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
