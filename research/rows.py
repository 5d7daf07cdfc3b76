"""What the rows of a step cost: CPU milliseconds of a step of each bundle, and its parts.

    python -m research.rows BUNDLE..

The bundles differ in their trees. They take turns, and a step counts as the fastest quarter of its rounds took, in CPU
time of one thread, which does not count the waiting for other work of a machine. The shares are from a profile, which
slows calls down.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import process_time

import numpy as np

from ssdevice.bench import report
from ssdevice.contract import STEP
from ssdevice.export.target import export_target
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.loop import prefill
from ssdevice.runtime.session import Session

PARTS = ("layers", "head", "streams", "stream head")
TOKEN = 5


def begun(session: Session, length: int) -> Conversation:
    """A conversation with ``length`` committed rows."""
    talk = session.engine.new_conversation()
    prefill(talk, [TOKEN] * length)
    return talk


def timed(folders: Sequence[Path], length: int, rounds: int) -> list[list[float]]:
    """CPU milliseconds of a plain call and of a step, by bundle."""
    sessions = [Session.open(folder, options=EngineOptions(threads=1)) for folder in folders]
    talks = [begun(session, length) for session in sessions]

    def again(talk: Conversation, call: Callable[[int], object]) -> None:
        talk.length = length
        call(TOKEN)

    spent = in_turns(
        [partial(again, talk, call) for talk in talks for call in (talk.step_plain, talk.step)],
        rounds,
    )
    for session in sessions:
        session.close()
    return [spent[at : at + 2] for at in range(0, len(spent), 2)]


def in_turns(calls: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """CPU milliseconds of each of the calls, which take turns: what the fastest quarter of its rounds took."""
    spent = np.zeros((rounds, len(calls)))
    for row in spent:
        for at, call in enumerate(calls):
            start = process_time()
            call()
            row[at] = 1e3 * (process_time() - start)
    times: list[float] = np.quantile(spent, 0.25, axis=0).tolist()
    return times


def shares(folder: Path, length: int, rounds: int) -> list[float]:
    """The share of each of the PARTS in a step."""
    with Session.open(folder, options=EngineOptions(threads=1, profile=True)) as session:
        talk = begun(session, length)
        for _ in range(rounds):
            talk.length = length
            talk.step(TOKEN)
        names = export_target(session.bundle.manifest.target).parts(session.engine)
        spent = defaultdict[str, float](float)
        for kernel in session.engine.profile()[STEP]:
            spent[names.get(kernel.node, "other")] += kernel.microseconds
    return [spent[part] / max(sum(spent.values()), 1e-9) for part in PARTS]


def main(words: Sequence[str] | None = None) -> None:
    """Print a row for each bundle."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundles", type=Path, nargs="+")
    for name, default in {"length": 128, "rounds": 60}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args(words)
    rows = []
    for folder, (plain, step) in zip(
        args.bundles, timed(args.bundles, args.length, args.rounds), strict=True
    ):
        with Session.open(folder) as session:
            size = session.engine.geometry.tree.size
        found = shares(folder, args.length, 10)
        rows.append(
            [
                folder.name,
                str(size),
                f"{plain:.2f}",
                f"{step:.2f}",
                *(f"{share:.1%}" for share in found),
            ]
        )
    print(
        "\n".join(
            report.table(["bundle", "T", "plain, CPU ms", "step, CPU ms", *PARTS], *rows)
        ).strip()
    )


if __name__ == "__main__":
    main()
