"""What a model writes for training: its own greedy answers, and prompts of its own, in files that outlive a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ssdevice.model.backbone import Backbone
from ssdevice.train.batches import Sample
from ssdevice.train.decoding import decode
from ssdevice.train.place import Place

Key = int | tuple[int, ...]
"""What an answer belongs to: the ids of its prompt, or the number of an attempt."""
Progress = Callable[[int, int], None]


def own_completions(
    place: Place,
    backbone: Backbone,
    samples: Sequence[Sample],
    stop: Sequence[int],
    most: Sequence[int],
    store: Path,
    progress: Progress,
) -> list[Sample]:
    """Samples with their completions replaced by the model's greedy ones of at most ``most[i]`` tokens each.

    A prompt that occurs twice is answered once. ``store``: see ``written``.
    """
    prompts = [sample.ids[: sample.prompt] for sample in samples]
    room = dict(zip(prompts, most, strict=True))

    def write(keys: Sequence[Key]) -> Iterator[tuple[int, list[int]]]:
        todo = [key for key in keys if isinstance(key, tuple)]
        return decode(backbone, todo, set(stop), [room[prompt] for prompt in todo])

    found = written(place, store, prompts, write, progress)
    return [Sample((*prompt, *found[prompt]), len(prompt)) for prompt in prompts]


def written(
    place: Place,
    store: Path,
    keys: Sequence[Key],
    write: Callable[[Sequence[Key]], Iterator[tuple[int, list[int]]]],
    progress: Progress,
) -> dict[Key, list[int]]:
    """The ids for every key, from ``store`` where it has them, else as ``write`` makes them.

    Each process writes its share to a file of its own beside the store, line by line; the first process puts them
    together. Whatever a kill leaves is used by the next run, of any number of processes.
    """
    if place.main:
        store.parent.mkdir(parents=True, exist_ok=True)
        _gather(store)
    place.wait()
    done = _read(store)
    missing = place.share([key for key in dict.fromkeys(keys) if key not in done])
    if missing:
        with place.autocast(), _part(store, place.rank).open("a", encoding="utf-8") as out:
            for count, (i, ids) in enumerate(write(missing), 1):
                out.write(json.dumps({"of": missing[i], "ids": ids}) + "\n")
                out.flush()
                progress(count, len(missing))
    place.wait()
    if place.main:
        _gather(store)
    place.wait()
    return _read(store)


def _part(store: Path, rank: int) -> Path:
    return store.with_name(f"{store.stem}.{rank}.part")


def _gather(store: Path) -> None:
    """Put the processes' files into the store, each line once; then they go."""
    parts = sorted(store.parent.glob(f"{store.stem}.*.part"))
    if not parts:
        return
    whole = _read(store)
    for part in parts:
        whole |= _read(part)
    temporary = store.with_suffix(".tmp")
    lines = (json.dumps({"of": key, "ids": ids}) + "\n" for key, ids in whole.items())
    temporary.write_text("".join(lines), "utf-8")
    os.replace(temporary, store)
    for part in parts:
        part.unlink()


def _read(file: Path) -> dict[Key, list[int]]:
    """What a file holds; a line cut by a kill is dropped."""
    if not file.is_file():
        return {}
    text = file.read_text("utf-8")
    rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return {tuple(row["of"]) if isinstance(row["of"], list) else row["of"]: row["ids"] for row in rows}
