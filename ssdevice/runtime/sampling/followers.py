"""Where grammars are compiled: small ones in this process, others apart from it.

Grammars come with requests, and a few hundred characters can take llguidance minutes, gigabytes, or
the end of its process. So only those are compiled here of which it is certain that they take little
(``Schema.small``); others in a process of their own (``processes``).
"""

import os
from collections import OrderedDict
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakSet

from ssdevice.errors import InputError, first_line
from ssdevice.runtime.sampling import matching
from ssdevice.runtime.sampling.grammar_tokens import Spelled
from ssdevice.runtime.sampling.keys import TokenBytes, UniqueKeys
from ssdevice.runtime.sampling.matching import Following, Matching
from ssdevice.runtime.sampling.processes import Processes
from ssdevice.text.tokenizer import ChatTokenizer

KEPT_CHARACTERS = 50_000
"""Of small grammars that are kept compiled; a character takes up to 1 kB."""


class Source(NamedTuple):
    """A grammar for llguidance, ``kind`` and ``text``: see ``matching.compiled``.

    ``small``: whether it is certain to take little. ``open_keys``: whether it is of JSON objects
    whose keys it does not name.
    """

    kind: str
    text: str
    small: bool = False
    open_keys: bool = False


class Followers:
    """Grammars with one tokenizer, in which the same added tokens are text."""

    def __init__(self, tokenizer: ChatTokenizer, vocab: int, spelled: Spelled) -> None:
        self.tokenizer = tokenizer
        self._tokenizer_json = tokenizer.tokenizer_json
        self._vocab = vocab
        self._stops = list(tokenizer.stop_ids)
        self._spelled = spelled
        self._bytes = TokenBytes(tokenizer)
        self._lock = Lock()
        self._tokens: Any = None
        self._kept: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self.processes = Processes(self._tokenizer_json, vocab, self._stops, spelled)

    def follow(self, source: Source) -> Following:
        """A grammar at the beginning of an answer. Raises GrammarError."""
        if source.small:
            following: Following = self._here(source.kind, source.text)
        else:
            following = self.processes.open(source.kind, source.text)
        return UniqueKeys(following, self._bytes) if source.open_keys else following

    def _here(self, kind: str, text: str) -> Matching:
        with self._lock:
            matcher = self._kept.pop((kind, text), None)
            if matcher is None:
                if self._tokens is None:
                    self._tokens = self._read_tokenizer()
                matcher = matching.compiled(kind, text, self._tokens)
            self._kept[kind, text] = matcher
            while sum(len(kept) for _, kept in self._kept) > KEPT_CHARACTERS:
                self._kept.popitem(last=False)
            return Matching(matcher.deep_copy(), self._stops)

    def _read_tokenizer(self) -> Any:
        source = self._tokenizer_json.decode("utf-8")
        try:
            return matching.tokens_of(source, self._vocab, self._stops, self._spelled)
        except ValueError as error:
            raise InputError(f"no structures with this tokenizer: {first_line(error)}") from error

    def forked(self) -> None:
        """In a child, which must not wait for a lock that no thread of its own holds."""
        self._lock = Lock()


@lru_cache(maxsize=4)
def followers_of(tokenizer: ChatTokenizer, vocab: int, spelled: Spelled) -> Followers:
    """Those of a model with ``vocab`` tokens, which its answers share.

    ``spelled``: the added tokens that are text in them.
    """
    followers = Followers(tokenizer, vocab, spelled)
    _all.add(followers)
    return followers


def release(tokenizer: ChatTokenizer) -> None:
    """End the processes that wait for answers with a tokenizer; the next answer starts another."""
    for followers in list(_all):
        if followers.tokenizer is tokenizer:
            followers.processes.end_idle()


_all: "WeakSet[Followers]" = WeakSet()


def _forked() -> None:
    for followers in list(_all):
        followers.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
