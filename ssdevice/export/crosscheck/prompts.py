"""Prompt ids and texts of a bundle beside those of ``AutoTokenizer`` on the same folder."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ssdevice.errors import InputError
from ssdevice.model.tokenizer import (
    ADDED_TOKENS_FILE,
    CALLED,
    CONVERSATIONS,
    TOOLS,
    as_shipped,
    as_transformers,
    prompt_ids,
    tool_ids,
)
from ssdevice.text.chat_template import SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE, read_object
from ssdevice.text.frames import Message
from ssdevice.text.messages import CALLS, arguments_object, with_arguments
from ssdevice.text.tokenizer import PROMPT, TOKENIZER_FILE, ChatTokenizer

TEXTS = (
    "hi",
    "  two  spaces,\ttabs \n and what follows; it's don't we'll\n\n\nthe end .  \n",
    "Zürich, naïve façade, e\u0301clair, ﬁne, Straße, кириллица, עברית, हिन्दी, 日本語, 한국어",
    "🙂 👩\u200d👩\u200d👧 \u00a0\u3000\u200b",
    "def f(x):\n    return x ** 2  # squares\n\n"
    "\tif (a[i] >= 3.50 && b != 'c') { s = \"\\n\"; }\r\n",
    "SELECT COUNT(*) FROM table_12 WHERE price >= 1234567 AND city = 'a' ;",
    "\n",
    "",
)
SPACES = ("▁", "Ġ")
"""How tokens write the space before a word."""
Case = str | Sequence[Message]
"""A text or a conversation."""
Ids = list[int] | None
"""None where a template refuses."""


def compare_prompts(tokenizer: ChatTokenizer, folder: Path) -> tuple[str, ...]:
    """Raise InputError if a fixed set of texts has other ids or another text than with
    transformers.

    ``tokenizer``: as it goes into the bundle; it is read back from what would be stored.
    ``folder``: where it came from. Returns a note if the class of ``AutoTokenizer`` splits texts
    otherwise than its ``tokenizer.json``, which is then the truth (see
    ``ssdevice.model.tokenizer``).
    """
    bundled = ChatTokenizer.from_bytes(tokenizer.tokenizer_json, tokenizer.chat)
    opened = as_transformers(folder)
    cases = list(_cases(folder, opened, tokenizer.plain))

    def difference(its: Any) -> str | None:
        reference = _Reference(its, tokenizer.plain, tokenizer.chat.variables)
        found = _first_difference(bundled, reference, cases)
        if found is None and not tokenizer.plain:
            found = _tool_difference(bundled, reference)
        return found

    found = difference(opened)
    if found is None:
        return ()
    shipped = as_shipped(folder, opened)
    if shipped is not opened:
        rebuilt = found
        found = difference(shipped) or _prefix_conflict(folder, shipped)
        if found is None:
            return (
                f"{type(opened).__name__} of transformers does not split texts as {TOKENIZER_FILE} "
                f"says: {rebuilt}",
            )
    raise InputError(f"{folder}: the tokenizer differs from that of transformers: {found}")


def _prefix_conflict(folder: Path, shipped: Any) -> str | None:
    """What is wrong if an option asks for what a class does and ``tokenizer.json`` does not."""
    asked = read_object(folder / TOKENIZER_CONFIG_FILE).get("add_prefix_space")
    if asked is None or asked == shipped.tokenize("a")[0].startswith(SPACES):
        return None
    return (
        f"'add_prefix_space' is {asked}, and {TOKENIZER_FILE} does not do so: save the tokenizer "
        f"again"
    )


class _Reference:
    """What transformers makes of texts, conversations and ids."""

    def __init__(self, opened: Any, plain: bool, variables: Mapping[str, Any]) -> None:
        self.opened = opened
        self.plain = plain
        self.variables = variables
        # What a tokenizer puts behind every text ends it; an answer goes on there.
        mask = opened("a", return_special_tokens_mask=True)["special_tokens_mask"]
        self.closing = mask[::-1].index(0) if 0 in mask else 0

    def ids(self, case: Case, tools: Sequence[Mapping[str, Any]] = ()) -> Ids:
        from jinja2 import TemplateError

        if isinstance(case, str):
            return list(self.opened.encode(case, add_special_tokens=False))
        if self.plain:
            ids = self.opened(case[0]["content"])["input_ids"]
            return list(ids[: len(ids) - self.closing])
        messages = [dict(message) for message in case]
        try:
            ids = self.opened.apply_chat_template(
                messages, tools=list(tools) or None, add_generation_prompt=True, **self.variables
            )["input_ids"]
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return None  # what a template's own expressions can raise
        return list(ids)

    def text(self, ids: Sequence[int]) -> str:
        # The library goes by names and shows a special token that a normalizer renames, as in the
        # first Llamas.
        added = self.opened.added_tokens_decoder
        text = [i for i in ids if i not in added or not added[i].special]
        return str(self.opened.decode(text, skip_special_tokens=True))


def _first_difference(
    bundled: ChatTokenizer, reference: _Reference, cases: Sequence[Case]
) -> str | None:
    """The first text or conversation with other ids or another text, and both; None if there is
    none.
    """
    for case in cases:
        ids: Ids = bundled.encode(case) if isinstance(case, str) else prompt_ids(bundled, case)
        expected = reference.ids(case)
        if ids != expected:
            return _differing(_shown(case), ids, expected)
        if ids is None:
            continue
        stream = bundled.stream()
        text = stream.push(ids) + stream.flush()
        its = reference.text(ids)
        if text != its:
            return (
                f"the ids of {_shown(case)} are shown as {text[:80]!r}, with transformers as "
                f"{its[:80]!r}"
            )
    return None


def _tool_difference(bundled: ChatTokenizer, reference: _Reference) -> str | None:
    """As ``_first_difference``, for conversations with tools, and with a call and its result.

    What a template does not read, transformers leaves out and we refuse: that is no difference.
    """
    expected = reference.ids(PROMPT, TOOLS)
    if expected == reference.ids(PROMPT):
        return None
    ids = tool_ids(bundled, PROMPT)
    if ids != expected:
        return _differing("a prompt with tools", ids, expected)
    # transformers writes what it is given: arguments of calls as objects, or the text of these.
    ids = tool_ids(bundled, CALLED)
    objects = [with_arguments(message, arguments_object) for message in CALLED]
    expected = reference.ids(objects, TOOLS)
    silent = list(map(_without_calls, CALLED))
    if ids is None and expected == reference.ids(silent, TOOLS):
        return None
    as_texts = reference.ids(CALLED, TOOLS)
    if ids not in (expected, as_texts):
        return _differing("a prompt with a call and its result", ids, expected or as_texts)
    return None


def _without_calls(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != CALLS}


def _differing(what: str, ids: Ids, expected: Ids) -> str:
    return f"{what} has the ids {_part(ids, expected)}, with transformers {_part(expected, ids)}"


def _shown(case: Case) -> str:
    if isinstance(case, str):
        return f"the text {case[:60]!r}"
    return "the prompt " + " / ".join(
        f"{message['role']}: {message['content'][:60]!r}" for message in case
    )


def _part(ids: Ids, others: Ids) -> str:
    """Ids from shortly before the first that differs."""
    if ids is None:
        return "none, because the template refuses it"
    first = next(
        (at for at, pair in enumerate(zip(ids, others or (), strict=False)) if pair[0] != pair[1]),
        0,
    )
    begin = max(0, first - 2)
    end = first + 8
    return f"{'.. ' if begin else ''}{ids[begin:end]}{' ..' if len(ids) > end else ''}"


def _cases(folder: Path, opened: Any, plain: bool) -> Iterator[Case]:
    yield from CONVERSATIONS[:1] if plain else CONVERSATIONS
    for text in TEXTS:
        yield text
        if text.strip():
            yield [{**PROMPT[0], "content": text}]
    names = list(special_names(folder))
    for name in names:
        yield f"a {name} b{name}c\n{name}\n {name}"
    for name in [*opened.special_tokens_map.values(), *names[:8]]:
        yield [{**PROMPT[0], "content": f"say {name} and{name}then {name}"}]


def special_names(folder: Path) -> dict[str, None]:
    """Every token that a file of the folder lists beside the vocabulary, in order."""
    listed = [
        read_object(folder / TOKENIZER_FILE).get("added_tokens"),
        list(read_object(folder / ADDED_TOKENS_FILE)),
    ]
    for name in (TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE):
        entries = read_object(folder / name)
        listed += [
            entries[key]
            for key in entries
            if key.endswith(("_token", "_tokens", "added_tokens_decoder"))
        ]
    return dict.fromkeys(name for value in listed for name in _names(value))


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, str) and value:
        yield value
    elif isinstance(value, Mapping):
        yield from _names(value["content"] if "content" in value else list(value.values()))
    elif isinstance(value, list):
        for each in value:
            yield from _names(each)
