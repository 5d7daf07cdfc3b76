"""Conversations of Python's session with an engine, call by call, for another language's loop to
repeat.

The engine is scripted: its next token is a hash of the committed rows, so any wrong row, length or
draft shows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, cast
from unittest.mock import patch

from ssdevice.config import to_json
from ssdevice.contract import PLAIN, PREFILL, STEP, Geometry
from ssdevice.errors import SSDeviceError
from ssdevice.runtime.adaptive import Adaptive
from ssdevice.runtime.generation import Run
from ssdevice.runtime.lookup import Lookup
from ssdevice.runtime.loop import ADAPTIVE, SPECULATIVE
from ssdevice.runtime.session import Session
from ssdevice.text.chat_template import ChatFormat
from ssdevice.text.tokenizer import ChatTokenizer
from ssdevice.tree import Tree
from tests.runtime import scripted
from tests.runtime.scripted import ScriptedEngine, make_geometry, next_token, random_drafter
from tests.swift.strings import WORDS
from tests.vectors.sessions import Recorder, RecordingCache

BASE_7M = Path(__file__).resolve().parents[2] / "models" / "base-7m"
TOKENIZER = BASE_7M / "tokenizer.json"
TEMPLATE = (BASE_7M / "chat_template.jinja").read_text("utf-8")
TREES = ("chain:3", "full:k=2,depth=2", "[[0],[1],[0,0],[0,0,0]]")
STOPS = ((), ("e",), ("zz", "the", "a "))
WITHOUT_PLAIN = {"plain": "plain_step", ADAPTIVE: SPECULATIVE}
"""Mode -> the one in its place for a session without ``step_plain``."""


def record() -> dict[str, Any]:
    """Random conversations, long adaptive ones, also with repeating text, chats, and answers
    cancelled at every run.
    """
    rng = Random(0)
    tokenizer = open_tokenizer(())
    vocab = tokenizer.tokenizer.get_vocab_size()
    found = []
    for number in range(60):
        tree = Tree.parse(rng.choice(TREES))
        geometry = make_geometry(
            tree, vocab=vocab, context=rng.choice([20, 40, 90]), chunk=rng.choice([4, 7, 32])
        )
        requests = [_request(rng, geometry, number) for _ in range(4)]
        found.append(_conversation(number, geometry, requests))
    for number in range(1, 7):
        geometry = make_geometry(Tree.parse(TREES[number % 3]), vocab=vocab, context=600, chunk=32)
        long = {
            "prompt": [5, 6, 7],
            "max_tokens": 500,
            "stop": [],
            "mode": ADAPTIVE,
            "runs_wanted": None,
        }
        found.append(_conversation(number, geometry, [long] * 4))
        with patch.object(scripted, "next_token", _repeating):
            found.append(
                _conversation(number, geometry, [long, {**long, "prompt": [9, 5, 6, 7]}] * 2)
            )
    geometry = make_geometry(Tree.parse(TREES[0]), vocab=vocab, context=60)
    with patch.object(scripted, "next_token", _word_of(tokenizer)):
        for number in range(20):
            tree = Tree.parse(rng.choice(TREES))
            context = rng.choice([60, 120, 400])
            geometry = make_geometry(tree, vocab=vocab, context=context, chunk=rng.choice([7, 32]))
            requests = [
                _message(rng) if rng.random() < 0.8 else _request(rng, geometry, 0)
                for _ in range(7)
            ]
            found.append(_conversation(number, geometry, requests))
    for mode in ("plain", SPECULATIVE):
        request = {
            **_request(rng, geometry, 0),
            "prompt": [5, 6, 7],
            "max_tokens": 20,
            "mode": mode,
        }
        whole = {**request, "runs_wanted": None, "stop": []}
        for runs in range(12):
            found.append(_conversation(1, geometry, [{**whole, "runs_wanted": runs}, whole]))
    return {"conversations": found}


def open_tokenizer(stop_ids: tuple[int, ...]) -> ChatTokenizer:
    """base-7m's tokenizer and template, with these stop tokens and the one that the template puts
    after an answer.
    """
    return ChatTokenizer.from_bytes(
        TOKENIZER.read_bytes(), ChatFormat(TEMPLATE, {}, (1, *stop_ids)).framed()
    )


def _repeating(context: Sequence[int], vocab: int) -> int:
    """A model whose text soon repeats itself, so that drafts can be looked up."""
    return next_token(context[-2:], 7)


def _word_of(tokenizer: ChatTokenizer) -> Callable[[Sequence[int], int], int]:
    """A model that says words whose text has the same tokens again, and now and then stops."""
    texts = {i: tokenizer.decode([i]) for i in range(tokenizer.tokenizer.get_vocab_size())}
    words = [
        i
        for i, text in texts.items()
        if re.fullmatch(" [a-z]{4,}", text) and tokenizer.encode(text) == [i]
    ]
    words = [*words[:40], *tokenizer.stop_ids]
    return lambda context, vocab: words[next_token(context, len(words))]


def _message(rng: Random) -> dict[str, Any]:
    """A request for the answer to the next message."""
    return {
        "chat": " ".join(rng.choice(WORDS) for _ in range(rng.randint(0, 4))),
        "max_tokens": rng.choice([1, 5, 20]),
        "stop": list(rng.choice(STOPS)) if rng.random() < 0.2 else [],
        "mode": rng.choice(["plain", SPECULATIVE]),
        "runs_wanted": rng.choice([None, None, None, 0, 1, 3]),
    }


def _request(rng: Random, geometry: Geometry, number: int) -> dict[str, Any]:
    # Some prompts do not fit the context.
    size = rng.choice(
        [1, 2, geometry.chunk, geometry.chunk + 1, rng.randint(1, geometry.context + 2)]
    )
    return {
        "prompt": [rng.randrange(geometry.vocab) for _ in range(size)],
        "max_tokens": rng.choice([0, 1, 2, 7, 30, 200]),
        "stop": list(rng.choice(STOPS)) if number % 2 else [],
        "mode": rng.choice(["plain", "plain_step", SPECULATIVE, ADAPTIVE]),
        "runs_wanted": rng.choice([None, None, 0, 1, 3]),
    }


def _conversation(
    number: int, geometry: Geometry, requests: list[dict[str, Any]]
) -> dict[str, Any]:
    """One session's answers.

    ``number``: every third has many stop tokens, every fourth no ``step_plain``.

    Drafts are about half right, and now and then nearly never.
    """
    stop_ids = tuple(range(0, geometry.vocab, 40)) if number % 3 == 0 else ()
    made = Recorder(number, {PREFILL: 500, PLAIN: 100, STEP: (140, 190, 260)[number % 3]})
    drafters = [random_drafter(number, oracle) for oracle in (0.8, 0.8, 0.05)]

    class Cache(RecordingCache):
        recorder = made

    engine = ScriptedEngine(
        geometry, lambda *args: drafters[len(made.calls) // 100 % 3](*args), Cache
    )
    if number % 4 == 0:
        engine.functions -= {PLAIN}
    session = Session(engine, open_tokenizer(stop_ids))
    session._adaptive[session._conversation] = {False: Adaptive(Lookup(), made.clock)}  # greedily
    answers = []
    for request in requests:
        if PLAIN not in engine.functions:
            mode = request["mode"]
            request = {**request, "mode": WITHOUT_PLAIN.get(mode, mode)}
        begin = len(made.calls)
        runs = []
        refused = False
        try:
            options = {
                "max_tokens": request["max_tokens"],
                "stop": request["stop"],
                "mode": request["mode"],
            }
            with closing(_runs(session, request, options)) as answer:
                for run in islice(answer, request["runs_wanted"]):
                    drafts = None if run.drafts is None else run.drafts.ravel().tolist()
                    runs.append(
                        {
                            "tokens": run.tokens,
                            "text": run.text,
                            "reason": run.reason,
                            "drafts": drafts,
                        }
                    )
        except SSDeviceError:
            refused = True
        answers.append({**request, "refused": refused, "runs": runs, "calls": made.calls[begin:]})
    return {
        "geometry": {**to_json(geometry), "tree": [list(path) for path in geometry.tree.paths[1:]]},
        "functions": sorted(engine.functions | {STEP}),
        "stop_ids": [1, *stop_ids],
        "frames": to_json(open_tokenizer(()).chat.frames),
        "answers": answers,
    }


def _runs(
    session: Session, request: dict[str, Any], options: dict[str, Any]
) -> Generator[Run, None, None]:
    if "prompt" in request:
        return session.runs(request["prompt"], **options)
    mode = options.pop("mode")
    with (
        patch("ssdevice.runtime.session._pieces", lambda runs: runs),
        patch.object(session, "mode", lambda speculate: mode),
    ):
        return cast(Generator[Run, None, None], session.chat(request["chat"], **options))
