"""Conversations of Python's session with an engine, call by call, for another language's loop to repeat.

The engine is scripted: its next token is a hash of the committed rows, so any wrong row, length or draft shows.
"""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from ssdevice.config import to_json
from ssdevice.contract import LENGTH, PLAIN, STEP, CacheForm, Geometry, functions
from ssdevice.errors import SSDeviceError
from ssdevice.runtime.engine import Inputs, Outputs
from ssdevice.runtime.session import Session
from ssdevice.text.chat_template import ChatFormat
from ssdevice.text.tokenizer import ChatTokenizer
from ssdevice.tree import Tree
from tests.runtime.scripted import TEMPLATE, Drafter, ScriptedCache, ScriptedEngine, make_geometry, random_drafter

TOKENIZER = Path(__file__).resolve().parents[2] / "models" / "base-7m" / "tokenizer.json"
TREES = ("chain:3", "full:k=2,depth=2", "[[0],[1],[0,0],[0,0,0]]")
STOPS = ((), ("e",), ("zz", "the", "a "))


class RecordingCache(ScriptedCache):
    """Notes every call. ``calls`` is shared by all caches of one recording."""

    calls: list[dict[str, Any]]

    def __init__(self, geometry: Geometry, inputs: Inputs, drafter: Drafter) -> None:
        super().__init__(geometry, inputs, drafter)
        self.names = {spec.name: spec.inputs for spec in functions(geometry, CacheForm.INTERNAL, "").values()}

    def call(self, function: str, length: int) -> Outputs:
        assert self.inputs[LENGTH][0] == length
        inputs = {tensor.name: self.inputs[tensor.name].ravel().tolist() for tensor in self.names[function]}
        out = super().call(function, length)
        outputs = {name: np.asarray(value).ravel().tolist() for name, value in out.items()}
        self.calls.append({"function": function, "inputs": inputs, "outputs": outputs})
        return out


def record() -> dict[str, Any]:
    """Random conversations, and answers cancelled after every number of runs."""
    rng = Random(0)
    vocab = ChatTokenizer.from_bytes(TOKENIZER.read_bytes(), chat(())).tokenizer.get_vocab_size()
    found = []
    for number in range(60):
        tree = Tree.parse(rng.choice(TREES))
        geometry = make_geometry(tree, vocab=vocab, context=rng.choice([20, 40, 90]), chunk=rng.choice([4, 7, 32]))
        requests = [_request(rng, geometry, number) for _ in range(4)]
        found.append(_conversation(number, geometry, requests))
    geometry = make_geometry(Tree.parse(TREES[0]), vocab=vocab, context=60)
    for speculate in (False, True):
        request = {**_request(rng, geometry, 0), "prompt": [5, 6, 7], "max_tokens": 20, "speculate": speculate}
        whole = {**request, "runs_wanted": None, "stop": []}
        for runs in range(12):
            found.append(_conversation(1, geometry, [{**whole, "runs_wanted": runs}, whole]))
    return {"conversations": found}


def chat(stop_ids: tuple[int, ...]) -> ChatFormat:
    """A chat format with these stop tokens, and one more, since there must be one."""
    return ChatFormat(TEMPLATE, {}, (1, *stop_ids))


def _request(rng: Random, geometry: Geometry, number: int) -> dict[str, Any]:
    # Some prompts do not fit the context.
    size = rng.choice([1, 2, geometry.chunk, geometry.chunk + 1, rng.randint(1, geometry.context + 2)])
    return {
        "prompt": [rng.randrange(geometry.vocab) for _ in range(size)],
        "max_tokens": rng.choice([0, 1, 2, 7, 30, 200]),
        "stop": list(rng.choice(STOPS)) if number % 2 else [],
        "speculate": rng.random() < 0.6,
        "runs_wanted": rng.choice([None, None, 0, 1, 3]),
    }


def _conversation(number: int, geometry: Geometry, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """One session's answers. ``number``: every third has many stop tokens, every fourth no ``step_plain``."""
    stop_ids = tuple(range(0, geometry.vocab, 40)) if number % 3 == 0 else ()

    class Cache(RecordingCache):
        calls: list[dict[str, Any]] = []  # noqa: RUF012  # of this conversation

    engine = ScriptedEngine(geometry, random_drafter(number, 0.8), Cache)
    if number % 4 == 0:
        engine.functions -= {PLAIN}
    session = Session(engine, ChatTokenizer.from_bytes(TOKENIZER.read_bytes(), chat(stop_ids)))
    plain = "plain" if PLAIN in engine.functions else "plain_step"
    answers = []
    for request in requests:
        begin = len(Cache.calls)
        runs, refused = [], False
        try:
            mode = "speculative" if request["speculate"] else plain
            options = {"max_tokens": request["max_tokens"], "stop": request["stop"]}
            with closing(session.runs(request["prompt"], mode=mode, **options)) as answer:
                for run in islice(answer, request["runs_wanted"]):
                    drafts = run.drafts is not None
                    runs.append({"tokens": run.tokens, "text": run.text, "reason": run.reason, "drafted": drafts})
        except SSDeviceError:
            refused = True
        answers.append({**request, "refused": refused, "runs": runs, "calls": Cache.calls[begin:]})
    return {
        "geometry": {**to_json(geometry), "tree": [list(path) for path in geometry.tree.paths[1:]]},
        "functions": sorted(engine.functions | {STEP}),
        "stop_ids": [1, *stop_ids],
        "answers": answers,
    }
