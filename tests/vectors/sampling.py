"""Test vectors of sampling for hosts in every language: numbers of the noise, and the tokens of
whole answers.

Logits are not stored. Of row n, token i has, in unsigned integers of 32 bits and then in float64,
where all is exact::

    x = (i + 1) * 2654435761 + (n + 1) * 2246822519
    x = (x ^ (x >> 15)) * 2246822519
    z = ((x ^ (x >> 13)) >> 8) / 2^24
    logit = float32(16 * z * z - 8)

Step s has row s % 3.

An answer in ``choices`` has ``tokens``, chosen one after another with a ``seed`` (as text: it has
64 bits), and ``left``, the number of tokens that truncation left each time.

A case of ``rows`` is one choice from ``logits`` that no good model returns (as texts, since JSON
has no NaN and no infinity; all are float32): its ``token``, or who is at fault that there is none,
``refused``: ``model`` or ``request``. A case of ``options`` is what cannot be asked for, and how
messages about it end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssdevice.errors import BundleError, InputError
from ssdevice.runtime.sampling.choice import Chooser, truncated
from ssdevice.runtime.sampling.noise import gumbel, philox
from ssdevice.runtime.sampling.options import Processors, Sampling

FILE = Path(__file__).with_name("sampling.json")
STEPS = 12
STOP = 0
VOCABULARIES = (7, 256, 257, 5000)
SEEDS = (0, 7, 1 << 32, (1 << 64) - 1)
MARGIN = 1e-9
"""No case depends on the last digits of a library's exp or log: it is the same with values changed
by this much.
"""

SAMPLERS: tuple[Mapping[str, Any], ...] = (
    {"repetition_penalty": 1.3},
    {"temperature": 0.3},
    {"temperature": 0.7},
    {"temperature": 1.2},
    {"temperature": 100.0},
    {"temperature": 0.9, "top_k": 1},
    {"temperature": 0.9, "top_k": 5},
    {"temperature": 1.5, "top_k": 300},
    {"temperature": 0.8, "top_p": 0.1},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.0, "typical_p": 0.2},
    {"temperature": 1.1, "typical_p": 0.9},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.95, "min_p": 0.05, "typical_p": 0.8},
    {"temperature": 0.9, "repetition_penalty": 0.7},
    {"temperature": 0.5, "presence_penalty": 1.5, "frequency_penalty": 0.7},
    {
        "temperature": 0.5,
        "presence_penalty": -0.3,
        "frequency_penalty": -0.1,
        "repetition_penalty": 1.1,
    },
    {"temperature": 0.6, "logit_bias": {"3": 9.0, "5": -2.5, "6": 7.3}},
    {"temperature": 0.4, "no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3},
    {
        "temperature": 0.4,
        "bad_words": [[6], [1, 2], [2, 5, 1]],
        "logit_bias": {"1": 6.0, "2": 6.0, "5": 6.0},
    },
    {"temperature": 1.0, "suppress": [2, 4], "begin_suppress": [1, 6]},
    {"temperature": 0.7, "min_new_tokens": 6, "logit_bias": {"0": 12.0}},
    {"temperature": 0.7, "min_length": 11, "logit_bias": {"0": 12.0}},
    {"temperature": 0.7, "bad_words": [[0], [6]], "logit_bias": {"0": 7.0, "6": 9.0}},
)


NEVER = "-Infinity"
ROWS: tuple[tuple[str, ...], ...] = (
    ("0", "NaN", "1", "0"),
    ("NaN", "0", "1", "0"),
    ("0", "1", "0", "NaN"),
    ("0", "Infinity", "1", "0"),
    (NEVER, NEVER, NEVER, NEVER),
    (NEVER, "2", NEVER, NEVER),
    (NEVER, "NaN", NEVER, NEVER),
    ("1e37", "2e37", "1e37", "-1e37"),
    ("0", "3e38", "-3e38", "3e38"),
    ("1e37", "3e38", "1", "0"),
    ("-3e38", "-3e38", "-2e38", "-3e38"),
    ("-1e38", "-1e38", "-1e38", "-1e38"),
    ("0", "-3e38", "1", "-1e38"),
    ("1e-45", "0", "-1e-45", "1e-40"),
    ("5", "5", "5", "5"),
)
EXTREMES: tuple[Mapping[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.5, "top_p": 0.9},
    {"temperature": 0.5, "top_k": 2},
    {"temperature": 0.5, "min_p": 0.1},
    {"temperature": 0.5, "typical_p": 0.9},
    {"temperature": 1e-6, "top_p": 0.5},
    {"temperature": 1e-6, "typical_p": 0.5},
    {"temperature": 100.0, "repetition_penalty": 100.0, "top_p": 5e-324},
    {"temperature": 1e-6, "repetition_penalty": 0.01, "top_p": 0.5},
    {"temperature": 0.3, "repetition_penalty": 0.01},
    {"repetition_penalty": 100.0},
    {"temperature": 1.0, "suppress": [1]},
    {"temperature": 1.0, "suppress": [0, 1, 2, 3]},
    {"temperature": 1e-6, "top_p": 0.5, "logit_bias": dict.fromkeys("0123", -1e30)},
    {"temperature": 1e-6, "typical_p": 0.5, "logit_bias": {"1": 1e30, "2": -1e30}},
)
REFUSED: tuple[Mapping[str, Any], ...] = (
    {"temperature": -0.1},
    {"temperature": 1e-7},
    {"temperature": 101.0},
    {"top_p": 0.0},
    {"top_p": 1.5},
    {"min_p": 2.0},
    {"typical_p": 0.0},
    {"repetition_penalty": 1e-37},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": 101.0},
    {"presence_penalty": 101.0},
    {"frequency_penalty": -101.0},
    {"logit_bias": {"1": 1e31}},
    {"logit_bias": {"1": -1e38}},
)


def record() -> dict[str, Any]:
    """All vectors; they are the same every time."""
    return {
        "philox": _philox(),
        "noise": _noise(),
        "logits": _logits(),
        "choices": _choices(),
        "rows": [row_case(logits, asked) for logits, asked in product(ROWS, EXTREMES)],
        "options": [_options_case(asked) for asked in REFUSED],
    }


def text(vectors: Mapping[str, list[Any]]) -> str:
    """JSON with one case a line."""
    parts = (
        f'"{name}": [\n' + ",\n".join(map(json.dumps, cases)) + "\n]"
        for name, cases in vectors.items()
    )
    return "{" + ",\n".join(parts) + "}\n"


def row(vocab: int, number: int) -> NDArray[np.float32]:
    """The logits of a row, ``[vocab]``."""
    low = np.uint64(0xFFFFFFFF)
    x = (
        np.arange(1, vocab + 1, dtype=np.uint64) * np.uint64(2654435761)
        + np.uint64((number + 1) * 2246822519)
        & low
    )
    x = ((x ^ (x >> np.uint64(15))) * np.uint64(2246822519)) & low
    z = ((x ^ (x >> np.uint64(13))) >> np.uint64(8)).astype(np.float64) / 2**24
    return (16 * z * z - 8).astype(np.float32)


def logits(vocab: int, step: int) -> NDArray[np.float32]:
    """Those of a step."""
    return row(vocab, step % 3)


def sampling_of(case: Mapping[str, Any]) -> Sampling:
    """The ``Sampling`` of a case."""
    asked = dict(case["sampling"], seed=int(case["seed"]))
    asked["logit_bias"] = {int(token): bias for token, bias in asked.get("logit_bias", {}).items()}
    asked["bad_words"] = tuple(map(tuple, asked.get("bad_words", ())))
    for name, value in asked.items():
        if isinstance(value, list):
            asked[name] = tuple(value)
    return Sampling(**asked)


def answer(case: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Tokens, and how many truncation left each time."""
    sampling = sampling_of(case)
    prompt = case["prompt"]
    vocab = case["vocab"]
    choose = Chooser(sampling, prompt, [STOP], vocab)
    processors = Processors(sampling, prompt, [STOP], vocab)
    tokens: list[int] = []
    left: list[int] = []
    for step in range(STEPS):
        scores = processors(logits(vocab, step))
        token = choose(logits(vocab, step))
        if sampling.temperature:
            kept, ids = truncated(scores / np.float32(sampling.temperature), sampling)
            left.append(int(np.isfinite(kept).sum()))
            _check_margin(scores, sampling, left[-1])
            ids = np.arange(vocab) if ids is None else ids
            total = np.sort(
                kept.astype(np.float64) + gumbel(sampling.seed, len(prompt) + step, ids, vocab)
            )
            assert len(total) == 1 or total[-1] - total[-2] > MARGIN
        tokens.append(token)
        processors.accept(token)
    return tokens, left


def row_case(
    logits: Sequence[str], asked: Mapping[str, Any], seed: int = 7, prompt: Sequence[int] = (1,)
) -> dict[str, Any]:
    """A case of ``rows``, with what Python makes of it."""
    case: dict[str, Any] = {
        "logits": list(logits),
        "sampling": dict(asked),
        "seed": str(seed),
        "prompt": list(prompt),
        "stops": [STOP],
    }
    choose = Chooser(sampling_of(case), prompt, [STOP], len(logits))
    try:
        return {**case, "token": choose(np.array([float(each) for each in logits], np.float32))}
    except BundleError:
        return {**case, "refused": "model"}
    except InputError:
        return {**case, "refused": "request"}


def _options_case(asked: Mapping[str, Any]) -> dict[str, Any]:
    try:
        sampling_of({"sampling": asked, "seed": "0"})
    except InputError as error:
        said = str(error)
    marks = [said.find(mark) for mark in ("expected ", "no number from ")]
    return {"sampling": dict(asked), "message": said[max(marks) :]}


def _check_margin(scores: NDArray[np.float32], sampling: Sampling, left: int) -> None:
    for change in (1 - MARGIN, 1 + MARGIN):
        moved = {name: getattr(sampling, name) * change for name in ("top_p", "min_p", "typical_p")}
        other = replace(
            sampling, **{name: value for name, value in moved.items() if value < 1 - MARGIN}
        )
        kept, _ = truncated(scores / np.float32(sampling.temperature), other)
        assert int(np.isfinite(kept).sum()) == left, (sampling, other)


def _choices() -> list[dict[str, Any]]:
    cases = []
    for number, (vocab, sampling) in enumerate(product(VOCABULARIES, SAMPLERS)):
        prompt = [3, 1, 2, 5, 1, 2, vocab - 1][number % 3 :]
        seed = str(SEEDS[number % len(SEEDS)])
        case: dict[str, Any] = {
            "vocab": vocab,
            "sampling": dict(sampling),
            "seed": seed,
            "prompt": prompt,
        }
        case["stops"] = [STOP]
        case["tokens"], case["left"] = answer(case)
        cases.append(case)
    return cases


def _philox() -> list[dict[str, Any]]:
    cases = []
    for number, position, kind, seed in product(
        (0, 1, 191, 0xFFFFFFFF), (0, 77, 1 << 20), (0, 1), SEEDS
    ):
        words = [int(word) for word in philox(number, position, kind, seed)]
        cases.append(
            {
                "seed": str(seed),
                "number": number,
                "position": position,
                "kind": kind,
                "words": words,
            }
        )
    return cases


def _noise() -> list[dict[str, Any]]:
    cases = []
    for vocab, position, seed in product(VOCABULARIES, (0, 31, 1 << 20), SEEDS):
        ids = np.unique(np.linspace(0, vocab - 1, 9).astype(np.int64))
        noise = gumbel(seed, position, ids, vocab).tolist()
        cases.append({"seed": str(seed), "position": position, "ids": ids.tolist(), "noise": noise})
    return cases


def _logits() -> list[dict[str, Any]]:
    return [{"step": step, "first": logits(5, step).tolist()} for step in range(4)]
