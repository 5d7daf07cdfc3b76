"""Answers as OpenAI's objects, whole and in pieces."""

from collections.abc import Iterator
from itertools import accumulate
from time import time
from typing import Any
from uuid import uuid4

from ssdevice.runtime.generation import Generation, Reason
from ssdevice.serve.guard import json_of
from ssdevice.serve.request import Request
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
        self._head = {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid4().hex}",
            "object": "text_completion"
            if not self.chat
            else f"chat.completion{'.chunk' * request.stream}",
            "created": int(time()),
            "model": request.app,
            "system_fingerprint": fingerprint,
            **({"seed": request.sampling["seed"]} if request.samples else {}),
            **({"inexact": True} if request.sampling.get("typical_acceptance") else {}),
        }
        self._style = request.style(tokenizer.chat.for_tools)
        # Special tokens are no text, but a call may begin with one: tokens are searched, not the
        # text.
        self._search = tokenizer.output(self._style.openings) if self._style is not None else None
        self._tokens = self._before = self._sent = self._offset = 0

    def whole(self, answer: Generation) -> dict[str, Any]:
        """The answer in one object."""
        text, logprobs = self._new(answer)
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if calls := self._calls(answer):
            message |= {"content": text.strip() or None, "tool_calls": calls}
        said = {"message": message} if self.chat else {"text": answer.text}
        return self._object(said, logprobs, finish_reason(answer, bool(calls))) | {
            "usage": usage(answer)
        }

    def pieces(self, answer: Generation) -> Iterator[dict[str, Any]]:
        """The objects of what an answer has more than at the last call."""
        if self.chat and not self._tokens:
            yield self._chunk({"role": "assistant", "content": ""})
        text, logprobs = self._new(answer)
        if text or logprobs:
            yield self._chunk({"content": text}, logprobs)
        if answer.reason is None:
            return
        if calls := self._calls(answer):
            yield self._chunk(
                {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]}
            )
        elif rest := answer.text[self._sent :]:  # it looked like a call
            yield self._chunk({"content": rest})
        yield self._chunk({}, reason=finish_reason(answer, bool(calls)))
        if self.request.usage:
            yield {**self._chunk({}), "choices": [], "usage": usage(answer)}

    def _chunk(
        self, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None
    ) -> dict[str, Any]:
        said = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        return self._object(said, logprobs, reason) | (
            {"usage": None} if self.request.usage else {}
        )

    def _object(self, said: dict[str, Any], logprobs: Any, reason: str | None) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [{"index": 0, **said, "logprobs": logprobs, "finish_reason": reason}],
        }

    def _new(self, answer: Generation) -> tuple[str, dict[str, Any] | None]:
        """The new text, as far as it is certainly no call, and the log-probabilities of the new
        tokens.
        """
        end = 0 if self.request.forced else len(answer.text)
        if self._search is not None:
            self._before += len(self._search.push(answer.tokens[self._tokens :]).text)
            end = min(end, self._before)
        text = answer.text[self._sent : end]
        self._sent = max(end, self._sent)
        logprobs = (
            self._logprobs(answer, self._tokens) if len(answer.logprobs) > self._tokens else None
        )
        self._tokens = len(answer.tokens)
        return text, logprobs

    def _calls(self, answer: Generation) -> list[dict[str, Any]]:
        """The calls in an answer as OpenAI's ``tool_calls``; none if one is of a function that the
        request lacks.
        """
        if self._style is None:
            return []
        _, calls = parse_calls(answer_text(self.tokenizer, answer.tokens), self._style)
        if {call.name for call in calls} - {
            tool["function"]["name"] for tool in self.request.tools
        }:
            return []
        functions = [
            {"name": call.name, "arguments": json_of(call.arguments).decode()} for call in calls
        ]
        return [
            {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": each}
            for each in functions
        ]

    def _logprobs(self, answer: Generation, start: int) -> dict[str, Any]:
        """The log-probabilities of the tokens from ``start`` on that are text; stop tokens are not."""
        pairs = enumerate(zip(answer.tokens[start:], answer.logprobs[start:], strict=True), start)
        found = [
            {
                **self._entry(token, each.chosen, at == 0 and not answer.continues),
                "top_logprobs": [
                    self._entry(*other, at == 0 and not answer.continues)
                    for other in zip(each.ids, each.values, strict=True)
                ],
            }
            for at, (token, each) in pairs
            if token not in self.tokenizer.stop_ids
        ]
        if self.chat:
            return {"content": found, "refusal": None}
        texts = [each["token"] for each in found]
        *offsets, self._offset = accumulate(map(len, texts), initial=self._offset)
        return {
            "tokens": texts,
            "token_logprobs": [each["logprob"] for each in found],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in each["top_logprobs"]} for each in found
            ],
            "text_offset": offsets,
        }

    def _entry(self, token: int, logprob: float, first: bool) -> dict[str, Any]:
        text, content = self.tokenizer.texts.said(token, first)
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": [*content]}


def finish_reason(answer: Generation, called: bool) -> str:
    """OpenAI's word for why an answer ended."""
    return "tool_calls" if called else "stop" if answer.reason is Reason.STOP else "length"


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
