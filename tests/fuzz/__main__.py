"""Long runs: ``python -m tests.fuzz --seed 1 --count 10000``; ``--only INDEX`` shows one case."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

from tests.fuzz import pristine
from tests.fuzz.pool import run_cases
from tests.fuzz.worker import ADDRESS_SPACE_MB, MAX_GROWTH_MB, Result


def summary(results: list[Result]) -> str:
    """Counts of outcomes by subject, and every bug once by its kind."""
    subjects = sorted({result.subject for result in results})
    lines = []
    for subject in subjects:
        counts = Counter(result.outcome for result in results if result.subject == subject)
        lines.append(
            f"{subject:8} " + "  ".join(f"{name} {count}" for name, count in sorted(counts.items()))
        )
    total = Counter(result.outcome for result in results)
    lines.append(
        f"{'all':8} " + "  ".join(f"{name} {count}" for name, count in sorted(total.items()))
    )
    peak = max((result.peak_mb for result in results), default=0.0)
    lines.append(
        f"largest growth of a case {peak:.0f} MB (bound {MAX_GROWTH_MB}; address space "
        f"+{ADDRESS_SPACE_MB})"
    )
    return "\n".join(lines)


def main() -> int:
    """Run, print counts and bugs; the exit code is 1 if there is a bug."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--only", type=int, help="the index of one case to show")
    parser.add_argument(
        "--workers",
        type=int,
        default=2,
        help="processes for bundles; adapters have one of their own",
    )
    parser.add_argument(
        "--pristine", type=Path, help="subjects made before: made there if it does not exist"
    )
    parser.add_argument("--log", type=Path, help="write every result, a line each")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ssdevice-fuzz-") as scratch:
        subjects = options.pristine or Path(scratch) / "pristine"
        if not subjects.exists():
            pristine.make(subjects)
        clock = perf_counter()
        done = Counter[str]()
        indices = range(options.count) if options.only is None else [options.only]

        def tell(result: Result) -> None:
            done[result.outcome] += 1
            if result.outcome == "BUG" or options.only is not None:
                print(json.dumps(asdict(result), ensure_ascii=False), flush=True)
            if done.total() % 500 == 0:
                print(
                    f"{done.total()} cases, {perf_counter() - clock:.0f} s: {dict(done)}",
                    file=sys.stderr,
                    flush=True,
                )

        results = run_cases(subjects, options.seed, indices, options.workers, tell)
    if options.log:
        options.log.write_text(
            "".join(json.dumps(asdict(result)) + "\n" for result in results), "utf-8"
        )
    print(
        f"seed {options.seed}, {len(results)} cases, {perf_counter() - clock:.0f} s\n"
        f"{summary(results)}"
    )
    return int(any(result.outcome == "BUG" for result in results))


if __name__ == "__main__":
    sys.exit(main())
