"""What is asked, and what a fresh process answers: one process a question, so that nothing was asked before."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ssdevice.runtime.session import Session

MOST = 24
"""Tokens of an answer; shorter ones are its beginning, since decoding is greedy."""
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Question:
    """A prompt for an app, and how to decode; with ``then``, a second message of a conversation, which is answered."""

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
    """What a new process answers to each question. ``folders``: the bundle with each app."""

    def ask(question: Question) -> tuple[Question, Answer]:
        asked = json.dumps({**vars(question), "folder": str(folders[question.app])})
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "tests.soak.questions", asked],
            cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"a fresh process failed on {asked}: {done.stderr[-2000:]}")
        told = json.loads(done.stdout)
        return question, Answer(tuple(told["tokens"]), told["reason"])

    with ThreadPoolExecutor(processes) as pool:
        return dict(pool.map(ask, dict.fromkeys(questions)))


def open_app(folder: Path, app: str) -> Session:
    """A session of a bundle for an app it has, or for its default one where ``app`` names the bundle itself."""
    from ssdevice.bundle.folder import Bundle
    from ssdevice.runtime.session import Session

    bundle = Bundle.open(folder)
    known = [known.name for known in bundle.manifest.apps]
    return Session.open(bundle, app=app if app in known else None, threads=1)


def main() -> None:
    """Answer the question in the argument."""
    parser = argparse.ArgumentParser()
    parser.add_argument("question")
    asked = json.loads(parser.parse_args().question)
    speculate = not asked["plain"]
    with open_app(Path(asked["folder"]), asked["app"]) as session:
        if asked["then"] is None:
            "".join(session.generate(asked["prompt"], max_tokens=MOST, speculate=speculate))
        else:
            "".join(session.chat(asked["prompt"], max_tokens=MOST, speculate=speculate))
            "".join(session.chat(asked["then"], max_tokens=MOST, speculate=speculate))
        print(json.dumps({"tokens": session.last.tokens, "reason": session.last.reason}))


if __name__ == "__main__":
    main()
