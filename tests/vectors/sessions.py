"""Recorded sessions for hosts in every language: what Python's loop asks of an engine, call by
call.

A session has one engine and one KV cache; its ``answers`` follow each other, and what a prompt
begins with and the cache holds is not computed again. The host is given the sizes (``geometry``,
``functions``, ``streams``: whether the graphs draft, ``stop_ids``, ``phrases``: the entries of
their table, if there is one) and for each answer ``prompt``, ``mode``, ``max_tokens`` and, where
the host chooses tokens, ``sampling`` with a ``seed`` (as text: it has 64 bits). It must make the
``calls`` with these ``inputs``, in this order, and emit the ``runs``, the tokens of one call each;
``reason`` says why the answer ends.

The engine is scripted: a call returns the recorded ``outputs``, and the clock of adaptive mode goes
on by ``seconds``, whole numbers. ``logits`` are not stored: an output of ``[n, ..]`` stands for the
rows ``sampling.row(vocab, n)``, .. ``path`` is what ``verify`` is followed by: the nodes whose rows
the host keeps. Where the graph holds the cache, ``draft`` is given it, with its length in
``count``; other hosts copy these rows themselves.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, product
from pathlib import Path
from random import Random
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from ssdevice.config import to_json
from ssdevice.contract import (
    COUNT,
    DRAFT,
    DRAFTS,
    LAST_STATE,
    LENGTH,
    LOGITS,
    NEXT_DRAFTS,
    PATH,
    PLAIN,
    PREFILL,
    ROOT,
    STATES,
    STEP,
    STEP_SHORT,
    VERIFY,
    VERIFY_PLAIN,
    CacheForm,
    Geometry,
    functions,
)
from ssdevice.export.phrases import phrase_table
from ssdevice.runtime.adaptive import Adaptive
from ssdevice.runtime.engine import Inputs, Outputs
from ssdevice.runtime.lookup import Lookup, LookupOnly
from ssdevice.runtime.loop import ADAPTIVE, PLAIN_STEP, SPECULATIVE
from ssdevice.runtime.phrases import Phrases
from ssdevice.runtime.session import Session
from ssdevice.text.chat_template import ChatFormat
from ssdevice.text.tokenizer import ChatTokenizer, Sample
from ssdevice.tree import Tree
from tests.runtime import scripted
from tests.runtime.scripted import (
    Drafter,
    ScriptedCache,
    ScriptedEngine,
    continuation,
    make_geometry,
    next_token,
    random_drafter,
)
from tests.vectors.sampling import row, sampling_of

FILE = Path(__file__).with_name("sessions.json")
VOCAB = 98
HIDDEN = 2
NEVER = VOCAB
"""A token of the tokenizer that the model does not have."""
CHAIN = "chain:3"
WIDE = "[[0],[1],[0,0],[0,0,0]]"
GREEDY = frozenset((PREFILL, STEP, PLAIN))
CHOOSING = GREEDY | {VERIFY, VERIFY_PLAIN, DRAFT}
Answer = dict[str, Any]


class Recorder:
    """The calls of a session, and a clock that they advance.

    ``costs``: function -> about how many seconds it takes.
    """

    def __init__(self, number: int, costs: Mapping[str, int]) -> None:
        self.calls: list[dict[str, Any]] = []
        self.now = 0
        self._random = Random(number)
        self._costs = costs

    def clock(self) -> float:
        return self.now

    def note(self, function: str, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        cost = self._costs[function]
        seconds = self._random.randint(9 * cost // 10, 12 * cost // 10)
        self.now += seconds
        self.calls.append(
            {"function": function, "inputs": inputs, "outputs": outputs, "seconds": seconds}
        )


class RecordingCache(ScriptedCache):
    """Notes every call. ``recorder`` is shared by all caches of one recording."""

    recorder: ClassVar[Recorder]

    def __init__(self, geometry: Geometry, inputs: Inputs, drafter: Drafter) -> None:
        super().__init__(geometry, inputs, drafter)
        self.names = {
            spec.name: spec.inputs for spec in functions(geometry, CacheForm.INTERNAL, "").values()
        }

    def call(self, function: str, length: int) -> Outputs:
        assert self.inputs[LENGTH][0] == length
        inputs = {
            t.name: self.inputs[t.name][: int(t.shape[0])].ravel().tolist()
            for t in self.names[function]
        }
        if PATH in inputs:
            del inputs[PATH][inputs[COUNT][0] :]  # the rest is undefined
        out = self.answer(function, length)
        outputs = {name: np.asarray(value).ravel().tolist() for name, value in out.items()}
        self.recorder.note(function, inputs, outputs)
        return out

    def answer(self, function: str, length: int) -> Outputs:
        """The outputs of a call."""
        return super().call(function, length)


class ChoosingCache(RecordingCache):
    """Also has the functions for a host that chooses.

    A row of logits has the hash of the text before it as number.
    """

    def call(self, function: str, length: int) -> Outputs:
        out = dict(super().call(function, length))
        if LOGITS in out:
            out[LOGITS] = np.array(
                [row(self.geometry.vocab, number) for number in out[LOGITS].tolist()]
            )
            out[STATES] = out[STATES].astype(np.float32)
        return out

    def answer(self, function: str, length: int) -> Outputs:
        self.length = length
        past = self.held[:length].tolist()
        tree = self.geometry.tree
        if function == DRAFT:
            count = self.inputs[COUNT][0]
            path = self.inputs[PATH][:count]
            self.held[length - count : length] = self.held[length - count + path]
            context = self.held[:length].tolist()
            assert self.inputs[LAST_STATE].tolist() == [_state(context)]
            return {NEXT_DRAFTS: np.array(self.draft(context), np.int32)}
        if function not in (VERIFY, VERIFY_PLAIN):
            return super().answer(function, length)
        slots = [self.inputs[ROOT][0], *(self.inputs[DRAFTS].ravel() if function == VERIFY else ())]
        tokens = [int(slots[slot]) for slot in tree.draft_indices(self.geometry.k)[: len(slots)]]
        tokens = tokens[: tree.size if function == VERIFY else 1]
        self.write(tokens)
        contexts = []
        for at in range(len(tokens)):
            path = dict.fromkeys(tree.path_table[at])
            contexts.append([*past, *(tokens[node] for node in path)])
        numbers = [zlib.crc32(np.array(context, np.int64).tobytes()) for context in contexts]
        return {
            LOGITS: np.array(numbers),
            STATES: np.array([_state(context) for context in contexts]),
        }


def _state(context: Sequence[int]) -> list[int]:
    return [len(context), context[-1]]


def record() -> dict[str, Any]:
    """All sessions; they are the same every time."""
    return {"sessions": [*_decoding(), *_adaptive(), *_sampled()]}


def text(recorded: Mapping[str, list[Any]]) -> str:
    """JSON with one answer a line."""
    sessions = []
    for session in recorded["sessions"]:
        answers = ",\n".join(json.dumps(each, separators=(",", ":")) for each in session["answers"])
        rest = json.dumps({name: value for name, value in session.items() if name != "answers"})
        sessions.append(f'{rest[:-1]}, "answers": [\n{answers}\n]}}')
    return '{"sessions": [\n' + ",\n".join(sessions) + "\n]}\n"


def _request(prompt: Sequence[int], mode: str, max_tokens: int = 40, **sampling: Any) -> Answer:
    """``sampling``: without any, the graph chooses."""
    asked: Answer = {"prompt": list(prompt), "mode": mode, "max_tokens": max_tokens}
    return (
        {**asked, "seed": str(sampling.pop("seed", 0)), "sampling": sampling} if sampling else asked
    )


def _decoding() -> Iterator[dict[str, Any]]:
    """Plain and speculative decoding: chunks of prompts, stops, full contexts, and what prompts
    share.
    """
    prompts = [[7], [7, 5, 3, 2], [7, 5, 3, 2, 9], [*range(40, 51)]]
    for tree in (CHAIN, WIDE):
        for mode in ("plain", PLAIN_STEP, SPECULATIVE) if tree == CHAIN else (SPECULATIVE,):
            requests = [
                _request(prompt, mode, most)
                for prompt, most in zip(prompts, (9, 2, 1, 12), strict=True)
            ]
            yield _session(f"{mode}, {tree}, prompts of one to three chunks", tree, requests)
        full = [*range(1, 40)]
        ends = [_request(full[:size], SPECULATIVE) for size in (38, 39, 30)] + [
            _request([*full, 3], "plain")
        ]
        yield _session(f"to the end of the context, {tree}", tree, ends)
        yield _session(
            f"stop tokens within accepted drafts, {tree}",
            tree,
            [_request([number, 5], SPECULATIVE) for number in range(1, 9)],
            stop_ids=range(0, VOCAB, 9),
            oracle=(1.0,),
        )
    both = [_request([8, 8, 4], SPECULATIVE, 6), _request([8, 8, 4, 1], SPECULATIVE, 6)]
    yield _session("without step_plain", CHAIN, both, has=GREEDY - {PLAIN})


def _adaptive() -> Iterator[dict[str, Any]]:
    """Drafts that pay, do not, and do again; text that repeats itself, with streams and without."""
    long = _request([5, 6, 7], ADAPTIVE, 240)
    shared = _request([5, 6, 7, 1], ADAPTIVE, 60)
    longer = _request([5, 6, 7, 1], ADAPTIVE, 280)  # than the pause
    common: dict[str, Any] = {"stop_ids": (NEVER,), "context": 400}
    for cost, shape, oracle, last in (
        (14, CHAIN, (0.9, 0.0, 0.9), shared),
        (26, WIDE, (0.0, 0.9), longer),
    ):
        name = f"adaptive, a step takes {cost / 10} plain calls"
        yield _session(name, shape, [long, last], cost=cost, oracle=oracle, **common)
    with patch.object(
        scripted, "next_token", lambda context, vocab: 1 + next_token(context[-2:], 7)
    ):
        for shape in (CHAIN, WIDE):
            name = f"adaptive, repeated text, {shape}"
            yield _session(name, shape, [long, shared], oracle=(0.3,), **common)
        others = [_request([5, 6], mode, 9) for mode in ("plain", PLAIN_STEP, SPECULATIVE)]
        yield _session("no streams, other modes", CHAIN, others, streams=False, **common)
    with patch.object(scripted, "next_token", lambda context, vocab: 1 + next_token(context, 3)):
        # Three tokens are soon found again, but what follows them is another one.
        yield _session(
            "adaptive, no streams", CHAIN, [long, shared], streams=False, cost=26, **common
        )
    few: dict[str, Any] = {
        "streams": False,
        "has": GREEDY | {STEP_SHORT},
        "short": 1,
        "cost": 26,
        **common,
    }
    with patch.object(
        scripted, "next_token", lambda context, vocab: 1 + next_token(context[-4:], 4)
    ):
        starts = product(range(1, 5), repeat=4)  # a table with phrases of each length
        answers = [
            Sample((*start, *continuation(start, 60, VOCAB)), len(start)) for start in starts
        ]
        asked = [_request([5, 6, 7], ADAPTIVE, 90), _request([3, 9, 4], ADAPTIVE, 60)]
        yield _session("adaptive, no streams, steps of two lengths", CHAIN, asked, **few)
        yield _session(
            "the same with phrases", CHAIN, asked, phrases=phrase_table(answers, VOCAB), **few
        )


SAMPLERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.3},
    {"temperature": 0.8, "top_p": 0.9, "seed": (1 << 64) - 1},
    {"temperature": 0.7, "top_k": 7, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 9},
)


def _sampled() -> Iterator[dict[str, Any]]:
    """Tokens that the host chooses: the same with drafts and without."""
    for number, sampler in enumerate(SAMPLERS):
        shape = (CHAIN, WIDE)[number % 2]
        pairs = product(([5], [6, 7, 1, 2, 4]), ("plain", SPECULATIVE))
        requests = [_request(prompt, mode, 20, **sampler) for prompt, mode in pairs]
        yield _session(f"sampled, {shape}", shape, requests, has=CHOOSING, stop_ids=(0, NEVER))
    mixed = [_request([9, 8], ADAPTIVE, 60, temperature=0.4), _request([9, 8, 7], ADAPTIVE, 30)] * 2
    yield _session("sampled and greedy, adaptive", WIDE, mixed, has=CHOOSING, context=100, cost=30)
    bias = {"logit_bias": {"5": 14.0, "6": 10.0}, "temperature": 0.4, "seed": 3}
    repeating = [_request([5, 6, 7] * 3, ADAPTIVE, 60, **bias)]
    yield _session(
        "sampled, no streams", CHAIN, repeating, has=CHOOSING, context=100, streams=False
    )


def _session(
    what: str,
    shape: str,
    requests: Sequence[Answer],
    *,
    has: frozenset[str] = GREEDY,
    streams: bool = True,
    stop_ids: Sequence[int] = (0,),
    context: int = 40,
    cost: int = 16,
    oracle: Sequence[float] = (0.7,),
    short: int = 0,
    phrases: bytes = b"",
) -> dict[str, Any]:
    """A session's answers.

    ``cost``: of a step, in tenths of a plain call. ``oracle``: how often drafts are right, for some
    calls each. ``short``: drafts of a short step. ``phrases``: a table of them.
    """
    tree = Tree.parse(shape)
    chooses = VERIFY in has
    sizes = make_geometry(tree, vocab=VOCAB, context=context, short=short)
    geometry = Geometry(**{**vars(sizes), "hidden": HIDDEN if chooses else 0})
    steps = {STEP: 10 * cost, STEP_SHORT: 8 * cost, VERIFY: 9 * cost, DRAFT: cost}
    made = Recorder(len(what), {PREFILL: 500, PLAIN: 100, VERIFY_PLAIN: 110, **steps})
    planted: list[int] = []
    guesses = [(share, random_drafter(0, share)) for share in oracle]
    draw = Random(1)

    def drafter(cache: ScriptedCache, after: Sequence[int]) -> NDArray[np.int32]:
        if not streams:
            return np.zeros((geometry.gamma, geometry.k), np.int32)
        share, guess = guesses[len(made.calls) // 50 % len(guesses)]
        drafts = guess(cache, after)
        for stream, token in enumerate(planted[len(after) + 1 :][: geometry.gamma]):
            if draw.random() < share:
                rank = draw.randrange(geometry.k + 1)
                drafts[stream, rank if rank < geometry.k else slice(None)] = (
                    token  # also twice: the lowest node counts
                )
        return drafts

    class Cache(ChoosingCache if chooses else RecordingCache):  # type: ignore[misc]
        recorder = made

    engine = ScriptedEngine(geometry, drafter, Cache)
    engine.functions = has if streams else has - {DRAFT}
    session = Session(engine, _tokenizer(tuple(stop_ids)))
    known = Phrases(phrases, VOCAB) if phrases else None
    session._adaptive[session._conversation] = {
        choosing: Adaptive(Lookup() if streams else LookupOnly(known), made.clock)
        for choosing in (False, True)
    }
    answers = []
    for request in requests:
        begin = len(made.calls)
        sampling = sampling_of(request) if "sampling" in request else None
        asked = {name: request[name] for name in ("max_tokens", "mode")}
        runs = [
            list(run.tokens) for run in session.runs(request["prompt"], sampling=sampling, **asked)
        ]
        planted[:] = [*request["prompt"], *chain.from_iterable(runs)] if sampling else []
        answers.append(
            {**request, "reason": session.last.reason, "runs": runs, "calls": made.calls[begin:]}
        )
    return {
        "what": what,
        "geometry": {**to_json(geometry), "tree": [list(path) for path in geometry.tree.paths[1:]]},
        "functions": sorted(engine.functions),
        "streams": streams,
        "stop_ids": list(stop_ids),
        **({"phrases": list(memoryview(phrases).cast("I"))} if phrases else {}),
        "answers": answers,
    }


@cache
def _tokenizer(stop_ids: tuple[int, ...]) -> ChatTokenizer:
    return ChatTokenizer(
        scripted.make_tokenizer().tokenizer, ChatFormat(scripted.TEMPLATE, {}, stop_ids)
    )
