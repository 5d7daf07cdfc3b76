"""What is asked, and what a fresh process answers: one process a question, so that nothing was
asked before.

The processes are forks of one that has imported the runtime and opened nothing: an import costs
more than an answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssdevice.runtime.session import Session

MOST = 24
"""Tokens of an answer; shorter ones are its beginning, since decoding is greedy."""
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Question:
    """A prompt for an app, and how to decode; with ``then``, a second message of a conversation,
    which is answered.
    """

    app: str
    prompt: str
    plain: bool = False
    then: str | None = None


@dataclass(frozen=True)
class Answer:
    """Up to MOST tokens, and why they ended."""

    tokens: tuple[int, ...]
    reason: str


def fresh_answers(
    folders: dict[str, Path], questions: Iterable[Question], processes: int = 1
) -> dict[Question, Answer]:
    """What a new process answers to each question, in ``processes`` rows; ``folders``: the bundle
    with each app.
    """
    asked = list(dict.fromkeys(questions))

    def ask(row: list[Question]) -> list[tuple[Question, Answer]]:
        lines = [
            json.dumps({**vars(question), "folder": str(folders[question.app])}) for question in row
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "tests.soak.questions"],
            input="\n".join(lines),
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        told = [json.loads(line) for line in done.stdout.splitlines()]
        if done.returncode or len(told) != len(row):
            raise RuntimeError(
                f"a fresh process failed after {len(told)} of {lines}: {done.stderr[-2000:]}"
            )
        return [
            (q, Answer(tuple(a["tokens"]), a["reason"])) for q, a in zip(row, told, strict=True)
        ]

    with ThreadPoolExecutor(processes) as pool:
        rows = pool.map(ask, [asked[first::processes] for first in range(processes)])
        return {question: answer for row in rows for question, answer in row}


def open_app(folder: Path, app: str) -> Session:
    """A session of a bundle for an app it has, or for its default one where ``app`` names the
    bundle itself.
    """
    from ssdevice.bundle.folder import Bundle
    from ssdevice.runtime.session import Session

    bundle = Bundle.open(folder)
    known = [known.name for known in bundle.manifest.apps]
    return Session.open(bundle, app=app if app in known else None, threads=1)


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Tokens, and why they ended."""
    speculate = not asked["plain"]
    with open_app(Path(asked["folder"]), asked["app"]) as session:
        if asked["then"] is None:
            "".join(session.generate(asked["prompt"], max_tokens=MOST, speculate=speculate))
        else:
            "".join(session.chat(asked["prompt"], max_tokens=MOST, speculate=speculate))
            "".join(session.chat(asked["then"], max_tokens=MOST, speculate=speculate))
        return {"tokens": session.last.tokens, "reason": session.last.reason}


def main() -> None:
    """Answer the questions on standard input, one a line, each in a fork of this process; end at
    the first failure.
    """
    import onnxruntime

    import ssdevice.runtime.session

    del (
        onnxruntime,
        ssdevice,
    )  # wanted in memory only; neither starts a thread before a session opens
    for line in sys.stdin.read().splitlines():
        child = os.fork()
        if not child:
            print(json.dumps(answer(json.loads(line))), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(1)


if __name__ == "__main__":
    main()
