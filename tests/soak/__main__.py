"""The long run: ``python -m tests.soak --seed 1 --count 10000`` on the shipped model and three of
its apps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.soak.apps import LISTING, script
from tests.soak.questions import ROOT, fresh_answers
from tests.soak.soaking import MAX_GROWTH_MB, Outcome, soak


def report(outcome: Outcome, count: int) -> str:
    """What the run found, as lines."""
    first = outcome.resident_mb[len(outcome.resident_mb) // 10]
    last = outcome.resident_mb[-1]
    return "\n".join(
        [
            f"{count} generations, {outcome.tokens} tokens, {outcome.seconds:.0f} s",
            f"kinds: {dict(outcome.kinds)}; ended for: {dict(outcome.reasons)}",
            f"resident: {first:.1f} MB after warm-up, {last:.1f} MB at the end; growth of medians "
            f"{outcome.growth_mb:+.2f} MB (bound {MAX_GROWTH_MB:.0f})",
            f"different from a fresh process: {len(outcome.differences)}",
            *outcome.differences[:10],
        ]
    )


def main() -> int:
    """Export, ask fresh processes, soak; exit code 1 if an answer differs or memory grows."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument(
        "--bundles", type=Path, help="where the bundles are, or are written and kept"
    )
    parser.add_argument(
        "--each", action="store_true", help="a bundle an app, not one for all of them"
    )
    parser.add_argument("--json", type=Path, help="write counts and sizes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ssdevice-soak-") as scratch:
        place = options.bundles or Path(scratch)
        listing = place / LISTING
        if not listing.is_file():
            kind = "each" if options.each else "one"
            subprocess.run(
                [sys.executable, "-m", "tests.soak.apps", str(place), kind], cwd=ROOT, check=True
            )
        folders = {
            app: Path(folder) for app, folder in json.loads(listing.read_text("utf-8")).items()
        }
        asked = script()
        fresh = fresh_answers(folders, asked.questions)
        print(f"{len(fresh)} questions answered by fresh processes", file=sys.stderr, flush=True)

        def tell(number: int, outcome: Outcome) -> None:
            if number * 10 % options.count == 0:
                size = outcome.resident_mb[-1]
                print(
                    f"{number}: {outcome.seconds:.0f} s, {size:.1f} MB", file=sys.stderr, flush=True
                )

        outcome = soak(folders, asked, fresh, options.seed, options.count, tell)
    bundles = len(set(folders.values()))
    print(f"seed {options.seed}, {bundles} bundles: {report(outcome, options.count)}")
    if options.json:
        options.json.write_text(json.dumps(vars(outcome)), "utf-8")
    return int(bool(outcome.differences) or outcome.growth_mb > MAX_GROWTH_MB)


if __name__ == "__main__":
    sys.exit(main())
