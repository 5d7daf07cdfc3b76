"""Phrases that the model says often: the table says what a count of the rows says, and a damaged
one does no harm.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdevice.errors import BundleError, InputError
from ssdevice.export.phrases import LEAST, SHARE, phrase_table
from ssdevice.runtime.phrases import FEWEST, LARGEST, MOST, Phrases
from ssdevice.runtime.session import Session
from ssdevice.text.tokenizer import Sample
from tests.runtime.tiny_bundle import tiny_bundle, with_phrases

VOCAB = 300


def said(rows: Sequence[Sample]) -> dict[tuple[int, ...], int]:
    """The token that mostly follows each phrase of the answers, counted one by one."""
    after: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for row in rows:
        for place in range(row.prompt, len(row.ids)):
            for length in range(FEWEST, min(MOST, place) + 1):
                after[row.ids[place - length : place]][row.ids[place]] += 1
    best = {phrase: counts.most_common(1)[0] for phrase, counts in after.items()}
    return {
        phrase: token
        for phrase, (token, count) in best.items()
        if count >= LEAST and count >= SHARE * after[phrase].total()
    }


def longest(known: dict[tuple[int, ...], int], text: Sequence[int]) -> int | None:
    phrases = (tuple(text[-length:]) for length in range(min(MOST, len(text)), FEWEST - 1, -1))
    return next((known[phrase] for phrase in phrases if phrase in known), None)


def answers(seed: int, words: int) -> list[Sample]:
    """Rows that say some sentences again and again."""
    draw = Random(seed)
    sentences = list[list[int]]()
    for _ in range(words):
        length = draw.randrange(2, 9)
        sentences.append([draw.randrange(VOCAB) for _ in range(length)])
    texts = list[tuple[int, ...]]()
    for _ in range(40):
        text = list[int]()
        for _ in range(12):
            text += draw.choice(sentences)
        texts.append(tuple(text))
    return [Sample(text, draw.randrange(1, 9)) for text in texts]


@pytest.mark.parametrize("words", [2, 20, 200])
@pytest.mark.parametrize("vocab", [VOCAB, 1 << 18, 1 << 24])
def test_the_table_has_what_mostly_follows(words: int, vocab: int) -> None:
    rows = answers(words, words)
    known = said(rows)
    table = Phrases(phrase_table(rows, vocab), vocab)
    texts = [row.ids[:place] for row in rows for place in range(len(row.ids) + 1)]
    wanted = [longest(known, text) for text in texts]
    found = [table.after(text) for text in texts]
    right = sum(one == other for one, other in zip(wanted, found, strict=True))
    # Of phrases that share a place one is kept: then a shorter one speaks, or none.
    assert right > 0.7 * len(texts) and {*found} - {None} <= {*known.values()}


def test_a_longer_phrase_is_kept_where_it_says_something_else() -> None:
    rows = (
        [Sample((0, 1, 2, 3), 1)] * 9
        + [Sample((0, 9, 1, 2, 4), 1)] * LEAST * 2
        + [Sample((5, 1, 2, 3), 1)] * 20
    )
    table = Phrases(phrase_table(rows, VOCAB), VOCAB)
    assert table.after([1, 2]) == 3 and table.after([7, 1, 2]) == 3 and table.after([9, 1, 2]) == 4
    # (0, 1, 2) and (5, 1, 2) say nothing new.
    assert sum(entry > 0 for entry in memoryview(table.data).cast("I")) <= 6


def test_what_the_prompt_says_is_not_counted() -> None:
    rows = [Sample((7, 8, 9, 10, 7, 8, 11), 4)] * LEAST
    table = Phrases(phrase_table(rows, VOCAB), VOCAB)
    assert table.after([7, 8]) == 11 and table.after([8, 9]) is None
    assert table.after([9, 10]) == 7  # the answer's first token, after the end of the prompt
    assert table.after([8]) is None and table.after([]) is None


def test_rows_without_phrases_give_an_empty_table() -> None:
    table = phrase_table([Sample((1, 2, 3, 4), 1)], VOCAB)
    assert table == bytes(4) and Phrases(table, VOCAB).after([1, 2, 3]) is None


@settings(deadline=None)
@given(
    data=st.integers(0, 8).flatmap(lambda n: st.binary(min_size=4 << n, max_size=4 << n)),
    vocab=st.integers(1, 999),
)
def test_any_bytes_give_tokens_of_the_model(data: bytes, vocab: int) -> None:
    table = Phrases(data, vocab)
    draw = Random(0)
    for _ in range(50):
        token = table.after([draw.randrange(vocab) for _ in range(5)])
        assert token is None or 0 <= token < vocab


@pytest.mark.parametrize("size", [0, 3, 12, (4 << LARGEST) + 4, 8 << LARGEST])
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, size: int) -> None:
    file = tmp_path / "phrases.bin"
    with pytest.raises(InputError, match="no such file"):
        Phrases.read(file, VOCAB)
    file.write_bytes(bytes(size))
    with pytest.raises(BundleError, match=f"{size} bytes"):
        Phrases.read(file, VOCAB)


def test_a_bundle_whose_table_is_none_does_not_open(tmp_path: Path) -> None:
    bundle = with_phrases(tiny_bundle("int8", streams=False, repeats=4), tmp_path / "b", bytes(12))
    with pytest.raises(BundleError, match="12 bytes are no table of phrases"):
        Session.open(bundle, threads=1)
