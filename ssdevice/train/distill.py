"""What a model writes for its own training: greedy answers and prompts, in files that survive a kill."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ssdevice.model.backbone import Backbone
from ssdevice.text.tokenizer import Sample
from ssdevice.train.decoding import Decoding
from ssdevice.train.job import Job

Key = TypeVar("Key", bound=int | tuple[int, ...])
"""The key of an answer: the number of an attempt, or the ids of its prompt."""


def own_completions(
    job: Job, backbone: Backbone, samples: Sequence[Sample], most: Sequence[int], stage: str
) -> list[Sample]:
    """Samples with their completions replaced by the model's greedy ones of at most ``most[i]`` tokens each.

    A prompt that occurs twice is answered once. ``stage``: see ``written``.
    """
    prompts = [sample.ids[: sample.prompt] for sample in samples]
    room = dict(zip(prompts, most, strict=True))

    def write(keys: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, list[int]]]:
        yield from Decoding(backbone, keys, set(job.tokenizer.stop_ids), [room[prompt] for prompt in keys])

    found = written(job, prompts, write, stage)
    return [Sample((*prompt, *found[prompt]), len(prompt)) for prompt in prompts]


def written(
    job: Job, keys: Sequence[Key], write: Callable[[Sequence[Key]], Iterator[tuple[int, list[int]]]], stage: str
) -> dict[Key, list[int]]:
    """The ids for every key, from the store of ``stage`` if it has them, otherwise from ``write``.

    Each process writes its share line by line to a separate file beside the store; the first process merges them. The
    next run, with any number of processes, uses whatever a kill has left.
    """
    place, store = job.place, job.store(stage)
    if place.main:
        store.parent.mkdir(parents=True, exist_ok=True)
        _gather(store)
    place.wait()
    done: dict[Key, list[int]] = _read(store)
    missing = place.share([key for key in dict.fromkeys(keys) if key not in done])
    if missing:
        with place.autocast(), _part(store, place.rank).open("a", encoding="utf-8") as out:
            for count, (i, ids) in enumerate(write(missing), 1):
                out.write(_line(missing[i], ids))
                out.flush()
                job.report(stage, count, len(missing), "")
    place.wait()
    if place.main:
        _gather(store)
    place.wait()
    return _read(store)


def _part(store: Path, rank: int) -> Path:
    return store.with_name(f"{store.stem}.{rank}.part")


def _gather(store: Path) -> None:
    """Merge the files of all processes into the store and delete them."""
    parts = sorted(store.parent.glob(f"{store.stem}.*.part"))
    if not parts:
        return
    whole = _read(store)
    for part in parts:
        whole |= _read(part)
    temporary = store.with_suffix(".tmp")
    temporary.write_text("".join(_line(key, ids) for key, ids in whole.items()), "utf-8")
    os.replace(temporary, store)
    for part in parts:
        part.unlink()


def _line(key: int | tuple[int, ...], ids: list[int]) -> str:
    row = {"of": key, "ids": ids}
    return json.dumps({**row, "crc32": zlib.crc32(json.dumps(row).encode())}) + "\n"


def _read(file: Path) -> dict[Any, list[int]]:
    """The ids by key in a file, without lines that a kill cut short or a disk has changed: these are written again."""
    found: dict[Any, list[int]] = {}
    for line in file.read_bytes().splitlines(keepends=True) if file.is_file() else ():
        try:
            row = json.loads(line)
            key = tuple(row["of"]) if isinstance(row["of"], list) else row["of"]
            if _line(key, row["ids"]).encode() == line:
                found[key] = row["ids"]
        except (ValueError, KeyError, TypeError):
            continue
    return found
