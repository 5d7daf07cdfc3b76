"""What a model writes for its own training: stored once, resumed, deduplicated, and the same for a
seed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ssdevice.cli import main
from ssdevice.data import read_examples
from ssdevice.errors import ConfigError
from ssdevice.model.tokenizer import open_tokenizer
from ssdevice.text.tokenizer import Sample
from ssdevice.train.job import Job, Place
from ssdevice.train.options import UNFINISHED, TrainOptions
from ssdevice.train.samples import FILE, _line, distinct, written
from ssdevice.train.trainer import covered, draft_ids
from tests.train.test_run import base, command  # noqa: F401  # fixture


class Alone:
    """The process state of a run without accelerate."""

    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        self.wait_for_everyone = wait


Key = int | tuple[int, ...]
PLACE = Place(torch.device("cpu"), rank=0, world=1, bf16=False, state=Alone())
KEYS: list[Key] = [(1, 2), (3,), (1, 2), 7, (4,)]


def job(out: Path, place: Place = PLACE) -> Job:
    options = TrainOptions(model="m", data=(Path("a"),), app="abc", out=out)
    return Job(options, place, out, tokenizer=None, report=lambda *_: None)  # type: ignore[arg-type]


def writer(asked: list[Key]):
    def write(keys: Sequence[Key]) -> Iterator[tuple[int, list[int]]]:
        for i in reversed(range(len(keys))):
            asked.append(keys[i])
            yield i, [len(asked)]

    return write


def test_processes_share_the_work_and_every_answer_is_stored_once(tmp_path: Path) -> None:
    folder = tmp_path / UNFINISHED
    asked = list[Key]()
    barrier = threading.Barrier(2)
    both = [
        Place(torch.device("cpu"), rank, world=2, bf16=False, state=Alone(barrier.wait))
        for rank in (0, 1)
    ]
    with ThreadPoolExecutor(2) as pool:
        one, found = pool.map(
            lambda place: written(job(tmp_path, place), KEYS, writer(asked), "answers"), both
        )
    assert one == found
    assert sorted(asked, key=str) == sorted(set(KEYS), key=str)
    assert sorted(p.name for p in folder.iterdir()) == ["answers.0.jsonl", "answers.1.jsonl"]
    lines = [line for file in folder.iterdir() for line in file.read_text().splitlines() if line]
    assert len(lines) == 4 and found.keys() == set(KEYS)
    assert written(job(tmp_path), KEYS, writer(asked), "answers") == found
    assert len(asked) == 4, "nothing was asked for twice"


def test_what_a_kill_left_is_used(tmp_path: Path) -> None:
    (tmp_path / UNFINISHED).mkdir()
    lines = (
        _line((3,), [9])
        + _line((4,), [8]).replace("8", "7", 1)
        + '\xff{"of": 7}\n[]\n'
        + _line((1, 2), [5])[:-9]
    )
    (tmp_path / UNFINISHED / "answers.0.jsonl").write_text(lines, "latin-1")
    asked = list[Key]()
    found = written(job(tmp_path), KEYS, writer(asked), "answers")
    assert found[(3,)] == [9] and (3,) not in asked
    assert len(asked) == 3, "what is cut short or damaged is written again"


def test_prompts_that_go_in_circles_or_come_twice_are_dropped() -> None:
    texts = [
        "What is it?",
        "what is  it",
        "no no no no no no",
        "Hi",
        "a b \ufffd",
        " Name a river in Peru. ",
    ]
    assert distinct(texts) == ["What is it?", "Name a river in Peru."]


def test_a_draft_vocabulary_is_of_what_is_said() -> None:
    samples = [Sample((9, 9, 8, 5, 5, 6), 3), Sample((7, 5, 4), 1)]
    assert draft_ids(samples, [30], 4, 40) == [4, 5, 6, 30]
    assert draft_ids(samples, [30, 99], 8, 40) == [0, 4, 5, 6, 7, 8, 9, 30]
    assert covered(samples, [5]) == pytest.approx(0.6)


@pytest.mark.parametrize("instruction", ["", "a b"])
def test_a_model_prompts_itself(base: Path, tmp_path: Path, instruction: str) -> None:  # noqa: F811
    found = []
    for name, extra in (("first", []), ("again", ["--lr", "1e-3"])):
        arguments = command(
            base, Path("unused"), tmp_path / name, "--mode", "lossless", "--self-prompt", "12"
        )[3:]
        at = arguments.index("--data")
        del arguments[at : at + 2]
        assert (
            main(
                [
                    *arguments,
                    "--steps",
                    "2",
                    "--answer-tokens",
                    "9",
                    "--instruction",
                    instruction,
                    *extra,
                ]
            )
            == 0
        )
        found.append((tmp_path / name / FILE).read_text())
    assert found[0] == found[1], "the seed decides"
    rows = read_examples(tmp_path / "first" / FILE)
    assert len({row.prompt for row in rows}) == len(rows) > 6, "all but those with an empty answer"
    assert load_file(tmp_path / "first" / "streams.safetensors")["identifiers"].shape == (4, 32)


def test_the_opening_is_the_templates_own(base: Path, tmp_path: Path) -> None:  # noqa: F811
    tokenizer = open_tokenizer(base)
    ids, end = tokenizer.user_opening("a")
    assert [*ids, *tokenizer.encode("b"), end] == tokenizer.prompt_ids("b", instruction="a")[:-1]
    for file in base.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['content'] + ' . ' }}{% endfor %}"
    )
    with pytest.raises(ConfigError, match="does not end a user's turn"):
        open_tokenizer(tmp_path).user_opening()


def test_data_or_own_prompts(
    base: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = command(base, tmp_path / "x.jsonl", tmp_path / "out", "--self-prompt", "4")[3:]
    assert main(arguments) == 2
    assert "either --data" in capsys.readouterr().err
