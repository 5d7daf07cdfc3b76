"""Prompt frames: the texts that a chat template puts around messages.

Every host joins them; none has to run jinja2.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import takewhile
from typing import Any, NamedTuple

from ssdevice.errors import InputError, SSDeviceError, TemplateRefusal

Message = Mapping[str, Any]
"""``role``, ``content`` and, with tools, more."""
Conversation = tuple[Sequence[Message], bool]
"""Messages, and whether the opening of the next answer follows them."""
Render = Callable[[Sequence[Conversation]], list[str | None]]
"""What a template makes of conversations; None where it refuses."""


class Doubt(NamedTuple):
    """A step in which a template looks at messages in a way that conversations need not show.

    ``places``: whether it only looks at how many messages there are; see ``template_looks``.
    """

    reason: str
    places: bool


class Trim(StrEnum):
    """Which blanks of a content are left out: Unicode's, as ``str.strip`` knows them, or one
    leading space.
    """

    NONE = "none"
    SPACE = "space"
    LEFT = "left"
    RIGHT = "right"
    BOTH = "both"


TRIMMED: dict[Trim, Callable[[str], str]] = {
    Trim.NONE: str,
    Trim.LEFT: str.lstrip,
    Trim.RIGHT: str.rstrip,
    Trim.BOTH: str.strip,
    Trim.SPACE: lambda content: content.removeprefix(" "),
}


@dataclass(frozen=True)
class Frame:
    """The texts before and after a message's content."""

    before: str
    after: str
    trim: Trim = Trim.NONE

    def around(self, content: str) -> str:
        return self.before + TRIMMED[self.trim](content) + self.after


@dataclass(frozen=True)
class Frames:
    """A chat template as texts: a conversation is a system message or none, then user and assistant
    in turn.

    ``first``: around a user's message that begins the conversation, with all that precedes it
    (``bos_token``, a default system message). ``system``, ``after_system``: around a system message
    and the user's message after it; None if the template takes none. ``user``, ``assistant``:
    around other messages; None in frames for one question. ``answer``: opens the next answer;
    ``closed``: ends a conversation without one, as in training. ``empty_system``: whether an empty
    system message is written or left out.
    """

    first: Frame
    system: Frame | None
    after_system: Frame | None
    user: Frame | None
    assistant: Frame | None
    answer: str
    empty_system: bool = True
    closed: str = ""

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The text of a conversation.

        Raises TemplateRefusal for a role without a frame at its place, InputError for a user's
        message without words: templates treat it differently.
        """
        text = ""
        places = {"system": self.system, "user": self.first}
        for number, message in enumerate(messages, 1):
            role = message["role"]
            content = message["content"]
            if (frame := places.get(role)) is None:
                place = f"message {number} of a conversation"
                raise TemplateRefusal(f"the chat template takes no {role} message as {place}")
            if role == "user" and not content.strip():
                raise InputError(f"message {number} of the conversation is empty")
            if role != "system":
                places = (
                    {"user": self.user} if role == "assistant" else {"assistant": self.assistant}
                )
            elif content or self.empty_system:
                places = {"user": self.after_system}
            else:
                places = {"user": self.first}
                continue
            text += frame.around(content)
        if messages and messages[-1]["role"] == "system":
            raise TemplateRefusal("a conversation does not end with its system message")
        return text + (self.answer if add_generation_prompt else self.closed)


MAX_CONSTANTS = 400
"""Texts in a template that are tried as contents; one with more keeps the template."""
BATCH = 500
"""Conversations rendered at a time."""
LONG = 21
"""Turns of the longest conversation that is tried."""
BLANKS = " \n\u2003"
CONTENTS = (
    "some words",
    "",
    " ",
    "  leading",
    "trailing \n",
    f"{BLANKS}around\u00a0\t\r\n",
    "\n\nlines\n\n\nand\r\nlines\n",
    "\x1c\ufeffodd\x85",
    "{{ x }} {% y %}",
    "<b>&amp; 'a' \"b\"\\n",
    "你好 🙂",
    "long " * 1000,
)
DATES = "strftime_now"
NO_FRAMES = (
    "its chat template is more than texts around messages, which is all that this host can write: "
    "use the Python runtime, or export the model with a template that only writes messages "
    "(bundles of older versions: export again)"
)
NO_CONVERSATIONS = (
    "the chat template is more than texts around messages: hosts other than the Python runtime "
    "answer single prompts, but hold no conversations"
)
NO_PROMPTS = (
    "the chat template is more than texts around messages: only the Python runtime can write "
    "prompts with it"
)


def frames_of(
    template: str, constants: Sequence[str], render: Render, doubts: Sequence[Doubt] = ()
) -> Frames | None:
    """The frames that give the same texts as a template, also with the texts in it (``constants``)
    as contents.

    They are for whole conversations, else for one question (``user`` is None); None if the template
    looks into messages, changes them, or writes the date. ``doubts``: where it looks in ways that
    conversations need not show; only those that count messages leave frames for one question.
    """
    if DATES in template or len(constants) > MAX_CONSTANTS:
        return None
    if not all(doubt.places for doubt in doubts):
        return None
    frames = _derived(render)
    if frames is None:
        return None
    if not doubts and _hold(frames, constants, render):
        return frames
    single = replace(frames, user=None, assistant=None)
    return single if _hold(single, constants, render) else None


def _hold(frames: Frames, constants: Sequence[str], render: Render) -> bool:
    return all(_agree(frames, render, batch) for batch in _batches(constants, frames))


SYSTEM, USER, ANSWER, AGAIN = (
    {"role": role, "content": f"Xthe{place}X"}
    for role, place in (
        ("system", "system"),
        ("user", "user"),
        ("assistant", "answer"),
        ("user", "again"),
    )
)
PLACES: dict[str, Sequence[Message]] = {
    "first": (USER,),
    "assistant": (USER, ANSWER),
    "user": (USER, ANSWER, AGAIN),
    "after_system": (SYSTEM, USER),
}
"""Frame -> a conversation whose last message it is around."""


def _derived(render: Render) -> Frames | None:
    opened, *texts = render([((USER,), True), *((messages, False) for messages in PLACES.values())])
    first, assistant, user, folded = texts
    if opened is None or first is None:
        return None
    common = takewhile(lambda pair: pair[0] == pair[1], zip(opened, first, strict=False))
    closed = first[len(list(common)) :]  # phi3 writes eos_token where no answer follows
    first, assistant, user, folded = (text and text.removesuffix(closed) for text in texts)
    begin = _between("", USER, first)
    if begin is None or first is None:
        return None
    system = _between("", SYSTEM, folded)
    after = system and _between("", USER, system.after)
    frames = Frames(
        first=begin,
        system=replace(system, after=after.before) if system and after else None,
        after_system=replace(after, before="") if after else None,
        user=_between(assistant, AGAIN, user),
        assistant=_between(first, ANSWER, assistant),
        answer=opened.removeprefix(first),
        closed=closed,
    )
    for name, messages in [*PLACES.items(), ("system", (SYSTEM, USER))]:
        frames = _trimmed(frames, name, messages, render)
    nothing = [{**SYSTEM, "content": ""}, USER]
    return (
        frames
        if _agree(frames, render, [(nothing, False)])
        else replace(frames, empty_system=False)
    )


def _between(known: str | None, message: Message, text: str | None) -> Frame | None:
    """The frame of the message that ``text`` has after what is known of it."""
    if known is None or text is None or not text.startswith(known):
        return None
    before, found, after = text.removeprefix(known).partition(message["content"])
    return Frame(before, after) if found else None


def _trimmed(frames: Frames, name: str, messages: Sequence[Message], render: Render) -> Frames:
    """With the trim of one frame that a content with blanks shows; unchanged if none fits."""
    frame: Frame | None = getattr(frames, name)
    if frame is None:
        return frames
    at = 0 if name == "system" else -1
    blank = list(messages)
    blank[at] = {**messages[at], "content": BLANKS + messages[at]["content"] + BLANKS[::-1]}
    trimmed: Iterator[dict[str, Any]] = ({name: replace(frame, trim=trim)} for trim in Trim)
    changed = (replace(frames, **each) for each in trimmed)
    return next((each for each in changed if _agree(each, render, [(blank, False)])), frames)


def _agree(frames: Frames, render: Render, conversations: Sequence[Conversation]) -> bool:
    return render(conversations) == [
        _rendered(frames, *conversation) for conversation in conversations
    ]


def _rendered(frames: Frames, messages: Sequence[Message], opened: bool) -> str | None:
    try:
        return frames.render(messages, add_generation_prompt=opened)
    except SSDeviceError:
        return None


def _batches(constants: Sequence[str], frames: Frames) -> Iterator[list[Conversation]]:
    """Conversations to compare: 1 to 3 turns and a long one, with and without a system message,
    opened and not.
    """
    pairs = zip(constants, [*constants[1:], ""], strict=False)
    contents = [
        *CONTENTS,
        *(text for one, other in pairs for text in (one, f"x{one}y", f"{one}x{other}")),
    ]
    sizes = (1,) if frames.user is None else (1, 2, 3, 4, 5)
    found: list[Conversation] = []
    for number, content in enumerate(contents):
        rotated = [contents[(number + place) % len(contents)] for place in range(6)]
        for said in ([content] * 6, rotated):
            found += _conversations(said, sizes)
    if frames.user is not None:
        found += _conversations(["some words"] * 2 * LONG, [2 * LONG - 1])
    for begin in range(0, len(found), BATCH):
        yield found[begin : begin + BATCH]


def _conversations(said: Sequence[str], sizes: Sequence[int]) -> Iterator[Conversation]:
    system = {"role": "system", "content": said[0]}
    talk = [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said[1:])
    ]
    talk = [
        USER if message["role"] == "user" and not message["content"].strip() else message
        for message in talk
    ]
    for size in sizes:
        for messages in (talk[:size], [system, *talk[:size]]):
            yield messages, False
            if size % 2:
                yield messages, True
