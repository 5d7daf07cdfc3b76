"""The run itself: seeded generations over several apps, some of them cancelled, too long or wrong.

Every answer must be the beginning of what a fresh process gives to the same question. The resident
size must not grow: from the samples after the warm-up (a tenth of the run) to those at its end, by
medians of a tenth of the samples each, at most MAX_GROWTH_MB.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter

from ssdevice.errors import ContextOverflowError, InputError
from ssdevice.runtime.loop import Reason
from ssdevice.runtime.session import Session
from tests.soak.questions import MOST, Answer, Question, open_app

MAX_GROWTH_MB = 16.0
SAMPLES = 100
REOPEN_EVERY = 997
KINDS = {
    "answer": 10,
    "short": 4,
    "plain": 2,
    "cancel": 3,
    "abandon": 1,
    "chat": 2,
    "full": 1,
    "overflow": 1,
    "wrong": 1,
}


@dataclass(frozen=True)
class Script:
    """What may be asked.

    ``prompts`` by app; ``full``: those that leave little room; ``overflow``: one without any.
    """

    prompts: dict[str, tuple[str, ...]]
    full: dict[str, str]
    overflow: str

    @property
    def questions(self) -> list[Question]:
        """All that fresh processes must answer."""
        found: list[Question] = []
        for app, prompts in self.prompts.items():
            found += [Question(app, prompt, plain) for prompt in prompts for plain in (False, True)]
            found += [Question(app, prompts[i], then=prompts[i - 1]) for i in range(len(prompts))]
            found.append(Question(app, self.full[app]))
        return found


@dataclass
class Outcome:
    """Counts by kind and by how answers ended, differences from fresh processes, and sizes in MB
    over the run.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    resident_mb: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    @property
    def growth_mb(self) -> float:
        """Median of the last tenth of the samples after warm-up, less that of the first."""
        after = self.resident_mb[len(self.resident_mb) // 10 :]
        part = max(len(after) // 10, 1)
        return median(after[-part:]) - median(after[:part])


class Apps:
    """Sessions for several apps: one that switches, where one bundle has them all, else one a
    bundle.
    """

    def __init__(self, folders: dict[str, Path]) -> None:
        self.folders = folders
        self.switching = len(set(folders.values())) == 1
        self._sessions: dict[str, Session] = {}
        self._current: str | None = None

    def session(self, app: str) -> Session:
        """The session, ready for this app."""
        if not self.switching:
            if app not in self._sessions:
                self._sessions[app] = open_app(self.folders[app], app)
            return self._sessions[app]
        if not self._sessions:
            self._sessions[""] = open_app(self.folders[app], app)
            self._current = app
        if self._current != app:
            self._sessions[""].use(app)
            self._current = app
        return self._sessions[""]

    def close(self) -> None:
        """Close all sessions; the next call opens new ones."""
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()
        self._current = None


def soak(
    folders: dict[str, Path],
    script: Script,
    fresh: dict[Question, Answer],
    seed: int,
    count: int,
    tell: Callable[[int, Outcome], None] = lambda *_: None,
) -> Outcome:
    """Ask ``count`` times; ``tell`` hears of it at every sample."""
    rng = Random(seed)
    outcome = Outcome()
    clock = perf_counter()
    every = max(count // SAMPLES, 1)
    with _set_aside(), closing(Apps(folders)) as apps:
        for number in range(1, count + 1):
            app = rng.choice(list(folders))
            # Each kind once, then by their weights: no short run leaves one out.
            kind = [*KINDS, *rng.choices(list(KINDS), list(KINDS.values()))][
                number - 1 if number <= len(KINDS) else -1
            ]
            outcome.kinds[kind] += 1
            difference = _once(apps.session(app), app, kind, script, fresh, rng, outcome)
            if difference:
                outcome.differences.append(f"generation {number}, {app}, {kind}: {difference}")
            if number % REOPEN_EVERY == 0:
                apps.close()
            if number % every == 0:
                gc.collect()
                outcome.resident_mb.append(_resident_mb())
                outcome.seconds = perf_counter() - clock
                tell(number, outcome)
    outcome.seconds = perf_counter() - clock
    return outcome


@contextmanager
def _set_aside() -> Iterator[None]:
    """In this context collections look only at what is new: what was there before may be much."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _once(
    session: Session,
    app: str,
    kind: str,
    script: Script,
    fresh: dict[Question, Answer],
    rng: Random,
    outcome: Outcome,
) -> str:
    """One generation; what is wrong with it, if anything."""
    prompts = script.prompts[app]
    at = rng.randrange(len(prompts))
    if kind == "overflow":
        return _refused(
            ContextOverflowError, lambda: "".join(session.generate(script.overflow, max_tokens=8))
        )
    if kind == "wrong":
        return _wrong(session, rng)
    if kind == "chat":
        session.reset()
        "".join(session.chat(prompts[at], max_tokens=MOST))
        "".join(session.chat(prompts[at - 1], max_tokens=MOST))
        return _differs(
            session, Question(app, prompts[at], then=prompts[at - 1]), MOST, fresh, outcome
        )
    question = Question(
        app, script.full[app] if kind == "full" else prompts[at], plain=kind == "plain"
    )
    most = rng.randint(1, 7) if kind == "short" else rng.randint(8, MOST)
    pieces = session.generate(question.prompt, max_tokens=most, speculate=not question.plain)
    if kind not in ("cancel", "abandon"):
        "".join(pieces)
        return _differs(session, question, most, fresh, outcome)
    for _ in range(rng.randint(1, 4)):
        next(pieces, None)
    if kind == "cancel":
        pieces.close()  # type: ignore[attr-defined]
        return _differs(session, question, most, fresh, outcome, whole=False)
    # The answer is left as it stands; a newer one ends it.
    ended = session.last.reason is not None
    "".join(session.generate(prompts[at - 1], max_tokens=8))
    difference = _differs(session, Question(app, prompts[at - 1]), 8, fresh, outcome)
    return difference or ("" if ended else _refused(InputError, lambda: "".join(pieces)))


def _differs(
    session: Session,
    question: Question,
    most: int,
    fresh: dict[Question, Answer],
    outcome: Outcome,
    whole: bool = True,
) -> str:
    answer = session.last
    expected = fresh[question]
    outcome.reasons[str(answer.reason)] += 1
    outcome.tokens += len(answer.tokens)
    wanted = expected.tokens[:most] if whole else expected.tokens[: len(answer.tokens)]
    if tuple(answer.tokens) != wanted:
        return f"{question.prompt[:40]!r} gives {answer.tokens}, a fresh process {list(wanted)}"
    if (
        whole
        and len(expected.tokens) <= most
        and str(answer.reason) not in (expected.reason, Reason.MAX_TOKENS)
    ):
        return f"it ended for {answer.reason}, in a fresh process for {expected.reason}"
    return ""


def _wrong(session: Session, rng: Random) -> str:
    calls: Sequence[Callable[[], object]] = (
        lambda: "".join(session.generate("  ")),
        lambda: session.use("no-such-app"),
        lambda: list(session.runs([10**9])),
        lambda: list(session.runs([], max_tokens=4)),
        lambda: "".join(session.generate("x", max_tokens=0)),
        lambda: "".join(session.generate("half a character \ud800")),
    )
    return _refused(InputError, rng.choice(calls))


def _refused(kind: type[Exception], call: Callable[[], object]) -> str:
    try:
        call()
    except kind:
        return ""
    return f"no {kind.__name__}"


def _resident_mb() -> float:
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no VmRSS in /proc/self/status")
