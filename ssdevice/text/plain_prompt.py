"""The prompt format of a model without a chat template: the prompt as it is, as its tokenizer encodes any text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ssdevice.errors import ConfigError
from ssdevice.text.chat_template import TEMPLATE_FILE
from ssdevice.text.frames import Frame, Frames, Trim

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NOTE = "the model has no chat template: a prompt is given to it as it is, after an app's instruction"
PROBE = "probe"


def plain_frames(tokenizer: Tokenizer, folder: Path) -> Frames:
    """Frames for prompts without marks, which have the ids that the tokenizer itself gives a text.

    Every message is on a line of its own, but an answer directly behind its prompt: the model goes on with the text.
    Special tokens that the tokenizer puts before a text (mostly ``bos_token``) are in the frames. Those that it puts
    behind are not. Raises ConfigError if no frames give these ids.
    """
    whole = tokenizer.encode(PROBE)
    words = [i for i, special in enumerate(whole.special_tokens_mask) if not special] or [0]
    opening = "".join(whole.tokens[: words[0]])
    # Tokenizers that begin a text with a space do so only at its very beginning, which a special token takes from them.
    for space, trim in (("", Trim.NONE), (" ", Trim.SPACE)):
        ids = tokenizer.encode(f"{opening}{space}{PROBE}", add_special_tokens=False).ids
        if ids and ids == whole.ids[: words[-1] + 1]:
            first, line = Frame(opening + space, "", trim), Frame("\n", "")
            return Frames(first, system=first, after_system=line, user=line, assistant=Frame("", ""), answer="")
    raise ConfigError(
        f"{folder}: no chat template, and none can be made that begins a prompt as its tokenizer does; write the "
        f"model's prompt format, as jinja2, to {folder / TEMPLATE_FILE}"
    )
