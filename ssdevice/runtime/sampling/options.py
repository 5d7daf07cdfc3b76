"""What a user may ask of the choice of tokens, and the processors of logits that it takes."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, Self

import numpy as np

from ssdevice.bundle.sampling import MOST, ModelSampling
from ssdevice.errors import InputError
from ssdevice.rules import Rule, Ruled, within
from ssdevice.runtime.sampling.noise import SEEDS, Scores
from ssdevice.runtime.sampling.structure import Structure

Processor = Callable[[Sequence[int], Scores], Scores]
"""``(ids, scores [V]) -> scores [V]``, after all other processors and before the temperature; see
``Sampling``.
"""
MAX_LOGPROBS = 1000
NEVER = np.float32(-np.inf)
PART: Rule = {"exclusiveMinimum": 0, "maximum": 1}
LEAST_TEMPERATURE = 1e-6
"""Of sampling. With it and the other bounds, scores are finite for logits up to 1e30: those are at
most ``(1e30 + LARGEST_BIAS) / LEAST_PENALTY / LEAST_TEMPERATURE`` = 2e38, and a float32 at most
3.4e38. Users of OpenAI (penalties of -2 to 2, biases of -100 to 100, temperatures up to 2), vLLM
(which raises temperatures below 0.01 to that) and transformers are far inside.
"""
LEAST_PENALTY = 0.01
LARGEST_BIAS = 1e30
DRAWING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "typical_acceptance")
"""Fields of Sampling that ask for sampling, unless the temperature is 0."""


@dataclass(frozen=True)
class Sampling(Ruled):
    """How a token is chosen from logits; the defaults choose greedily.

    Meaning and order are those of ``transformers``' logits processors: ``repetition_penalty`` (of
    prompt and answer), ``presence_penalty`` and ``frequency_penalty`` (OpenAI's, of the answer),
    ``no_repeat_ngram_size``, ``bad_words`` (sequences of token ids), ``min_new_tokens`` (no stop
    token before) and ``min_length`` (the same, of prompt and answer), ``suppress`` and
    ``begin_suppress`` (token ids; the latter for the first token only), ``logit_bias`` (added by
    token id; -inf bans one), ``processors``, the tokens that ``structure`` allows; then, if
    ``temperature`` is above 0, ``temperature``, ``top_k`` (0: all), ``top_p``, ``min_p`` and
    ``typical_p``. The largest of these scores plus the noise of ``seed`` and position wins
    (``ssdevice.runtime.sampling.noise``). ``logprobs``: how many to report for each token, from the
    model's own logits; None for none.

    ``typical_acceptance``: **inexact**. ε of typical acceptance (2401.10774), 0 for none: steps
    also take drafts that are likely enough, which changes the text and its distribution, more so
    for small ε. It needs a temperature and allows only truncations. Raises InputError for that, and
    for a value out of range.
    """

    temperature: float = field(default=0.0, metadata=within(0, 100))
    top_k: int = field(default=0, metadata=within(0, MOST))
    top_p: float = field(default=1.0, metadata=PART)
    min_p: float = field(default=0.0, metadata=within(0, 1))
    typical_p: float = field(default=1.0, metadata=PART)
    repetition_penalty: float = field(default=1.0, metadata=within(LEAST_PENALTY, 100))
    presence_penalty: float = field(default=0.0, metadata=within(-100, 100))
    frequency_penalty: float = field(default=0.0, metadata=within(-100, 100))
    no_repeat_ngram_size: int = field(default=0, metadata=within(0, MOST))
    min_new_tokens: int = field(default=0, metadata=within(0, MOST))
    min_length: int = field(default=0, metadata=within(0, MOST))
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    suppress: tuple[int, ...] = ()
    begin_suppress: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int = field(default=0, metadata=within(0, SEEDS - 1))
    logprobs: int | None = field(default=None, metadata=within(0, MAX_LOGPROBS))
    processors: tuple[Processor, ...] = ()
    structure: Structure | None = None
    typical_acceptance: float = field(default=0.0, metadata=within(0, 1))

    def __post_init__(self) -> None:
        for each in fields(self):
            _check_type(each, getattr(self, each.name))
        super().__post_init__()
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise InputError(
                f"temperature is {self.temperature!r}, expected 0 (greedy), or 1e-6 to 100"
            )
        for token, bias in self.logit_bias.items():
            _check_bias(token, bias)
        if self.structure is not None and not isinstance(self.structure, Structure):
            raise InputError(f"structure is {type(self.structure).__name__}, expected Structure")
        if not all(self.bad_words):
            raise InputError("bad_words has a sequence without tokens")
        if self.typical_acceptance and (
            not self.temperature or self.processed or self.structure is not None
        ):
            raise InputError(
                "typical_acceptance goes with a temperature above 0 and truncations, not with a "
                "structure or what else changes logits"
            )

    @classmethod
    def sampled(cls, model: ModelSampling | None, **asked: Any) -> Self:
        """Sampling as asked for; what is not, as the model recommends; else with the defaults, at
        temperature 1.
        """
        return cls(**{"temperature": 1.0, **(model.named() if model is not None else {}), **asked})

    @staticmethod
    def draws(asked: Mapping[str, Any]) -> bool:
        """Whether these fields, as a user names them, ask for sampling."""
        return asked.get("temperature") != 0 and any(name in asked for name in DRAWING)

    @property
    def greedy(self) -> bool:
        """Whether every token is the argmax of the model's own logits, and nothing else is asked
        for.
        """
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
        ids = [*self.logit_bias, *self.suppress, *self.begin_suppress]
        for word in self.bad_words:
            ids += word
        for token in ids:
            if type(token) is not int or not 0 <= token < vocab:
                raise InputError(f"token {token!r} is not one of the model's {vocab}")


def _check_type(option: Field[Any], value: Any) -> None:
    """Raise InputError for an option that should be a number and is none."""
    if not option.metadata or value is option.default:
        return
    if isinstance(option.default, float):
        if type(value) is bool or not isinstance(value, int | float):
            raise InputError(f"{option.name} is {value!r}, expected a number")
    elif type(value) is bool or not isinstance(value, int):
        raise InputError(f"{option.name} is {value!r}, expected a whole number")


def _check_bias(token: int, bias: Any) -> None:
    """Raise InputError for a bias that scores cannot have added."""
    if type(bias) not in (int, float):
        raise InputError(f"logit_bias of token {token} is {bias!r}, expected a number")
    if not -LARGEST_BIAS <= bias <= LARGEST_BIAS and bias != -math.inf:
        raise InputError(
            f"logit_bias of token {token} is no number from -1e30 to 1e30, nor -inf, which bans it"
        )


_AFTERWARDS = frozenset((*DRAWING, "logprobs", "structure"))
_PROCESSED = tuple(each.name for each in fields(Sampling) if each.name not in _AFTERWARDS)
_PLAIN = Sampling()


class Processors:
    """The logits processors of a request, in ``transformers``' order, for one row at a time.

    They see tokens as they are accepted, so that their work does not grow with the text.
    ``prompt``: the ids before the answer. ``stops``: tokens that end an answer.
    """

    def __init__(
        self, sampling: Sampling, prompt: Sequence[int], stops: Sequence[int], vocab: int
    ) -> None:
        self.sampling = sampling
        self.ids = list(prompt)
        self._prompt = len(prompt)
        # A tokenizer may have more tokens than the model.
        self._stops = [stop for stop in stops if stop < vocab]
        # As in transformers, where a stop token is not banned: no answer would end.
        self._bad = [word for word in sampling.bad_words if len(word) > 1 or word[0] not in stops]
        self._seen = np.zeros(vocab, bool)
        self._counts = np.zeros(vocab, np.float32)
        self._seen[self.ids] = True
        self._followers: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for end in range(1, len(self.ids) + 1):
            self._index(end)
        self._biased = np.array(list(sampling.logit_bias), np.int64)
        self._bias = np.array(list(sampling.logit_bias.values()), np.float32)

    def accept(self, token: int) -> None:
        """Take in the next token of the answer."""
        self.ids.append(token)
        self._seen[token] = True
        self._counts[token] += 1
        self._index(len(self.ids))

    def __call__(self, logits: Scores) -> Scores:
        """The processed logits of the token after ``ids``; ``logits [V]`` stay as they are.

        What overflows float32 becomes infinite, as in every host. Raises InputError for what
        ``processors`` must not return.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            scores = self._penalized(logits)
        scores[self._banned()] = NEVER
        for processor in self.sampling.processors:
            before = scores
            scores = np.ascontiguousarray(processor(self.ids, before), np.float32)
            if scores.shape != logits.shape:
                raise InputError(
                    f"a processor returned scores {list(scores.shape)}, "
                    f"expected {list(logits.shape)}"
                )
            if not np.max(scores) < np.inf and np.max(before) < np.inf:
                raise InputError("a processor returned scores with NaN or infinity")
        return scores

    def _penalized(self, logits: Scores) -> Scores:
        """A copy of ``logits [V]`` with biases and penalties."""
        s = self.sampling
        scores = logits.copy()
        scores[self._biased] += self._bias
        if s.repetition_penalty != 1.0:
            penalty = np.float32(s.repetition_penalty)
            at = np.flatnonzero(self._seen)
            seen = scores[at]
            scores[at] = np.where(seen < 0, seen * penalty, seen / penalty)
        if s.presence_penalty or s.frequency_penalty:
            at = np.flatnonzero(self._counts != 0)  # sooner than of numbers
            presence = np.float32(s.presence_penalty)
            frequency = np.float32(s.frequency_penalty)
            scores[at] -= presence + frequency * self._counts[at]
        return scores

    def _banned(self) -> list[int]:
        s = self.sampling
        ids = self.ids
        new = len(self.ids) - self._prompt
        banned = [*s.suppress, *(() if new else s.begin_suppress)]
        if new < s.min_new_tokens or len(ids) < s.min_length:
            banned += self._stops
        if s.no_repeat_ngram_size and len(ids) >= s.no_repeat_ngram_size - 1:
            banned += self._followers.get(tuple(ids[len(ids) - s.no_repeat_ngram_size + 1 :]), ())
        ends = ((len(ids) - len(before), before, last) for *before, last in self._bad)
        return banned + [last for at, before, last in ends if at >= 0 and ids[at:] == before]

    def _index(self, end: int) -> None:
        """Remember the n-gram that ends with the token before ``end``."""
        size = self.sampling.no_repeat_ngram_size
        if size and end >= size:
            *before, last = self.ids[end - size : end]
            self._followers[tuple(before)].append(last)
