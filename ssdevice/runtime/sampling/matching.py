"""Compiles grammars with llguidance and follows answers through them; also the program that does
this in a process of its own, see ``processes``.

Requests are lines of JSON, ``[name, argument]``, and so are replies: ``value``, or a ``reason``. A
mask follows its reply as bytes. The program imports nothing of this package, so that it starts
quickly.
"""

import json
import re
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

LIMITS: dict[str, Any] = {"initial_lexer_fuel": 200_000, "verbose_errors": False}
"""Beside llguidance's own limits of size, of states, and of work for a token.

A grammar may take 0.5 s, not 4.
"""
KEPT = 32
"""Compiled grammars in a process."""
STACK = 1 << 26
"""Bytes: llguidance takes 9 kB for a level, and a thousand levels are allowed."""
TOKEN_SECONDS = 0.01
"""Of processor time for each token of an answer, beside what the answer may take once.

The median is 0.1 ms.
"""
POLL_SECONDS = 0.02
MAX_REASON = 200
OUT_OF_MEMORY = 75
"""The exit code of a process that took too much memory, where the system sets no limit."""


class GrammarError(Exception):
    """What is wrong with a grammar, or why an answer cannot go on, in one line."""


def tokens_of(
    tokenizer_json: str,
    vocab: int,
    stops: list[int],
    spelled: Sequence[tuple[int, str]] | None = None,
) -> Any:
    """llguidance's view of a tokenizer.

    ``spelled``: the added tokens that are text, and what they say; other added ones are written in
    pieces. None: as llguidance reads the tokenizer, for which no added token is text. Raises
    ValueError for a tokenizer whose tokens are not bytes.
    """
    from llguidance import LLTokenizer

    # From the JSON itself: llguidance's module for transformers would import them.
    base = LLTokenizer(tokenizer_json, n_vocab=vocab, eos_token=stops)
    if spelled is None:
        return base
    spelling: Any = _Spelling(base, stops[0], spelled)
    return LLTokenizer(spelling, n_vocab=vocab, eos_token=stops)


class _Spelling:
    """What ``LLTokenizer`` asks of a tokenizer: the bytes of all tokens, and the tokens of a
    text.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, base: Any, stop: int, spelled: Sequence[tuple[int, str]]) -> None:
        self.eos_token_id = stop
        self.tokens = [base.decode_bytes([i]) for i in range(base.vocab_size)]
        self._base = base
        self._special = frozenset(filter(base.is_special_token, range(base.vocab_size)))
        self.special_token_ids = sorted(self._special - {token for token, _ in spelled})
        self._written: dict[str, int] = {}
        for token, said in sorted(spelled, reverse=True):  # of two with one text, the lower id
            self.tokens[token] = said.encode()
            self._written[said] = token
        longest_first = sorted(self._written, key=len, reverse=True)
        self._marks = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def __call__(self, text: str) -> list[int]:
        if not self._written:
            return self._pieces(text)
        ids = list[int]()
        for part in self._marks.split(text):
            if part in self._written:
                ids.append(self._written[part])
            elif part:
                ids += self._pieces(part)
        return ids

    def _pieces(self, text: str) -> list[int]:
        """The tokens of a text in which no added token is text."""
        ids: list[int] = self._base.tokenize_str(text)
        # The tokenizer may read a special token there, or normalize.
        if self._special.isdisjoint(ids) and self._base.decode_bytes(ids) == text.encode():
            return ids
        found: list[int] = self._base.greedy_tokenize(text)
        return found


def compiled(kind: str, source: str, tokens: Any) -> Any:
    """The matcher of a grammar before the first token. ``kind``: ``"json"`` or ``"lark"``."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        if kind == "json":
            grammar = LLMatcher.grammar_from_json_schema(source)
        else:
            grammar = LLMatcher.grammar_from_lark(source)
    except (ValueError, RecursionError) as error:
        raise GrammarError(reason_of(str(error))) from error
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
    if not matcher.is_error():
        # Finds that nothing matches, and computes what the first token of every answer needs.
        matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarError(reason_of(matcher.get_error()))
    return matcher


def reason_of(message: str) -> str:
    """What llguidance says, in one line.

    It draws an expression with its place before the reason, and the grammar's text after it.
    """
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not lines:
        return "llguidance gives no reason"
    if lines[0].startswith("NoExtension"):
        return "nothing matches it"
    if lines[0].startswith("Unable to determine if regex is empty"):
        return "it takes too much work to find out whether its expressions have a text in common"
    reason = lines[0]
    for line in lines[1:]:
        if line.startswith("error: "):
            opening = reason.partition("regex parse error:")[0].rstrip(" :")
            reason = line.removeprefix("error: ")
            if opening:
                room = MAX_REASON - len(reason) - len(": ..")
                shown = opening if len(opening) <= room else opening[:room] + ".."
                reason = f"{shown}: {reason}"
            break
    return reason[:MAX_REASON]


class Following(Protocol):
    """A grammar in one answer: here, or in another process. Methods raise GrammarError."""

    def mask(self) -> bytes:
        """A bit for each token: whether it may come next."""

    def accept(self, token: int) -> None:
        """Take in the next token."""

    def allows(self, token: int) -> bool:
        """Whether a token may come next."""

    def forced(self) -> list[int]:
        """The tokens that must come next, in turn, as far as the tokenizer would write them so."""

    def close(self) -> None:
        """The answer has ended."""


class Matching:
    """``Following`` in this process."""

    def __init__(self, matcher: Any, stops: list[int]) -> None:
        self._matcher = matcher
        self._stops = stops

    def mask(self) -> bytes:
        bits: bytes = self._matcher.compute_bitmask()
        self._check()
        return bits

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    def allows(self, token: int) -> bool:
        return bool(self._matcher.validate_tokens([token]) == 1)

    def forced(self) -> list[int]:
        tokens: list[int] = self._matcher.compute_ff_tokens()
        after = self._matcher.deep_copy() if tokens else self._matcher
        if after.consume_tokens(tokens) and after.is_stopped():
            tokens.append(self._stops[0])  # the likeliest of several
        return tokens

    def close(self) -> None:
        pass

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(reason_of(self._matcher.get_error()))


class _Program:
    """What the process does: one answer at a time, each with an allowance of processor time."""

    def __init__(self, seconds: float, memory: int) -> None:
        self._seconds = seconds
        self._memory = memory
        self._kept: dict[tuple[str, str], Any] = {}
        self._busy = threading.Event()
        self._matching: Matching | None = None
        self._left = seconds

    def run(self) -> None:
        """Answer requests until there are no more."""
        told = json.loads(sys.stdin.buffer.readline())
        source = sys.stdin.buffer.read(told["bytes"]).decode()
        self._stops = told["stops"]
        try:
            self._tokens = tokens_of(source, told["vocab"], self._stops, told["spelled"])
        except (ImportError, ValueError) as error:
            self._reply({"reason": reason_of(str(error))})
            return
        _limit_memory(self._memory, self._busy)
        self._begun = _memory()
        self._reply({"value": None})
        for line in sys.stdin.buffer:
            name, argument = json.loads(line)
            self._answer(name, argument)

    def _answer(self, name: str, argument: Any) -> None:
        self._busy.set()
        clock = time.process_time()
        if name == "open":
            self._left = self._seconds
        _end_after(max(self._left, 0.001))
        try:
            value = self._open(*argument) if name == "open" else self._step(name, argument)
        except GrammarError as error:
            reply: dict[str, Any] = {"reason": str(error)}
            value = None
        else:
            reply = {"value": value}
        _end_after(0)
        self._busy.clear()
        if name == "accept":
            self._left = min(self._left + TOKEN_SECONDS, self._seconds)
        self._left -= time.process_time() - clock
        if isinstance(value, bytes):
            self._reply({"value": len(value)}, value)
        else:
            self._reply(reply)

    def _open(self, kind: str, source: str) -> int:
        """Begin an answer; the bytes that this process has taken for grammars."""
        self._matching = None
        matcher = self._kept.pop((kind, source), None)
        if matcher is None:
            matcher = compiled(kind, source, self._tokens)
        self._kept[kind, source] = matcher
        if len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]
        self._matching = Matching(matcher.deep_copy(), self._stops)
        return _memory() - self._begun

    def _step(self, name: str, argument: Any) -> Any:
        matching = self._matching
        if name == "close" or matching is None:
            self._matching = None
            return _memory() - self._begun
        if name == "mask":
            return matching.mask()
        if name == "accept":
            return matching.accept(argument)
        if name == "allows":
            return matching.allows(argument)
        return matching.forced()

    def _reply(self, reply: dict[str, Any], content: bytes = b"") -> None:
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n" + content)
        sys.stdout.buffer.flush()


def _memory() -> int:
    """Bytes of memory that this process takes; where the system does not say, the most it took."""
    with suppress(OSError):
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        import resource

        return pages * resource.getpagesize()
    with suppress(ImportError):
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
    return 0


def _end_after(seconds: float) -> None:
    """End this process after so much processor time, whatever it is doing; 0: do not."""
    import signal

    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _limit_memory(memory: int, busy: threading.Event) -> None:
    """Let this process take so many bytes more than it has now."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        with open("/proc/self/statm") as file:
            most = int(file.read().split()[0]) * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        return
    # macOS has no limit that it keeps, and Windows none: a thread looks while llguidance works.
    threading.Thread(target=_watch, args=(_memory() + memory, busy), daemon=True).start()


def _watch(most: int, busy: threading.Event) -> None:
    import os

    while True:
        busy.wait()
        if _memory() > most:
            os._exit(OUT_OF_MEMORY)
        time.sleep(POLL_SECONDS)


def main() -> None:
    """Arguments: seconds of processor time for an answer, bytes of memory for grammars."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's affair
    program = _Program(float(sys.argv[1]), int(sys.argv[2]))
    threading.stack_size(STACK)
    thread = threading.Thread(target=program.run)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
