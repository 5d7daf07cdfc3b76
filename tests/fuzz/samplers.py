"""Random options and rows of logits for the two samplers, NumPy's and the compiled one, the latter
under AddressSanitizer and UBSan: ``python -m tests.fuzz.samplers --count 20000``.

A process tries one case after the other (sanitized.py): an answer of a few tokens. Options are as
extreme as they may be, and sometimes more; rows hold what a good model returns, and what only a
damaged one does. Both samplers must choose the same tokens or refuse with the same words, and
nothing else may happen: no other exception, no warning of NumPy.
"""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from ssdevice.errors import BundleError, InputError
from ssdevice.runtime.sampling.choice import Chooser
from ssdevice.runtime.sampling.noise import Scores
from ssdevice.runtime.sampling.options import Sampling
from tests.fuzz import sanitized

MODULE = "tests.fuzz.samplers"
VOCABULARIES = (1, 2, 7, 31, 32, 33, 255, 256, 257, 300, 1000, 5000)
STOP = 0
STEPS = 3
SPECIAL = (np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1e30, -1e30, 1e-45, -1e-45, 0.0, -0.0)
SPREADS = (1e-44, 1e-38, 1e-10, 1e-3, 0.3, 1.0, 4.0, 50.0, 1e4, 1e10, 1e25, 1e30, 1e35, 1e38)
NUMBERS: dict[str, tuple[float, ...]] = {
    "temperature": (0.0, 1e-6, 1.1e-6, 1e-4, 0.01, 0.3, 0.7, 1.0, 1.0, 2.0, 100.0),
    "top_p": (1.0, 5e-324, 1e-17, 1e-6, 0.1, 0.5, 0.9, 0.999, 1 - 1e-16),
    "min_p": (0.0, 5e-324, 1e-17, 1e-3, 0.05, 0.5, 1.0),
    "typical_p": (1.0, 5e-324, 1e-17, 0.2, 0.5, 0.95, 1 - 1e-16),
    "repetition_penalty": (1.0, 0.01, 0.5, 1.1, 1.3, 100.0),
    "presence_penalty": (0.0, -100.0, -0.5, 1.5, 100.0),
    "frequency_penalty": (0.0, -100.0, -0.1, 0.7, 100.0),
}
"""Values within the ranges, their ends among them."""
BEYOND: dict[str, tuple[float, ...]] = {
    "temperature": (-1.0, 1e-300, 9e-7, 101.0, np.nan, np.inf),
    "top_p": (0.0, -0.5, 1.1, np.nan),
    "min_p": (-1e-9, 1.1, np.nan),
    "typical_p": (0.0, 1.1, np.nan),
    "repetition_penalty": (0.0, 1e-40, 1e-37, 0.0099, 101.0, np.nan, np.inf),
    "presence_penalty": (-101.0, 1e39, np.nan),
    "frequency_penalty": (101.0, -np.inf, np.nan),
}
WHOLE = {
    "top_k": (0, 0, 1, 2, 40, 256, 257, 4999, 1 << 31),
    "no_repeat_ngram_size": (0, 0, 0, 1, 2, 3),
    "min_new_tokens": (0, 0, 2),
    "min_length": (0, 0, 5),
    "logprobs": (None, None, 0, 1, 20, 300),
}
BIASES = (0.5, -2.5, 9.0, 100.0, -100.0, 1e30, -1e30, -np.inf, 1e-45)
BIASES_BEYOND = (1e31, -1e38, np.inf, np.nan, 10**400, -(10**400))


@dataclass(frozen=True)
class Case:
    """What is asked for, the ids before the answer, and the logits of its tokens ``[STEPS, V]``."""

    asked: dict[str, Any]
    prompt: tuple[int, ...]
    rows: Scores


def options(rng: Random, vocab: int) -> dict[str, Any]:
    """What is asked for: most options are left out."""
    asked: dict[str, Any] = {}
    for name, values in NUMBERS.items():
        if rng.random() < (0.9 if name == "temperature" else 0.35):
            asked[name] = rng.choice(values)
    for name, wholes in WHOLE.items():
        if rng.random() < 0.3:
            asked[name] = rng.choice(wholes)
    if rng.random() < 0.25:
        asked["logit_bias"] = biases(rng, vocab)
    for name in ("suppress", "begin_suppress"):
        if rng.random() < 0.1:
            asked[name] = tuple(rng.sample(range(vocab), rng.randint(1, vocab)))
    if rng.random() < 0.1:
        words = [rng.choices(range(vocab), k=rng.choice([1, 2, 3])) for _ in range(3)]
        asked["bad_words"] = tuple(map(tuple, words))
    if rng.random() < 0.1:
        asked |= beyond(rng, vocab)
    return {**asked, "seed": rng.choice([0, 7, rng.randrange(1 << 64)])}


def beyond(rng: Random, vocab: int) -> dict[str, Any]:
    """What is refused."""
    name = rng.choice([*BEYOND, "logit_bias"])
    if name == "logit_bias":
        return {name: {rng.randrange(vocab): rng.choice(BIASES_BEYOND)}}
    return {name: rng.choice(BEYOND[name])}


def biases(rng: Random, vocab: int) -> dict[int, float]:
    """Of some tokens or of all, each its own or all the same."""
    tokens = rng.sample(range(vocab), rng.randint(1, min(vocab, 5)))
    if rng.random() < 0.2 and vocab <= 300:
        tokens = [*range(vocab)]
    if rng.random() < 0.5:
        return {token: rng.choice(BIASES) for token in tokens}
    return dict.fromkeys(tokens, rng.choice(BIASES))


def row(rng: Random, vocab: int) -> Scores:
    """Logits of a token, ``[vocab]``."""
    draw = np.random.default_rng(rng.randrange(1 << 32))
    with np.errstate(over="ignore"):
        scores = (draw.normal(size=vocab) * rng.choice(SPREADS)).astype(np.float32)
        if rng.random() < 0.2:
            scores += np.float32(rng.choice(SPREADS))
    if rng.random() < 0.2:
        scores = np.round(scores)  # ties
    if rng.random() < 0.05:
        scores[:] = rng.choice(SPECIAL)
    if rng.random() < 0.25:
        np.putmask(scores, draw.random(vocab) < rng.choice([0.3, 0.9, 1.0]), -np.inf)
        scores[rng.randrange(vocab)] = rng.choice([0.0, 1.0, 4.0, -3.4e38])
    if rng.random() < 0.15:
        for _ in range(rng.choice([1, 1, 3])):
            scores[rng.randrange(vocab)] = rng.choice(SPECIAL)
    return scores


def case(seed: int, index: int) -> Case:
    """Case ``index``, the same every time."""
    rng = Random(f"{seed}/{index}/samplers")
    vocab = rng.choice(VOCABULARIES)
    prompt = tuple(rng.choices(range(vocab), k=rng.choice([1, 2, 9])))
    rows = np.stack([row(rng, vocab) for _ in range(STEPS)])
    return Case(options(rng, vocab), prompt, rows)


def answer_of(choose: Callable[[Scores], int], rows: Sequence[Scores]) -> list[int | str]:
    """Tokens, and at their end the error if there is one."""
    found: list[int | str] = []
    try:
        for each in rows:
            found.append(choose(each))
    except BundleError as error:
        found.append(f"model: {error}")
    except InputError as error:
        found.append(f"request: {error}")
    return found


def outcome(library: ctypes.CDLL, tried: Case) -> str:
    """What comes of a case, in one line."""
    vocab = tried.rows.shape[1]
    try:
        sampling = Sampling(**tried.asked)
    except InputError as error:
        return f"options {error}"
    plain = Chooser(sampling, tried.prompt, [STOP], vocab)
    compiled = Chooser(sampling, tried.prompt, [STOP], vocab, library=library)
    rows = [*tried.rows]
    expected = answer_of(plain, rows)
    found = answer_of(compiled, rows)
    if found != expected:
        return f"BUG {found} where NumPy has {expected}: {tried.asked}"
    for one, other in zip(compiled.logprobs, plain.logprobs, strict=True):
        if one.ids != other.ids or not np.isclose(one.chosen, other.chosen, rtol=1e-5, atol=2e-5):
            return f"BUG log-probabilities {one} where NumPy has {other}: {tried.asked}"
    last = found[-1]
    return f"refused-by-{last}" if isinstance(last, str) else "chosen"


def answer(library: str, seed: int, first: int, end: int) -> None:
    """Try cases and print a line for each."""
    warnings.simplefilter("error")
    loaded = ctypes.CDLL(library)
    for index in range(first, end):
        try:
            said = outcome(loaded, case(seed, index))
        except Exception as error:  # users would see a traceback
            said = f"BUG {type(error).__name__}: {error}"
        print(said.replace("\n", " ")[:2000], flush=True)


if __name__ == "__main__":
    sys.exit(sanitized.main(MODULE, "samplers", answer))
