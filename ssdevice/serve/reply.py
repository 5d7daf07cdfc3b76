"""Answers as OpenAI's objects, whole and in pieces."""

from collections.abc import Iterator
from itertools import accumulate
from time import time
from typing import Any
from uuid import uuid4

from ssdevice.runtime.generation import Generation, Reason
from ssdevice.runtime.sampling.choice import Logprobs
from ssdevice.serve.request import Request
from ssdevice.text.call_stream import CallStream
from ssdevice.text.tokenizer import ChatTokenizer
from ssdevice.text.tools import answer_text, parse_calls

LEAST = -9999.0
"""OpenAI's number for the logarithm of 0, which JSON does not have."""


class Reply:
    """The objects of one answer. ``fingerprint``: of the bundle."""

    def __init__(self, request: Request, tokenizer: ChatTokenizer, fingerprint: str) -> None:
        self.request = request
        self.tokenizer = tokenizer
        self.chat = request.messages is not None
        self._head = self._head_of(fingerprint)
        self._style = request.style(tokenizer.chat.for_tools)
        self._watch: CallStream | None = None
        self._tokens = 0  # how many of the answer have been looked at
        self._sent = 0  # characters of its text
        self._offset = 0  # characters of the tokens with log-probabilities

    def _head_of(self, fingerprint: str) -> dict[str, Any]:
        """What all objects of the answer begin with."""
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if self.request.stream else "chat.completion"
        head = {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid4().hex}",
            "object": kind,
            "created": int(time()),
            "model": self.request.app,
            "system_fingerprint": fingerprint,
        }
        if self.request.samples:
            head["seed"] = self.request.sampling["seed"]
        if self.request.sampling.get("typical_acceptance"):
            head["inexact"] = True
        return head

    def whole(self, answer: Generation) -> dict[str, Any]:
        """The answer in one object."""
        text, logprobs = self._new(answer)
        calls = self._calls(answer)
        said: dict[str, Any] = {"text": answer.text}
        if self.chat:
            message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
            if calls:
                message["content"] = text.strip() or None
                message["tool_calls"] = calls
            said = {"message": message}
        found = self._object(said, logprobs, finish_reason(answer, bool(calls)))
        return {**found, "usage": usage(answer)}

    def pieces(self, answer: Generation) -> Iterator[dict[str, Any]]:
        """The objects of what an answer has more than at the last call."""
        if self.chat and not self._tokens:
            yield self._chunk({"role": "assistant", "content": ""})
        text, logprobs = self._new(answer)
        if text or logprobs:
            yield self._chunk({"content": text}, logprobs)
        if answer.reason is None:
            return
        calls = self._calls(answer)
        rest = answer.text[self._sent :]
        if calls:
            numbered = [{"index": i, **call} for i, call in enumerate(calls)]
            yield self._chunk({"tool_calls": numbered})
        elif rest:  # it looked like a call
            yield self._chunk({"content": rest})
        yield self._chunk({}, reason=finish_reason(answer, bool(calls)))
        if self.request.usage:
            yield {**self._chunk({}), "choices": [], "usage": usage(answer)}

    def _chunk(
        self, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None
    ) -> dict[str, Any]:
        said = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        found = self._object(said, logprobs, reason)
        return {**found, "usage": None} if self.request.usage else found

    def _object(self, said: dict[str, Any], logprobs: Any, reason: str | None) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [{"index": 0, **said, "logprobs": logprobs, "finish_reason": reason}],
        }

    def _new(self, answer: Generation) -> tuple[str, dict[str, Any] | None]:
        """The new text, as far as it is certainly no call, and the log-probabilities of the new
        tokens.
        """
        end = len(answer.text)
        if self.request.forced:
            end = 0
        elif self._style is not None:
            if self._watch is None:
                self._watch = CallStream(self.tokenizer, self._style, answer.thinking)
            end = min(end, self._watch.push(answer.tokens[self._tokens :]))
        text = answer.text[self._sent : end]
        self._sent = max(end, self._sent)
        logprobs = None
        if len(answer.logprobs) > self._tokens:
            logprobs = self._logprobs(answer, self._tokens)
        self._tokens = len(answer.tokens)
        return text, logprobs

    def _calls(self, answer: Generation) -> list[dict[str, Any]]:
        """The calls in an answer as OpenAI's ``tool_calls``; none if one is of a function that the
        request lacks.
        """
        if self._style is None:
            return []
        # What must be a call has no thoughts before it, whatever its prompt ends with.
        thinking = answer.thinking and not self.request.forced
        text = answer_text(self.tokenizer, answer.tokens)
        _, calls = parse_calls(text, self._style, thinking)
        known = {tool["function"]["name"] for tool in self.request.tools}
        if any(call.name not in known for call in calls):
            return []
        return [
            {
                "id": f"call_{uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.text},
            }
            for call in calls[: self.request.most_calls]
        ]

    def _logprobs(self, answer: Generation, start: int) -> dict[str, Any]:
        """The log-probabilities of the tokens from ``start`` on that are text; stop tokens are
        not.
        """
        found = []
        for at in range(start, len(answer.logprobs)):
            token = answer.tokens[at]
            first = at == 0 and not answer.continues
            if token not in self.tokenizer.stop_ids:
                found.append(self._entry(token, answer.logprobs[at], first))
        if self.chat:
            return {"content": found, "refusal": None}
        texts = [each["token"] for each in found]
        *offsets, self._offset = accumulate(map(len, texts), initial=self._offset)
        tops = []
        for each in found:
            tops.append({top["token"]: top["logprob"] for top in each["top_logprobs"]})
        return {
            "tokens": texts,
            "token_logprobs": [each["logprob"] for each in found],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _entry(self, token: int, logprobs: Logprobs, first: bool) -> dict[str, Any]:
        """A token with its alternatives. ``first``: of the answer."""
        others = [
            self._said(other, value, first)
            for other, value in zip(logprobs.ids, logprobs.values, strict=True)
        ]
        return {**self._said(token, logprobs.chosen, first), "top_logprobs": others}

    def _said(self, token: int, logprob: float, first: bool) -> dict[str, Any]:
        text, content = self.tokenizer.texts.said(token, first)
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": [*content]}


def finish_reason(answer: Generation, called: bool) -> str:
    """OpenAI's word for why an answer ended."""
    if called:
        return "tool_calls"
    return "stop" if answer.reason is Reason.STOP else "length"


def usage(answer: Generation) -> dict[str, Any]:
    """OpenAI's count of tokens."""
    prompt = answer.prompt_tokens
    completion = len(answer.tokens)
    counts = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    return {**counts, "prompt_tokens_details": {"cached_tokens": answer.cached_tokens}}
