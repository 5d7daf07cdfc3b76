"""Data files: what is read, and that every wrong line is named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from ssdevice.data import MAX_LINE_BYTES, Example, iter_examples, read_examples
from ssdevice.errors import InputError

GOOD = b'{"prompt": "a", "completion": "b"}\n'


def write(tmp_path: Path, content: bytes, name: str = "data.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


def test_reads_plain_and_gzip_alike(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p1", "completion": "c1"},
        {"prompt": "p2", "completion": "你好 🙂", "references": ["r1", "r2"], "id": 7},
    ]
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    plain = write(tmp_path, content)
    zipped = write(tmp_path, gzip.compress(content), "data.jsonl.gz")
    expected = [Example("p1", "c1"), Example("p2", "你好 🙂", ("r1", "r2"))]
    assert read_examples(plain) == read_examples([zipped]) == expected
    assert [example.targets for example in expected] == [("c1",), ("r1", "r2")]


def test_reads_chat_form(tmp_path: Path) -> None:
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ]
    path = write(tmp_path, json.dumps({"messages": turns}).encode())
    assert read_examples(path) == [Example("u", "a", system="s")]
    path = write(tmp_path, json.dumps({"messages": turns[1:2]}).encode())
    assert read_examples(path, require_completion=False) == [Example("u")]
    with pytest.raises(InputError, match="line 1: 'completion' is missing"):
        read_examples(path)


def test_byte_order_mark_blank_lines_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = write(
        tmp_path, b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n") + b"\r\n  \n" + GOOD.strip()
    )
    assert len(read_examples(path)) == 2


def test_line_separators_inside_text_do_not_split_lines(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "a\u2028b\x85c"}'.encode())
    assert read_examples(path, require_completion=False)[0].prompt == "a\u2028b\x85c"


def test_limit_counts_over_files_and_leaves_the_rest_unread(tmp_path: Path) -> None:
    first = write(tmp_path, GOOD)
    second = write(tmp_path, GOOD + b"not json\n", "second.jsonl")
    assert len(read_examples([first, second], limit=2)) == 2
    with pytest.raises(InputError, match=r"second\.jsonl, line 2: not JSON"):
        read_examples([first, second], limit=3)
    for limit in (0, -1):
        with pytest.raises(InputError, match=f"limit is {limit}"):
            read_examples(first, limit=limit)
    with pytest.raises(InputError, match="no data file"):
        read_examples([])


def test_streams_without_reading_ahead(tmp_path: Path) -> None:
    stream = iter_examples(write(tmp_path, GOOD * 3 + b"{"))
    assert [next(stream).prompt for _ in range(3)] == ["a"] * 3
    with pytest.raises(InputError, match="line 4"):
        next(stream)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{oops", "line 2: not JSON"),
        (b"\xff\xfe", "line 2: not UTF-8"),
        (b"[1]", "line 2: expected an object, found a list"),
        (b'{"completion": "b"}', "line 2: 'prompt' is missing"),
        (b'{"prompt": "a"}', "line 2: 'completion' is missing"),
        (b'{"prompt": "a", "completion": null}', "line 2: 'completion' is missing"),
        (
            b'{"prompt": 3, "completion": "b"}',
            r"line 2\.prompt: expected a string, found an integer",
        ),
        (b'{"prompt": " \\n", "completion": "b"}', "line 2: 'prompt' is empty"),
        (b'{"prompt": "a", "completion": ""}', "line 2: 'completion' is empty"),
        (
            b'{"prompt": "a", "completoin": "b"}',
            "line 2: unknown key 'completoin', did you mean 'completion'",
        ),
        (
            b'{"prompt": "a", "completion": "b", "zzz": 1}',
            "line 2: unknown key 'zzz'; known keys are prompt",
        ),
        (
            b'{"prompt": "a", "prompt": "a", "completion": "b"}',
            "line 2: key .prompt. appears twice",
        ),
        (
            b'{"prompt": "a", "completion": "b", "references": "r"}',
            r"line 2\.references: expected a list",
        ),
        (
            b'{"prompt": "a", "completion": "b", "references": ["r", 1]}',
            r"line 2\.references\[1\]: expected a string",
        ),
        (b'{"prompt": "\\ud800", "completion": "b"}', "line 2: 'prompt' holds half a character"),
        (b'{"messages": "a"}', r"line 2\.messages: expected a list"),
        (b'{"messages": [{"role": "user"}]}', r"line 2\.messages\[0\]: 'content' is missing"),
        (b'{"messages": [{"role": "assistant", "content": "b"}]}', "line 2: messages by"),
        (
            b'{"messages": [{"role": [], "content": "b"}]}',
            r"line 2\.messages\[0\]\.role: expected a string",
        ),
        (
            b'{"messages": [{"role": "user", "content": ["b"]}]}',
            r"line 2\.messages\[0\]\.content: expected a string",
        ),
        (b'{"messages": [], "prompt": "a"}', "line 2: give either"),
        (b"[" * 200_000, "line 2: JSON is nested too deeply"),
        (b'{"id": ' + b"9" * 5000 + b"}", "line 2: not JSON this tool can use"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, line: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_examples(write(tmp_path, GOOD + line + b"\n"))


def test_wrong_files_are_named(tmp_path: Path) -> None:
    zipped = gzip.compress(GOOD * 5000)
    cases = [
        (tmp_path / "absent.jsonl", "absent.jsonl: no such file"),
        (tmp_path, "is a folder"),
        (write(tmp_path, b"", "empty.jsonl"), "empty.jsonl: holds no examples"),
        (write(tmp_path, b"\n \n", "blank.jsonl"), "blank.jsonl: holds no examples"),
        (
            write(tmp_path, GOOD, "plain.jsonl.gz"),
            "plain.jsonl.gz: its name ends in .gz but it is not gzip",
        ),
        (write(tmp_path, zipped, "zipped.jsonl"), "zipped.jsonl: holds gzip data"),
        (write(tmp_path, zipped[:-20], "cut.jsonl.gz"), "cut.jsonl.gz: the gzip data end early"),
        (
            write(tmp_path, zipped[:-8] + b"\0" * 8, "crc.jsonl.gz"),
            "crc.jsonl.gz: damaged gzip data",
        ),
        (
            write(tmp_path, b" " * (MAX_LINE_BYTES + 1), "long.jsonl"),
            "long.jsonl, line 1: longer than 16 MiB",
        ),
    ]
    for path, message in cases:
        with pytest.raises(InputError, match=message):
            read_examples(path)
