"""What changes logits before a token is chosen from them: the field's logits processors, for one row at a time.

They see tokens as they are accepted, so that their work does not grow with the text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from ssdevice.errors import InputError
from ssdevice.runtime.sampling.noise import Scores
from ssdevice.runtime.sampling.options import Sampling

NEVER = np.float32(-np.inf)


class Processors:
    """The processors of a request, in ``transformers``' order, and the text that they have seen.

    ``prompt``: the ids before the answer. ``stops``: tokens that end an answer.
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int], stops: Sequence[int], vocab: int) -> None:
        self.sampling = sampling
        self.ids = list(prompt)
        self._prompt = len(self.ids)
        self._stops = [stop for stop in stops if stop < vocab]  # a tokenizer may have more tokens than the model
        # As in transformers, where a stop token is not banned: no answer would end.
        self._bad = [word for word in sampling.bad_words if len(word) > 1 or word[0] not in stops]
        self._seen = np.zeros(vocab, bool)
        self._seen[self.ids] = True
        self._counts = np.zeros(vocab, np.float32)
        self._followers: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for end in range(1, len(self.ids) + 1):
            self._index(end)
        self._bias = (
            np.array(list(sampling.logit_bias), np.int64),
            np.array(list(sampling.logit_bias.values()), np.float32),
        )

    def accept(self, token: int) -> None:
        """Take in the next token of the answer."""
        self.ids.append(token)
        self._seen[token] = True
        self._counts[token] += 1
        self._index(len(self.ids))

    def __call__(self, logits: Scores) -> Scores:
        """The processed logits of the token after ``ids``; ``logits [V]`` stay as they are."""
        s, scores = self.sampling, logits.copy()
        if s.logit_bias:
            scores[self._bias[0]] += self._bias[1]
        if s.repetition_penalty != 1.0:
            penalty, at = np.float32(s.repetition_penalty), np.flatnonzero(self._seen)
            seen = scores[at]
            scores[at] = np.where(seen < 0, seen * penalty, seen / penalty)
        if s.presence_penalty or s.frequency_penalty:
            at = np.flatnonzero(self._counts != 0)  # sooner than of numbers
            presence, frequency = np.float32(s.presence_penalty), np.float32(s.frequency_penalty)
            scores[at] -= presence + frequency * self._counts[at]
        if banned := self._banned():
            scores[banned] = NEVER
        for processor in s.processors:
            scores = np.ascontiguousarray(processor(self.ids, scores), np.float32)
            if scores.shape != logits.shape:
                raise InputError(f"a processor returned scores {list(scores.shape)}, expected {list(logits.shape)}")
        return scores

    def _banned(self) -> list[int]:
        s, ids = self.sampling, self.ids
        new = len(ids) - self._prompt
        banned = list(s.suppress)
        if new == 0:
            banned += s.begin_suppress
        if new < s.min_new_tokens or len(ids) < s.min_length:
            banned += self._stops
        if s.no_repeat_ngram_size and len(ids) >= s.no_repeat_ngram_size - 1:
            banned += self._followers.get(tuple(ids[len(ids) - s.no_repeat_ngram_size + 1 :]), ())
        for *before, last in self._bad:
            if len(before) <= len(ids) and ids[len(ids) - len(before) :] == before:
                banned.append(last)
        return banned

    def _index(self, end: int) -> None:
        """Remember the n-gram that ends with the token before ``end``."""
        size = self.sampling.no_repeat_ngram_size
        if size and end >= size:
            *before, last = self.ids[end - size : end]
            self._followers[tuple(before)].append(last)
