"""Application data: JSON Lines of prompts and completions, read as a stream and checked line by
line.

One object per line, in either of two forms::

    {"prompt": "name[Aromi]", "completion": "It is Aromi.", "references": ["It is Aromi.", ..]}
    {"messages": [{"role": "system", ..}?, {"role": "user", ..}, {"role": "assistant", ..}?]}

Both may have ``references`` (all accepted answers, for measuring) and ``id`` (any text or number,
ignored). Any other key is an error, so that a misspelt ``completion`` is not mistaken for a missing
one. Files are UTF-8, plain or, if the name ends in ``.gz``, gzip. Empty lines are skipped.
"""

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ssdevice import arguments, strict_json
from ssdevice.config import load_strict
from ssdevice.errors import InputError, reading

MAX_LINE_BYTES = 16 << 20
GZIP_MAGIC = b"\x1f\x8b"
ROLES = (("user",), ("user", "assistant"), ("system", "user"), ("system", "user", "assistant"))


@dataclass(frozen=True)
class Example:
    """One exchange: the prompt, the answer to learn (None if the data have none), and all accepted
    answers.
    """

    prompt: str
    completion: str | None = None
    references: tuple[str, ...] = ()
    system: str | None = None

    @property
    def targets(self) -> tuple[str, ...]:
        """The references, or the completion if there are none; empty if there is neither."""
        return self.references or (() if self.completion is None else (self.completion,))


def iter_examples(path: str | Path, *, require_completion: bool = True) -> Iterator[Example]:
    """The examples of one file in order, read lazily.

    Raises InputError, which names the file and the line, for anything but the two forms above, an
    empty text, no completion with ``require_completion``, or no example at all.
    """
    path = arguments.path("a data file", path)
    found = False
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        text = strict_json.utf8(line, where)
        if text.strip():
            found = True
            yield _example(strict_json.parse(text, where, InputError), where, require_completion)
    if not found:
        raise InputError(f"{path}: holds no examples; expected one JSON object per line")


def read_examples(
    paths: Iterable[str | Path] | str | Path,
    limit: int | None = None,
    *,
    require_completion: bool = True,
) -> list[Example]:
    """The first ``limit`` examples (None: all) of one or more files, in order; errors as in
    ``iter_examples``.

    Lines after the limit are not read and not checked.
    """
    if limit is not None:
        arguments.whole("limit", limit, 1)
    files = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not files:
        raise InputError("no data file given")
    every = (
        example
        for path in files
        for example in iter_examples(path, require_completion=require_completion)
    )
    return list(islice(every, limit))


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    zipped = path.suffix == ".gz"
    number = 0
    with reading(path):
        try:
            with gzip.open(path) if zipped else path.open("rb") as file:
                while line := file.readline(MAX_LINE_BYTES + 1):
                    number += 1
                    if len(line) > MAX_LINE_BYTES:
                        raise InputError(
                            f"{path}, line {number}: longer than {MAX_LINE_BYTES >> 20} MiB; is it "
                            "JSON Lines?"
                        )
                    if number == 1 and not zipped and line.startswith(GZIP_MAGIC):
                        raise InputError(f"{path}: holds gzip data; rename it to end in .gz")
                    yield number, line
        except IsADirectoryError as error:
            raise InputError(
                f"{path}: is a folder; give the .jsonl or .jsonl.gz file in it"
            ) from error
        except (gzip.BadGzipFile, zlib.error) as error:
            if number:
                raise InputError(
                    f"{path}: damaged gzip data after line {number} ({error})"
                ) from error
            raise InputError(
                f"{path}: its name ends in .gz but it is not gzip ({error})"
            ) from error
        except EOFError as error:
            raise InputError(
                f"{path}: the gzip data end early, after line {number}; the file is cut short"
            ) from error


@dataclass(frozen=True)
class _Turn:
    role: str
    content: str


@dataclass(frozen=True)
class _Row:
    prompt: str | None = None
    completion: str | None = None
    references: tuple[str, ...] = ()
    messages: tuple[_Turn, ...] | None = None
    id: Any = None


def _example(fields: Any, where: str, require_completion: bool) -> Example:
    row = load_strict(_Row, fields, where)
    prompt = row.prompt
    completion = row.completion
    system = None
    if row.messages is not None:
        if prompt is not None or completion is not None:
            raise InputError(
                f"{where}: give either 'messages' or 'prompt' and 'completion', not both"
            )
        roles = tuple(turn.role for turn in row.messages)
        if roles not in ROLES:
            raise InputError(
                f"{where}: messages by {str(roles)[:80]}; an example is one exchange: an optional "
                "system message, one of the user, then one of the assistant"
            )
        said = {turn.role: turn.content for turn in row.messages}
        prompt = said["user"]
        completion = said.get("assistant")
        system = said.get("system")
    if prompt is None:
        raise InputError(f"{where}: 'prompt' is missing")
    if completion is None and require_completion:
        raise InputError(f"{where}: 'completion' is missing")
    texts = {"prompt": prompt, "completion": completion, "system message": system}
    texts |= {f"references[{i}]": text for i, text in enumerate(row.references)}
    for name, text in texts.items():
        if text is not None:
            _check_text(text, name, where)
    return Example(prompt, completion, row.references, system)


def _check_text(text: str, name: str, where: str) -> None:
    """Raise InputError for a text that says nothing, or that no tokenizer takes."""
    if not text.strip():
        raise InputError(f"{where}: {name!r} is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where}: {name!r} holds half a character (a lone surrogate at {error.start})"
        ) from error
