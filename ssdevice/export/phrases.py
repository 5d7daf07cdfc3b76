"""The table of phrases that a model says often (``ssdevice.runtime.phrases``), made of its own
answers.
"""

from collections.abc import Sequence
from os.path import realpath
from pathlib import Path

import numpy as np

from ssdevice.data import read_examples
from ssdevice.errors import InputError
from ssdevice.runtime.phrases import FEWEST, FILE, LARGEST, MOST, Phrases, check_bits, mixed
from ssdevice.text.tokenizer import ChatTokenizer, Sample

LEAST = 3
SHARE = 0.8
"""How often a phrase must occur, and in which share of the cases the same token must follow it."""


def read_phrases(
    files: Sequence[Path], tokenizer: ChatTokenizer, instruction: str, vocab: int
) -> bytes:
    """The table for answers in files of rows, or in a file that has one already.

    Raises InputError.
    """
    made = [file for file in files if file.suffix.lower() == Path(FILE).suffix]
    if made and len(files) > 1:
        raise InputError(
            f"--phrases {made[0]} is a table: give only this file, or only files of rows"
        )
    if made:
        table = Phrases.read(Path(realpath(made[0])), vocab).data
    else:
        table = phrase_table(
            [tokenizer.sample(example, instruction) for example in read_examples(files)], vocab
        )
    tokens = [
        entry & (1 << vocab.bit_length()) - 1 for entry in memoryview(table).cast("I") if entry
    ]
    if not tokens or not 0 < min(tokens) <= max(tokens) <= vocab:
        if made:
            raise InputError(f"--phrases {files[0]}: no table of a model with {vocab} tokens")
        raise InputError(f"--phrases {files[0]}: nothing is said {LEAST} times; add answers")
    return table


def phrase_table(rows: Sequence[Sample], vocab: int) -> bytes:
    """The table for the answers in ``rows``, see ``Phrases``; of two phrases at one place the more
    frequent one.
    """
    ids = np.concatenate([np.array(row.ids, np.int64) for row in rows])
    before = np.concatenate(
        [np.arange(len(row.ids)) for row in rows]
    )  # tokens of the row before each
    answer = before >= np.concatenate([np.full(len(row.ids), row.prompt) for row in rows])
    states = [np.zeros_like(ids)]
    known = dict[int, int]()
    entries = list[tuple[int, int, int]]()
    bits = vocab.bit_length()
    for length in range(1, MOST + 1):
        states.append(mixed(states[-1], np.roll(ids, length)))
        places = (
            np.flatnonzero(answer & (before >= length))
            if length >= FEWEST
            else np.zeros(0, np.int64)
        )
        both, first, counts = np.unique(
            states[-1][places] << bits | ids[places], return_index=True, return_counts=True
        )
        phrases, which = np.unique(both >> bits, return_inverse=True)
        often = (counts >= LEAST) & (
            counts >= SHARE * np.bincount(which, counts, len(phrases))[which]
        )
        for state, place, count in zip(
            phrases[which][often], places[first[often]], counts[often], strict=True
        ):
            token = int(ids[place])
            shorter = (known.get(int(states[n][place])) for n in range(length - 1, FEWEST - 1, -1))
            if (
                next((one for one in shorter if one is not None), None) != token
            ):  # else it says nothing new
                entries.append((int(count), int(state), token))
            known[int(state)] = token
    size = 1 << min(LARGEST, max(0, 2 * len(entries) - 1).bit_length())
    table = np.zeros(size, "<u4")
    for _, state, token in sorted(entries):
        table[state & size - 1] = check_bits(state) >> bits << bits | token + 1
    return table.tobytes()
