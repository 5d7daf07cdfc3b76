"""What a user may ask of the choice of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssdevice.bundle.sampling import ModelSampling
from ssdevice.errors import InputError
from ssdevice.runtime.sampling.noise import SEEDS
from ssdevice.runtime.structure.options import Structure

Scores = NDArray[np.float32]
Processor = Callable[[Sequence[int], Scores], Scores]
"""``(ids, scores [V]) -> scores [V]``, after all other processors and before the temperature; see ``Sampling``."""
MAX_LOGPROBS = 1000
DRAWING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed")
"""Fields of Sampling that ask for sampling, unless the temperature is 0."""


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from logits; the defaults choose greedily.

    Meaning and order are those of ``transformers``' logits processors: ``repetition_penalty`` (of prompt and answer),
    ``presence_penalty`` and ``frequency_penalty`` (OpenAI's, of the answer), ``no_repeat_ngram_size``, ``bad_words``
    (sequences of token ids), ``min_new_tokens`` (no stop token before) and ``min_length`` (the same, of prompt and
    answer), ``suppress`` and ``begin_suppress`` (token ids; the latter for the first token only), ``logit_bias`` (added
    by token id), ``processors``; then, if ``temperature`` is above 0, ``temperature``, ``top_k`` (0: all), ``top_p``,
    ``min_p`` and ``typical_p``. The token is the largest of these scores plus the noise of ``seed`` and position
    (``ssdevice.runtime.sampling.noise``).

    ``structure``: the form that the answer must have; tokens that it does not allow are excluded after the processors
    and before the temperature.

    ``logprobs``: how many log-probabilities to report for each token, None for none; they are of the model's own
    logits. Raises InputError for a value outside of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0
    min_length: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    suppress: tuple[int, ...] = ()
    begin_suppress: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    logprobs: int | None = None
    processors: tuple[Processor, ...] = ()
    structure: Structure | None = None

    def __post_init__(self) -> None:
        for name, low, high, what in _RANGES:
            value = getattr(self, name)
            whole = isinstance(getattr(Sampling, name), int)
            kind = isinstance(value, int) if whole else isinstance(value, (int, float))
            if not kind or isinstance(value, bool) or not low <= value <= high or math.isinf(value):
                raise InputError(f"{name} is {value!r}, expected {what}")
        if 0 < self.temperature < 1e-6:
            raise InputError(f"temperature is {self.temperature!r}, expected 0 (greedy), or 1e-6 to 100")
        if self.logprobs is not None and (type(self.logprobs) is not int or not 0 <= self.logprobs <= MAX_LOGPROBS):
            raise InputError(f"logprobs is {self.logprobs!r}, expected 0 to {MAX_LOGPROBS}")
        if not all(type(bias) in (int, float) and not math.isnan(bias) for bias in self.logit_bias.values()):
            raise InputError("logit_bias has a value that is no number")
        if self.structure is not None and not isinstance(self.structure, Structure):
            raise InputError(f"structure is {type(self.structure).__name__}, expected Structure")
        if not all(self.bad_words):
            raise InputError("bad_words has a sequence without tokens")

    @classmethod
    def sampled(cls, model: ModelSampling | None, **asked: Any) -> Sampling:
        """Sampling as asked for; what is not, as the model recommends; else with the defaults, at temperature 1."""
        return cls(**{"temperature": 1.0, **(model.named() if model is not None else {}), **asked})

    @staticmethod
    def draws(asked: Mapping[str, Any]) -> bool:
        """Whether these fields, as a user names them, ask for sampling."""
        return asked.get("temperature") != 0 and any(name in asked for name in DRAWING)

    @property
    def greedy(self) -> bool:
        """Whether every token is the argmax of the model's own logits, and nothing else is asked for."""
        return not (self.temperature or self.processed or self.structure) and self.logprobs is None

    @property
    def processed(self) -> bool:
        """Whether anything changes the logits before the temperature does."""
        return any(getattr(self, name) != getattr(_PLAIN, name) for name in _PROCESSED)

    @property
    def truncates(self) -> bool:
        """Whether sampling leaves out tokens for their probability."""
        return bool(self.top_k or self.min_p) or self.top_p < 1 or self.typical_p < 1

    def check_ids(self, vocab: int) -> None:
        """Raise InputError for a token id that the model does not have."""
        ids = [*self.logit_bias, *self.suppress, *self.begin_suppress, *(i for word in self.bad_words for i in word)]
        for token in ids:
            if type(token) is not int or not 0 <= token < vocab:
                raise InputError(f"token {token!r} is not one of the model's {vocab}")


_UNIT, _SMALL = 1.0, 5e-324
_RANGES = (
    ("temperature", 0.0, 100.0, "0 (greedy) to 100"),
    ("top_k", 0, 1 << 31, "0 (all) or more"),
    ("top_p", _SMALL, _UNIT, "more than 0, at most 1"),
    ("min_p", 0.0, _UNIT, "0 to 1"),
    ("typical_p", _SMALL, _UNIT, "more than 0, at most 1"),
    ("repetition_penalty", _SMALL, 100.0, "more than 0, at most 100"),
    ("presence_penalty", -100.0, 100.0, "-100 to 100"),
    ("frequency_penalty", -100.0, 100.0, "-100 to 100"),
    ("no_repeat_ngram_size", 0, 1 << 31, "0 (no ban) or more"),
    ("min_new_tokens", 0, 1 << 31, "0 or more"),
    ("min_length", 0, 1 << 31, "0 or more"),
    ("seed", 0, SEEDS - 1, "0 to 2^64 - 1"),
)
_AFTERWARDS = frozenset(("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "logprobs", "structure"))
_PROCESSED = tuple(each.name for each in fields(Sampling) if each.name not in _AFTERWARDS)
_PLAIN = Sampling()
