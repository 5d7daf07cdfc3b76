"""The prompts of data as token ids, as far as they fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ssdevice.data import Example
from ssdevice.errors import ContextOverflowError, InputError
from ssdevice.text.tokenizer import ChatTokenizer


def fitting(
    examples: Sequence[Example],
    tokenizer: ChatTokenizer,
    instruction: str | None,
    most: int,
    skip_long: bool | None = None,
    file: Path | None = None,
) -> tuple[list[Example], list[list[int]]]:
    """The examples whose prompts, after an app's ``instruction``, have at most ``most`` tokens, and the ids of each.

    ``skip_long``: leave out the others; None if a user cannot ask for that. ``file``: where the examples are from.
    Raises InputError, ContextOverflowError for one that does not fit; they name the prompt.
    """
    kept, prompts = [], []
    for number, example in enumerate(examples, 1):
        try:
            ids = tokenizer.prompt_ids(example.prompt, instruction=instruction, system=example.system, most=most)
            if len(ids) > most:
                raise ContextOverflowError(f"the prompt has {len(ids)} tokens, at most {most} fit into the context")
        except InputError as error:
            long = isinstance(error, ContextOverflowError)
            if long and skip_long:
                continue
            hint = "; --skip-long leaves out such prompts" if long and skip_long is False else ""
            where = f"{file}, prompt" if file is not None else "prompt"
            raise type(error)(f"{where} {number}: {error}{hint}") from error
        kept.append(example)
        prompts.append(ids)
    if not prompts:
        raise InputError("no prompt fits the context")
    return kept, prompts
