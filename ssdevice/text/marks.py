"""Special tokens that are written in the contents of a conversation, as text and not as tokens.

A template writes marks such as ``<|im_end|>``. The same letters in a message or in a tool's result
are no mark, or whoever wrote them could end a turn. Where contents have no such letters, nothing
here changes a prompt: its tokens are those that the tokenizer gives its text.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from tokenizers import Encoding, Tokenizer

from ssdevice.errors import InputError
from ssdevice.text.tokenizer_limits import tokenizer_errors

Outside: TypeAlias = Callable[[Any], Any]
"""Applied to each value that is not the template's: a text, or lists and objects of texts."""
STAND_INS = [*map(chr, range(0xE000, 0xF900))]
"""Characters for private use. While a template is rendered, they stand for characters with which a
mark could begin.
"""
STRUCTURE = frozenset(
    (
        "id",
        "index",
        "type",
        "function",
        "name",
        "description",
        "parameters",
        "properties",
        "required",
        "items",
        "enum",
        "arguments",
        "additionalProperties",
        "anyOf",
        "object",
        "string",
        "integer",
        "number",
        "boolean",
        "array",
        "null",
        "role",
        "content",
        "tool_calls",
        "user",
        "assistant",
        "system",
        "tool",
    )
)
"""Words with which messages and schemas are built: templates ask for them, and write no others."""


def as_it_is(value: Any) -> Any:
    return value


class Mark(NamedTuple):
    """A special token that a tokenizer reads in a text: ``text[start:end]``, with blanks that the
    token takes with it.
    """

    start: int
    end: int
    token: int


class Marks:
    """The special tokens of a tokenizer, in texts that templates make of contents."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().items()
        self._names = {i: token.content for i, token in added if token.special and token.content}
        self._texts = frozenset(self._names.values())
        self._lengths = sorted({len(name) for name in self._texts}, reverse=True)
        first = {re.escape(name[0]) for name in self._texts}
        self._first = re.compile(f"[{''.join(sorted(first))}]" if first else "(?!)")
        self._joined = "\0".join(sorted(self._texts))
        self._heads = frozenset(name[:end] for name in self._texts for end in range(1, len(name)))
        self._tails = frozenset(name[at:] for name in self._texts for at in range(1, len(name)))
        normalizer = tokenizer.normalizer
        normalized = any(token.special and token.normalized for _, token in added)
        # A token that is searched in normalized text may be written in other letters.
        self._normalize = normalizer.normalize_str if normalizer and normalized else None
        self._renamed: tuple[Tokenizer, dict[int, str]] | None = None

    def ids(self, render: Callable[[Outside], str]) -> list[int]:
        """The ids of what ``render`` makes of a conversation, with its contents as text.

        ``render``: gets a function, which it applies to every value that is not the template's.
        Raises InputError if the tokenizer cannot read special tokens as text.
        """
        touching: list[str] = []

        def watched(value: Any) -> Any:
            touching.extend(text for text in _texts(value) if self._places(text))
            return value

        text = render(watched)
        whole = self._encoded(self._tokenizer, text)
        if not touching:
            return list(whole.ids)
        stand_ins = _StandIns(text)
        hidden = render(lambda value: _mapped(value, lambda part: self._hidden(part, stand_ins)))
        own = self._found(hidden)
        if [mark.token for mark in own] == [mark.token for mark in self._found(text)]:
            return list(whole.ids)  # all marks are the template's
        renamed, names = self._without_names()
        pieces = []
        at = 0
        for mark in own:
            pieces += [stand_ins.restored(hidden[at : mark.start]), names[mark.token]]
            at = mark.end
        pieces.append(stand_ins.restored(hidden[at:]))
        return list(self._encoded(renamed, "".join(pieces)).ids)

    def _encoded(self, tokenizer: Tokenizer, text: str) -> Encoding:
        return tokenizer.encode(text, add_special_tokens=False)

    def _found(self, text: str) -> list[Mark]:
        """The special tokens that are written in a text, without those for unknown letters."""
        encoded = self._encoded(self._tokenizer, text)
        found = []
        for token, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
            name = self._names.get(token)
            if name is not None and self._is(text[start:end], name):
                found.append(Mark(start, end, token))
        return found

    def _is(self, written: str, name: str) -> bool:
        if written.strip() == name.strip():
            return True
        if self._normalize is None:
            return False
        return bool(self._normalize(written).strip() == self._normalize(name).strip())

    def _places(self, text: str) -> set[int]:
        """Where a special token may begin in a text, if only together with what is around it."""
        places = {at for at in self._beginnings(text) if self._begins(text, at)}
        if self._normalize is not None:
            for mark in self._found(text):
                written = text[mark.start : mark.end]
                places.add(mark.start + len(written) - len(written.lstrip()))
        if text in STRUCTURE or not text or not self._texts:
            return places
        for length in range(1, min(len(text), self._lengths[0]) + 1):
            if text[-length:] in self._heads:
                places.add(len(text) - length)
            if text[:length] in self._tails:
                places.add(0)
        if text in self._joined:
            places.add(0)
        return places

    def _beginnings(self, text: str) -> Iterator[int]:
        for found in self._first.finditer(text):
            yield found.start()

    def _begins(self, text: str, at: int) -> bool:
        return any(text[at : at + length] in self._texts for length in self._lengths)

    def _hidden(self, text: str, stand_ins: "_StandIns") -> str:
        letters = list(text)
        for at in self._places(text):
            letters[at] = stand_ins.of(letters[at])
        return "".join(letters)

    def _without_names(self) -> tuple[Tokenizer, dict[int, str]]:
        """The same tokenizer with names of special tokens that nobody can write, and these."""
        if self._renamed is None:
            self._renamed = _renamed(self._tokenizer, self._names)
        return self._renamed


class _StandIns:
    """Characters that stand for others in a text that has none of them."""

    def __init__(self, text: str) -> None:
        self._free = (each for each in STAND_INS if each not in text and _escape(each) not in text)
        self._of: dict[str, str] = {}

    def of(self, letter: str) -> str:
        """The character that stands for a letter. Raises InputError if there are no more."""
        if letter not in self._of:
            found = next(self._free, None)
            if found is None:
                raise InputError(
                    "the prompt has every character for private use, and special tokens written "
                    "in its messages: leave either out"
                )
            self._of[letter] = found
        return self._of[letter]

    def restored(self, text: str) -> str:
        """A text with the letters themselves, also where JSON escapes what stands for them."""
        for letter, stand_in in self._of.items():
            text = text.replace(stand_in, letter).replace(_escape(stand_in), letter)
        return text


def _escape(letter: str) -> str:
    return json.dumps(letter)[1:-1]


def _texts(value: Any) -> Iterator[str]:
    """The texts in a value, also those that are keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(key)
            yield from _texts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)


def _mapped(value: Any, of_text: Callable[[str], str]) -> Any:
    """A value with other texts."""
    if isinstance(value, str):
        return of_text(value)
    if isinstance(value, Mapping):
        return {_mapped(key, of_text): _mapped(inner, of_text) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(inner, of_text) for inner in value]
    return value


def _renamed(tokenizer: Tokenizer, names: Mapping[int, str]) -> tuple[Tokenizer, dict[int, str]]:
    """The tokenizer with other names of its special tokens, and these.

    They are letters and digits that no step of a tokenizer changes, and that nobody can know. The
    model's own pieces and merges are renamed, too: some would join the old names from letters.
    Names of bytes stay, because models write unknown letters with them. Raises InputError.
    """
    secret = secrets.token_hex(16)
    of_bytes = re.compile(r"<0x[0-9A-F]{2}>")
    new = {name: f"q{secret}x{i}q" for i, name in names.items() if not of_bytes.fullmatch(name)}
    made = json.loads(tokenizer.to_str())
    added = [token for token in made["added_tokens"] if not of_bytes.fullmatch(token["content"])]
    for token in added:
        if token["special"]:
            token["content"] = new.get(token["content"], token["content"])
    made["added_tokens"] = added
    model = made["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {new.get(piece, piece): i for piece, i in model["vocab"].items()}
    else:
        model["vocab"] = [[new.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") is not None:
        model["unk_token"] = new.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        merges = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
        model["merges"] = [
            [left, right]
            for left, right in merges
            if left not in new and right not in new and left + right not in new
        ]
    with tokenizer_errors("special tokens in messages cannot be read as text"):
        found = Tokenizer.from_str(json.dumps(made))
    ids = {i: new[name] for i, name in names.items() if name in new}
    for i, name in ids.items():
        if found.token_to_id(name) != i:
            raise InputError(
                f"special tokens in messages cannot be read as text: token {names[i]!r} has id "
                f"{i}, which the tokenizer gives to no token of another name"
            )
    return found, ids
