"""An answer as text while its tokens arrive: pieces that never change again, cut at stop tokens and
stop strings.
"""

import re
from collections.abc import Collection, Sequence
from functools import cache, cached_property
from itertools import compress
from typing import NamedTuple

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from ssdevice.errors import ConfigError
from ssdevice.text.tokenizer_limits import tokenizer_errors

UNDECODED = "\ufffd"
PATIENCE = 16  # tokens without a clean end after which one is searched for
LONGEST_CHARACTER = 4  # bytes, so tokens, that one character can span
PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
"""The bytes that a byte-level vocabulary, as GPT-2's, writes as the characters of their number."""
BYTES = {chr(byte): byte for byte in PRINTED} | dict(
    zip(
        map(chr, range(256, 512)),
        (byte for byte in range(256) if byte not in PRINTED),
        strict=False,
    )
)


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of the tokens that are no text."""
    return frozenset(
        i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special
    )


class TokenTexts:
    """What single tokens of a tokenizer say.

    Remembered, because the library takes some ten microseconds per text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._special = special_ids(tokenizer)
        self._bytes = isinstance(
            tokenizer.decoder, ByteLevel
        )  # a token then is bytes that depend on no other token
        self.whole = cache(self._whole)

    def silent(self, token: int) -> bool:
        """Whether the token has no text: it is special, or none of the vocabulary."""
        return token in self._special or self.tokenizer.id_to_token(token) is None

    def mark(self, token: int) -> str:
        """What a silent token is written as; empty for the others, whose text is no mark."""
        return (self.tokenizer.id_to_token(token) or "") if self.silent(token) else ""

    def _whole(self, token: int) -> str | None:
        """The token's text, if it is whole characters that do not depend on the tokens around it;
        else None.
        """
        if not self._bytes or self.silent(token):
            return None
        text = self.decode([token])
        return None if UNDECODED in text else text

    @cached_property
    def _before(self) -> tuple[list[int], int]:
        """A token to say another one after, and the length of its text."""
        ids = self.tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        return ids, len(self.decode(ids))

    def following(self, prompt: Sequence[int]) -> tuple[list[int], str]:
        """Tokens after which an answer says what it says after ``prompt``, and their text.

        They are the last of its tokens that are whole characters. Without any, another token stands
        for them.
        """
        for end in range(len(prompt), 0, -1):
            if self.silent(prompt[end - 1]):
                continue
            text = self.decode([prompt[end - 1]])
            if text and UNDECODED not in text:
                return [prompt[end - 1]], text
        ids, _ = self._before
        return ids, self.decode(ids)

    def said(self, token: int, first: bool) -> tuple[str, bytes]:
        """What the token says after others, or as the ``first`` of all, where some tokenizers leave
        a space out; and its bytes, which are no text alone if they are a part of a character.
        """
        before: list[int] = []
        length = 0
        if not first and not self._bytes:
            before, length = self._before
        text = self.decode([*before, token])[length:]
        if UNDECODED not in text:
            return text, text.encode()
        piece = self.tokenizer.id_to_token(token) or ""
        if self._bytes and BYTES.keys() >= set(piece):
            return text, bytes(BYTES[character] for character in piece)
        fallback = re.fullmatch(r"<0x([0-9A-F]{2})>", piece)
        return text, bytes.fromhex(fallback[1]) if fallback else text.encode()

    def decode(self, ids: list[int]) -> str:
        """The text of ids, special tokens among them."""
        with tokenizer_errors("the tokenizer cannot decode the answer"):
            return str(self.tokenizer.decode(ids, skip_special_tokens=False))


class TextStream:
    """Text of a growing sequence of ids, special tokens left out.

    A piece is given out once no later token can change it, so characters that span tokens appear
    whole; the pieces and ``flush`` together are the text of all ids decoded at once. One exception:
    if a model breaks off inside a run of byte-fallback tokens, decoding at once also spoils the
    run's whole characters, which a stream has shown.

    Only the tokens since the last piece are decoded, and the piece before them, which decides
    whether a word begins with a space. So a token costs the same however long the answer is, and a
    fraction of what the library's ``DecodeStream`` takes.

    ``after``: the tokens of the text that the ids continue, such as a prompt without a template.
    Tokenizers that drop a text's first space keep it there.
    """

    def __init__(self, texts: TokenTexts, after: Sequence[int] | None = None) -> None:
        self._texts = texts
        self.mark = texts.mark
        self._decode = texts.decode
        self._silent = texts.silent
        self._settle([], "")
        if after is not None:
            self._settle(*texts.following(after))

    def push(self, ids: Sequence[int]) -> str:
        """The text that these further ids settle, often empty."""
        if ids and len(self._ids) == self._settled:
            known = [self._texts.whole(i) for i in ids]
            pieces = [piece for piece in known if piece is not None]
            if len(pieces) == len(ids):
                self._settle([ids[-1]], pieces[-1])
                return "".join(pieces)
        if len(ids) > 1 and (piece := self._push_whole(ids)) is not None:
            return piece
        # One by one: the text of a run may have no clean end anywhere but within it.
        return "".join([self._push(i) for i in ids])

    def _push_whole(self, ids: Sequence[int]) -> str | None:
        """The text of a run that begins and ends clean, the common case, by two decodings; None for
        any other.
        """
        if not (run := [i for i in ids if not self._silent(i)]) or len(self._ids) > self._settled:
            return None
        text = self._decode(self._ids + run)
        if text.endswith(UNDECODED) or len(text) <= self._sent:
            return None
        piece = text[self._sent :]
        self._settle(run, self._decode(run))
        return piece

    def _settle(self, ids: list[int], text: str) -> None:
        """Begin a new window, which is what is decoded, with ids whose text is out."""
        self._ids = ids
        self._patience = PATIENCE
        self._settled = len(ids)  # ids in the window whose text is out to the last character
        self._sent = len(text)  # characters of the window's text that are out

    def _push(self, token: int) -> str:
        if self._silent(token):  # it would not decide about the space before a word
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        whole = text.rstrip(UNDECODED)
        piece = whole[self._sent :]
        if len(whole) == len(text) > self._sent:
            self._settle(self._ids[self._settled :], self._decode(self._ids[self._settled :]))
            return piece
        self._sent = max(self._sent, len(whole))
        if len(self._ids) - self._settled >= self._patience:
            piece += self._settle_front(text)
        return piece

    def flush(self) -> str:
        """The rest, a broken character as U+FFFD; the stream is then ready for another answer."""
        piece = self._decode(self._ids)[self._sent :]
        self._settle([], "")
        return piece

    def _settle_front(self, text: str) -> str:
        """Drop the front of a window that has no clean end (bytes that are no UTF-8), so that it
        stays short.
        """
        for cut in range(len(self._ids) - 1, len(self._ids) - 2 * LONGEST_CHARACTER, -1):
            front = self._decode(self._ids[:cut])
            # Equal when no character spans the cut and the decoder treats the rest as it would in
            # place.
            if front + self._decode(self._ids[cut:]) == text:
                piece = front[self._sent :]
                self._ids = self._ids[cut:]
                self._settled = 0
                self._sent = max(self._sent - len(front), 0)
                self._patience = PATIENCE
                return piece
        self._patience *= 2
        return ""


class StopStrings:
    """Finds the first of several strings in text that comes in pieces, holding back what may be its
    beginning.

    The first is the one that ends first (of those, the longest), however the text is cut into
    pieces. ``stop``: the string found, or None. Special tokens are searched as they are written,
    though they are not shown. Raises ConfigError for an empty string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        stops = (
            [stops] if isinstance(stops, str) else stops
        )  # a str is a sequence of its characters
        if not all(stops):
            raise ConfigError("a stop string is empty")
        self._stops = tuple(dict.fromkeys(stops))
        self.any = bool(stops)
        self._held = ""
        self._shown: list[bool] = []  # for each character that is held
        self.stop: str | None = None

    def push(self, piece: str, shown: bool = True) -> str:
        """The text that certainly precedes any stop string; empty once one was found.

        ``shown``: False for what a special token is written as, which is searched and never given
        out.
        """
        if self.stop is not None:
            return ""
        text = self._held + piece
        visible = self._shown + [shown] * len(piece)
        found = [(text.find(stop), stop) for stop in self._stops]
        ends = [(at + len(stop), at, stop) for at, stop in found if at >= 0]
        if ends:
            _, keep, self.stop = min(ends)
            self._held = ""
            self._shown = []
        else:
            keep = len(text) - max((overlap(text, stop) for stop in self._stops), default=0)
            self._held = text[keep:]
            self._shown = visible[keep:]
        return "".join(compress(text[:keep], visible))

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        text = "".join(compress(self._held, self._shown))
        self._held = ""
        self._shown = []
        return text


class Emission(NamedTuple):
    """What a run of tokens gave: settled ``text``, the ``used`` first tokens of the run, and
    whether it ``stopped``: token ``used - 1`` then is the stop token or completes the stop string,
    and later ones do not count.
    """

    text: str
    used: int
    stopped: bool


class TextOutput:
    """The text of an answer from runs of accepted tokens, until a stop token or stop string.

    Tokens are judged one by one, so an answer's end does not depend on how many were accepted at a
    time.
    """

    def __init__(self, stream: TextStream, stop_ids: Collection[int], stops: StopStrings) -> None:
        self._stream = stream
        self._stop_ids = frozenset(stop_ids)
        self._stops = stops
        self.stopped = False

    @property
    def stop(self) -> str | None:
        return self._stops.stop

    def push(self, run: Sequence[int]) -> Emission:
        """Take a run of tokens; after a stop, none is taken."""
        if not (self.stopped or self._stops.any or not self._stop_ids.isdisjoint(run)):
            return Emission(self._stream.push(run), len(run), False)
        text = ""
        for used, token in enumerate(run if not self.stopped else (), 1):
            if token in self._stop_ids:
                text += self.finish()
            else:
                mark = self._stream.mark(token)
                text += self._stops.push(mark or self._stream.push((token,)), shown=not mark)
            if self.stopped or self.stop is not None:
                self.stopped = True
                return Emission(text, used, True)
        return Emission(text, 0 if self.stopped else len(run), self.stopped)

    def finish(self) -> str:
        """The rest of the text when no more tokens come."""
        self.stopped = True
        return self._stops.push(self._stream.flush()) + self._stops.flush()


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop`` without completing it."""
    return next(
        (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
    )
