"""Answers as OpenAI's objects, whole and in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from time import time
from typing import Any
from uuid import uuid4

from ssdevice.runtime.generation import Generation, Reason
from ssdevice.runtime.sampling.choice import Logprobs
from ssdevice.serve.calls import as_json, calls_in
from ssdevice.serve.decoder import Piece
from ssdevice.serve.request import Request
from ssdevice.text.tokenizer import ChatTokenizer

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
            "created": int(time()),
            "model": request.app,
            "system_fingerprint": fingerprint,
            **({"seed": request.sampling["seed"]} if request.samples else {}),
        }
        self._shown = self._offset = 0

    def whole(self, answer: Generation) -> dict[str, Any]:
        """The answer in one object."""
        calls = calls_in(answer, self.request, self.tokenizer)
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if calls:
            message |= {"content": answer.text[: self._shown].strip() or None, "tool_calls": as_json(calls)}
        said = {"message": message} if self.chat else {"text": answer.text}
        choice = {
            "index": 0,
            **said,
            "logprobs": self._logprobs(answer.tokens, answer.logprobs),
            "finish_reason": finish_reason(answer, bool(calls)),
        }
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head, "object": kind, "choices": [choice], "usage": usage(answer)}

    def begin(self) -> Iterator[dict[str, Any]]:
        """What a stream begins with."""
        if self.chat:
            yield self._chunk({"role": "assistant", "content": ""})

    def show(self, piece: Piece) -> None:
        """Take in a piece."""
        self._shown += len(piece.text)

    def piece(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """The object of a piece; none for one with nothing to show."""
        self.show(piece)
        logprobs = self._logprobs(piece.tokens, piece.logprobs)
        if piece.text or logprobs:
            yield self._chunk({"content": piece.text}, logprobs)

    def end(self, answer: Generation) -> Iterator[dict[str, Any]]:
        """What a stream ends with."""
        calls = calls_in(answer, self.request, self.tokenizer)
        if calls:
            yield self._chunk({"tool_calls": [{"index": i, **call} for i, call in enumerate(as_json(calls))]})
        elif rest := answer.text[self._shown :]:  # it looked like a call
            yield self._chunk({"content": rest})
        yield self._chunk({}, reason=finish_reason(answer, bool(calls)))
        if self.request.usage:
            yield {**self._chunk({}), "choices": [], "usage": usage(answer)}

    def _chunk(self, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
        said = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        choice = {"index": 0, **said, "logprobs": logprobs, "finish_reason": reason}
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        unused = {"usage": None} if self.request.usage else {}
        return {**self._head, "object": kind, "choices": [choice], **unused}

    def _logprobs(self, tokens: Sequence[int], found: Sequence[Logprobs]) -> dict[str, Any] | None:
        """The log-probabilities of the tokens that are text; stop tokens are not."""
        if not found:
            return None
        stops = self.tokenizer.stop_ids
        kept = [(token, each) for token, each in zip(tokens, found, strict=True) if token not in stops]
        if self.chat:
            return {
                "content": [
                    {**self._entry(token, each.chosen), "top_logprobs": list(map(self._entry, each.ids, each.values))}
                    for token, each in kept
                ],
                "refusal": None,
            }
        texts = [self._text(token) for token, _ in kept]
        offsets = [self._offset, *accumulate(map(len, texts), initial=self._offset)][1:]
        self._offset = offsets[-1]
        return {
            "tokens": texts,
            "token_logprobs": [max(each.chosen, LEAST) for _, each in kept],
            "top_logprobs": [
                {self._text(i): max(value, LEAST) for i, value in zip(each.ids, each.values, strict=True)}
                for _, each in kept
            ],
            "text_offset": offsets[:-1],
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        content = None if "\ufffd" in text else list(text.encode())  # a part of a character
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": content}

    def _text(self, token: int) -> str:
        return str(self.tokenizer.tokenizer.decode([token], skip_special_tokens=False))


def finish_reason(answer: Generation, called: bool) -> str:
    """OpenAI's word for why an answer ended."""
    if called:
        return "tool_calls"
    return "stop" if answer.reason is Reason.STOP else "length"


def usage(answer: Generation) -> dict[str, Any]:
    """OpenAI's count of tokens."""
    prompt, completion = answer.prompt_tokens, len(answer.tokens)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }
