"""How much of an answer is certainly text, and no call, while its tokens arrive."""

import re
from collections.abc import Sequence

from ssdevice.text.stream import overlap
from ssdevice.text.thoughts import CLOSING, after_thoughts, is_thought
from ssdevice.text.tokenizer import ChatTokenizer
from ssdevice.text.tools import ToolStyle

_BARE = re.compile(r'\s*(```\w*\s*)?\{\s*"(name|arguments|parameters|type|id)"')
"""How an answer begins that may be a call without marks."""
_PERHAPS_BARE = re.compile(r'\s*(`{1,3}|```\w*\s*|(```\w*\s*)?\{\s*("\w*)?)?')
"""The beginning of that."""


class CallStream:
    """The characters of a growing answer that are no part of a call.

    Special tokens are not shown, but a call may begin with one: tokens are read, not the text.
    ``thinking``: whether the prompt ended with ``<think>``.
    """

    def __init__(self, tokenizer: ChatTokenizer, style: ToolStyle, thinking: bool = False) -> None:
        self._stream = tokenizer.stream()
        self._stop_ids = frozenset(tokenizer.stop_ids)
        self._marks = style.value
        self._thinking = thinking
        self._settled = 0  # characters that were shown before ``_text``
        self._text = ""  # since the last thought, with special tokens
        self._shown = bytearray()  # for each of its characters, 1 if it is shown
        self._searched = 0  # characters of it that have been searched for the end of a thought

    def push(self, tokens: Sequence[int]) -> int:
        """Take in further tokens; how many of the characters shown so far are certainly text."""
        for token in tokens:
            if token not in self._stop_ids:
                mark = self._stream.mark(token)
                piece = mark or self._stream.push((token,))
                self._text += piece
                self._shown += bytes([not mark]) * len(piece)
        self._end_thoughts()
        return self._settled + self._shown[: self._certain()].count(1)

    def _end_thoughts(self) -> None:
        """Let go of what is before the end of a thought."""
        since = max(0, self._searched - len(CLOSING))
        if self._text.find(CLOSING, since) >= 0:
            begin, self._thinking = after_thoughts(self._text, self._marks, self._thinking)
            self._settled += self._shown[:begin].count(1)
            self._text = self._text[begin:]
            self._shown = self._shown[begin:]
        self._searched = len(self._text)

    def _certain(self) -> int:
        """How many characters of the text since the last thought are certainly no call."""
        text = self._text
        if self._thinking or is_thought(text):
            return len(text)
        if _BARE.match(text) or _PERHAPS_BARE.fullmatch(text):
            return 0
        ends = [len(text)]
        for marks in self._marks:
            found = text.find(marks.opening)
            ends.append(found if found >= 0 else len(text) - overlap(text, marks.opening))
        return min(ends)
