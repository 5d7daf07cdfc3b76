"""Sessions over a scripted model: text, stops, turns, cancelling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress, islice
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdevice.bundle.folder import Bundle
from ssdevice.data import read_examples
from ssdevice.errors import ConfigError, ContextOverflowError, InputError
from ssdevice.runtime.apps import add_app
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.generation import Reason
from ssdevice.runtime.loop import ADAPTIVE, MODES, SPECULATIVE
from ssdevice.runtime.session import Session
from ssdevice.tree import Tree
from tests.runtime.scripted import cache_of, continuation, make_session

TREE = Tree.of([[0], [1], [0, 0], [0, 0, 0]])
texts = st.text("abc xyz", min_size=1, max_size=12).filter(str.strip)


def truth(session: Session, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens up to the stop token."""
    tokens = continuation(prompt, count, session.engine.geometry.vocab)
    return tokens[: tokens.index(0) + 1] if 0 in tokens else tokens


@given(texts, st.integers(0, 50))
def test_every_decoding_mode_gives_the_same_text_and_tokens(prompt: str, seed: int) -> None:
    session = make_session(TREE, seed=seed)
    ids = session.prompt_ids(prompt)
    expected = truth(session, ids, 60)
    for mode in (ADAPTIVE, *MODES):
        runs = list(session.runs(ids, max_tokens=60, mode=mode))
        assert session.last.tokens == expected
        assert [token for run in runs for token in run.tokens] == expected
        assert (
            "".join(run.text for run in runs)
            == session.last.text
            == session.tokenizer.decode(expected)
        )
        assert sum(session.last.accepted) == len(expected) - 1
        assert session.last.reason is (Reason.STOP if expected[-1] == 0 else Reason.MAX_TOKENS)
        if mode != ADAPTIVE:  # which takes both kinds of calls
            assert all((run.drafts is None) == (mode != SPECULATIVE) for run in runs[1:])


@given(texts, st.integers(0, 90))
def test_a_stop_string_ends_every_mode_at_the_same_token(prompt: str, at: int) -> None:
    session = make_session(TREE)
    ids = session.prompt_ids(prompt)
    tokens = [token for token in truth(session, ids, 60) if token]
    written = [session.tokenizer.tokenizer.id_to_token(token) for token in tokens]
    whole = "".join(written)
    stop = whole[at : at + 2]
    if len(stop) < 2:
        return
    is_shown = [
        len(text) == 1 for text in written for _ in text
    ]  # special tokens are searched and not shown
    expected = "".join(compress(whole[: whole.index(stop)], is_shown))
    answers = set()
    for mode in (ADAPTIVE, *MODES):
        text = "".join(run.text for run in session.runs(ids, max_tokens=60, stop=[stop], mode=mode))
        assert text == expected
        assert session.last.reason is Reason.STOP
        answers.add(tuple(session.last.tokens))
    assert len(answers) == 1


def test_statistics_count_steps_and_not_prefill() -> None:
    session = make_session(Tree.chain(4), oracle=1.0)
    ids = session.prompt_ids("hello")
    list(session.runs(ids, max_tokens=11))
    answer = session.last
    assert answer.prompt_tokens == len(ids)
    assert answer.accepted == [5, 5] and answer.steps == 2 and answer.tokens_per_step == 5
    assert answer.prefill_seconds > 0 and answer.decode_seconds > 0 and answer.tokens_per_second > 0


def test_one_token_is_no_step() -> None:
    session = make_session(TREE)
    "".join(session.generate("hello", max_tokens=1))
    assert (
        session.last.steps == 0
        and session.last.tokens_per_step == 0
        and session.last.tokens_per_second == 0
    )


@given(st.lists(texts, min_size=2, max_size=3), st.integers(0, 20))
def test_a_conversation_equals_its_transcript_decoded_at_once(turns: list[str], seed: int) -> None:
    session = make_session(TREE, seed=seed)
    transcript = ""
    for turn in turns:
        transcript += f"<user>{turn}</s><assistant>"
        expected = truth(session, session.tokenizer.encode(transcript), 15)
        text = "".join(session.chat(turn, max_tokens=15))
        assert session.last.tokens == expected
        transcript += text + "</s>"


def test_a_later_turn_computes_only_what_is_new() -> None:
    session = make_session(TREE)
    "".join(session.chat("a long first message of many letters", max_tokens=9))
    conversation = session._conversation
    committed = conversation.length
    chunks = cache_of(conversation).chunks
    chunks.clear()
    "".join(session.chat("b", max_tokens=9))
    assert committed > 40 and sum(chunks) < 10


def test_generate_forgets_the_conversation() -> None:
    session = make_session(TREE)
    alone = "".join(session.generate("b", max_tokens=20))
    "".join(session.chat("a", max_tokens=20))
    assert "".join(session.generate("b", max_tokens=20)) == alone
    assert "".join(session.chat("b", max_tokens=20)) == alone


@given(st.integers(1, 10))
def test_cancelling_leaves_the_session_usable(pieces: int) -> None:
    session = make_session(TREE)
    whole = "".join(session.generate("hello", max_tokens=30))
    answer = session.generate("hello", max_tokens=30)
    part = "".join(islice(answer, pieces))
    answer.close()  # type: ignore[attr-defined]
    assert whole.startswith(part)
    assert session.last.reason in (Reason.CANCELLED, Reason.STOP)
    assert "".join(session.generate("hello", max_tokens=30)) == whole
    # What a cancelled turn said is part of the conversation.
    turn = session.chat("hello", max_tokens=30)
    said = "".join(islice(turn, pieces))
    turn.close()  # type: ignore[attr-defined]
    ids = session.tokenizer.encode(f"<user>hello</s><assistant>{said}</s><user>b</s><assistant>")
    "".join(session.chat("b", max_tokens=9))
    assert session.last.tokens == truth(session, ids, 9)


def test_a_cancelled_answer_ends_after_the_call_that_is_made() -> None:
    session = make_session(TREE)
    whole = "".join(session.generate("hello", max_tokens=30))
    answer = session.generate("hello", max_tokens=30)
    said = next(answer)
    session.cancel()
    assert list(answer) == [] and whole.startswith(said) and session.last.reason is Reason.CANCELLED
    assert "".join(session.generate("hello", max_tokens=30)) == whole


def test_an_answer_is_cancelled_between_two_calls_of_prefill() -> None:
    session = make_session(TREE)
    conversation = session._conversation
    chunk = session.engine.geometry.chunk
    prompt = "x" * (3 * chunk)
    whole = "".join(make_session(TREE).generate("x" * (3 * chunk), max_tokens=9))
    prefill = conversation.prefill
    chunks = []

    def leaving(tokens: Sequence[int]) -> int:
        chunks.append(len(tokens))
        session.cancel()
        return prefill(tokens)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(conversation, "prefill", leaving)
        assert list(session.generate(prompt, max_tokens=9)) == []
    assert (
        chunks == [chunk]
        and conversation.length == chunk
        and session.last.reason is Reason.CANCELLED
    )
    assert "".join(session.generate(prompt, max_tokens=9)) == whole


def test_a_growing_answer_is_that_of_runs_after_each_call() -> None:
    session = make_session(TREE)
    ids = session.prompt_ids("hello")
    other = make_session(TREE)  # whose drafts are the same
    runs = list(other.runs(ids, max_tokens=30))
    seen = []
    for answer in session.growing(ids, max_tokens=30):
        assert answer is session.last
        seen.append((list(answer.tokens), answer.text, answer.reason))
    tokens = list[int]()
    text = ""
    for run, (tokens_then, text_then, reason) in zip(runs, seen, strict=True):
        tokens += run.tokens
        text += run.text
        assert (tokens_then, text_then, reason) == (tokens, text, run.reason)
    assert tokens == other.last.tokens and seen[-1][2] is other.last.reason


def test_a_growing_answer_that_is_cancelled_ends_with_its_reason() -> None:
    session = make_session(TREE)
    ids = session.prompt_ids("x" * 3 * session.engine.geometry.chunk)
    reasons = []
    for answer in session.growing(ids, max_tokens=30):
        reasons.append(answer.reason)
        session.cancel()
    assert reasons == [None, Reason.CANCELLED]
    # Between two calls of prefill there is no token yet.
    conversation = session._conversation
    session.reset()
    prefill = conversation.prefill

    def leaving(tokens: Sequence[int]) -> int:
        session.cancel()
        return prefill(tokens)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(conversation, "prefill", leaving)
        [answer] = session.growing(ids, max_tokens=30)
    assert answer.reason is Reason.CANCELLED and answer.tokens == []
    with pytest.raises(InputError, match="no decoding mode"):
        session.growing(ids, mode="guess")


def test_an_answer_ends_when_a_newer_one_begins() -> None:
    session = make_session(TREE)
    first = session.generate("hello", max_tokens=30)
    next(first)
    alone = "".join(make_session(TREE).generate("b", max_tokens=5))
    assert "".join(session.generate("b", max_tokens=5)) == alone
    with pytest.raises(InputError, match="newer"):
        list(first)


def test_an_answer_takes_the_cache_when_its_first_piece_is_asked_for() -> None:
    session = make_session(TREE)
    expected = {
        prompt: "".join(make_session(TREE).generate(prompt, max_tokens=20))
        for prompt in ("hello", "b")
    }
    first = session.generate("hello", max_tokens=20)
    second = session.generate("b", max_tokens=20)
    with pytest.raises(InputError, match="nothing has been generated"):
        _ = session.last
    next(first)
    assert session.last.prompt_tokens == len(session.prompt_ids("hello"))
    assert "".join(second) == expected["b"]
    with pytest.raises(InputError, match="ended by a newer one"):
        next(first)
    # Neither does one that was made first and began last lose anything, nor one that was closed
    # before it began.
    first = session.generate("hello", max_tokens=20)
    second = session.generate("b", max_tokens=20)
    session.generate("c").close()  # type: ignore[attr-defined]
    assert "".join(second) == expected["b"]
    assert "".join(first) == expected["hello"]


def test_a_message_belongs_to_the_conversation_in_which_it_was_made() -> None:
    session = make_session(TREE)
    one = session.chat("a", max_tokens=5)
    two = session.chat("b", max_tokens=5)
    text = "".join(one)
    with pytest.raises(InputError, match="ended by a newer one"):
        next(two)
    "".join(session.chat("c", max_tokens=5))
    transcript = f"<user>a</s><assistant>{text}</s><user>c</s><assistant>"
    assert session.last.prompt_tokens == len(session.tokenizer.encode(transcript))
    late = session.chat("d", max_tokens=5)
    session.reset()
    with pytest.raises(InputError, match="reset"):
        next(late)


def test_an_answer_goes_with_the_app_it_was_asked_of() -> None:
    session = make_session(TREE)
    app = SimpleNamespace(instruction="")
    session._bundle = cast(
        Bundle, SimpleNamespace(manifest=SimpleNamespace(mode=None, roles={}), app=lambda _: app)
    )
    session._apps = {name: session.engine.new_conversation() for name in ("letters", "numbers")}
    session.use("letters")
    answer = session.generate("hello", max_tokens=5)
    kept = session.generate("hello", max_tokens=5)
    session.use("numbers")
    with pytest.raises(InputError, match="use"):
        next(answer)
    begun = session.generate("hello", max_tokens=9)
    next(begun)
    session.use("letters")
    assert len("".join(kept)) > 0
    with pytest.raises(InputError, match="use"):
        next(begun)


REFUSED = [
    lambda session: session.generate("x" * 2000),
    lambda session: session.chat("x" * 2000),
    lambda session: session.generate(" "),
    lambda session: session.chat(""),
    lambda session: session.generate("a", max_tokens=0),
    lambda session: session.chat("a", max_tokens=0),
    lambda session: session.generate("a", stop=[""]),
    lambda session: session.runs([1, 2], mode="guess"),
    lambda session: session.runs([1, 10**6]),
    lambda session: session.runs([]),
    lambda session: session.use("sql"),
]


@pytest.mark.parametrize("request_", REFUSED)
def test_a_refused_request_changes_nothing(request_: Callable[[Session], object]) -> None:
    session = make_session(TREE)
    "".join(session.chat("hello", max_tokens=9))
    answer = session.chat("b", max_tokens=30)
    text = next(answer)
    last = session.last
    with pytest.raises((InputError, ConfigError)):
        request_(session)
    assert session.last is last
    text += "".join(answer)
    other = make_session(TREE)
    "".join(other.chat("hello", max_tokens=9))
    assert text == "".join(other.chat("b", max_tokens=30))
    assert session.messages == other.messages


def test_bad_requests_are_refused_before_anything_runs() -> None:
    session = make_session(TREE, context=20)
    with pytest.raises(InputError, match="nothing has been generated"):
        _ = session.last
    with pytest.raises(InputError, match="empty"):
        session.generate("  ")
    with pytest.raises(InputError, match="empty"):
        session.chat("")
    with pytest.raises(InputError, match="max_tokens is 0"):
        session.generate("a", max_tokens=0)
    with pytest.raises(ContextOverflowError, match="context of 20"):
        session.generate("a" * 30)
    with pytest.raises(InputError, match="not opened from a bundle"):
        session.use("sql")


def test_an_instruction_stands_before_every_message() -> None:
    session = make_session(TREE)
    session.instruction = "Do it."
    assert session.tokenizer.decode(session.prompt_ids("a")).startswith("Do it.")
    "".join(session.chat("a", max_tokens=3))
    text = session.last.text
    "".join(session.chat("b", max_tokens=3))
    transcript = f"<user>Do it.\na</s><assistant>{text}</s><user>Do it.\nb</s><assistant>"
    assert session.last.prompt_tokens == len(session.tokenizer.encode(transcript))


def test_what_two_prompts_begin_with_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session(TREE)
    first = session.prompt_ids("abc abc xyz")
    second = session.prompt_ids("abc abc abc")
    shared = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    list(session.runs(first, max_tokens=9))
    conversation = session._conversation
    chunks = list[int]()
    whole = conversation.prefill
    monkeypatch.setattr(
        conversation, "prefill", lambda chunk: (chunks.append(len(chunk)), whole(chunk))[1]
    )
    list(session.runs(second, max_tokens=60))
    assert sum(chunks) == len(second) - shared and shared > 0
    assert session.last.tokens == truth(session, second, 60)
    session.reset()
    list(session.runs(second, max_tokens=60))
    assert sum(chunks) == 2 * len(second) - shared


def test_one_stop_string_need_not_be_in_a_list() -> None:
    session = make_session(TREE)
    ids = session.prompt_ids("abc")
    whole = session.tokenizer.decode(truth(session, ids, 60))
    stop = whole[3:5]
    assert (
        "".join(run.text for run in session.runs(ids, max_tokens=60, stop=stop))
        == whole[: whole.index(stop)]
    )


def test_a_closed_session_opens_no_app() -> None:
    session = make_session(TREE)
    session.close()
    with pytest.raises(InputError, match="the session was closed"):
        session.use("sql")


NO_BUNDLE = cast(Bundle, SimpleNamespace(manifest=None))
NO_TEXTS: tuple[Any, ...] = (None, b"Hi", 5, 1.5, ["Hi"], {"role": "user"})
NO_NUMBERS: tuple[Any, ...] = (None, True, 2.0, float("nan"), "8", [3])
OTHER_THINGS: tuple[Any, ...] = (None, 7, 1.5, b"x", ["x"])


@pytest.mark.parametrize(
    ("call", "values", "expected"),
    [
        (lambda s, v: s.generate(v), NO_TEXTS, "prompt is .*, expected a string"),
        (lambda s, v: s.chat(v), NO_TEXTS[1:], "prompt is .*, expected a string"),
        (lambda s, v: s.prompt_ids(v), NO_TEXTS[1:], "prompt is .*, expected a string"),
        (lambda s, v: s.generate("a", system=v), NO_TEXTS[1:], "system is .*, expected a string"),
        (
            lambda s, v: s.generate("a", max_tokens=v),
            NO_NUMBERS,
            "max_tokens is .*, expected a whole number",
        ),
        (
            lambda s, v: s.chat("a", max_tokens=v),
            NO_NUMBERS,
            "max_tokens is .*, expected a whole number",
        ),
        (
            lambda s, v: s.runs([3], max_tokens=v),
            NO_NUMBERS,
            "max_tokens is .*, expected a whole number",
        ),
        (
            lambda s, v: s.generate("a", stop=v),
            (None, b"x", 5),
            "stop is .*, expected a list of strings",
        ),
        (lambda s, v: s.chat("a", stop=[v]), NO_TEXTS, r"stop\[0\] is .*, expected a string"),
        (
            lambda s, v: s.generate("a", speculate=v),
            (None, 1, "no"),
            "speculate is .*, expected True or False",
        ),
        (
            lambda s, v: s.runs(v),
            (None, "Hi", b"Hi", 5),
            "prompt is .*, expected a list of whole numbers",
        ),
        (
            lambda s, v: s.runs([3, v]),
            (None, "a", 2.0, True),
            r"prompt\[1\] is .*, expected a whole number",
        ),
        (lambda s, v: s.runs([3], mode=v), (None, 1, ["plain"]), "no decoding mode"),
        (lambda s, v: s.use(v), OTHER_THINGS, "app is .*, expected a string"),
        (lambda s, v: s.preload("a", v), OTHER_THINGS, r"app\[1\] is .*, expected a string"),
        (lambda _, v: Session.open(v), OTHER_THINGS, "a bundle is .*, expected a path"),
        (lambda _, v: Session.open("x", app=v), OTHER_THINGS[1:], "app is .*, expected a string"),
        (
            lambda _, v: Session.open("x", threads=v),
            NO_NUMBERS[1:],
            "threads is .*, expected a whole number",
        ),
        (
            lambda _, v: Session.open("x", options=v),
            (5, {}, "fast"),
            "options is .*, expected EngineOptions",
        ),
        (lambda _, v: Bundle.open(v), OTHER_THINGS, "a bundle is .*, expected a path"),
        (
            lambda _, v: EngineOptions(spinning=v),
            (None, 1, "no"),
            "spinning is .*, expected True or False",
        ),
        (
            lambda _, v: add_app(NO_BUNDLE, v, "x"),
            OTHER_THINGS,
            "an app's name is .*, expected a string",
        ),
        (lambda _, v: read_examples([v]), OTHER_THINGS, "a data file is .*, expected a path"),
        (
            lambda _, v: read_examples("x", v),
            NO_NUMBERS[1:],
            "limit is .*, expected a whole number",
        ),
    ],
)
def test_a_value_of_a_wrong_type_is_named(
    call: Callable[[Session, Any], Any], values: tuple[Any, ...], expected: str
) -> None:
    session = make_session(TREE)
    for value in values:
        with pytest.raises(InputError, match=expected):
            call(session, value)


def test_numbers_and_ids_of_numpy_are_whole_numbers() -> None:
    session = make_session(TREE)
    ids = session.prompt_ids("abc")
    list(session.runs(ids, max_tokens=5))
    expected = session.last.tokens
    list(session.runs(np.array(ids), max_tokens=np.int64(5)))  # type: ignore[arg-type]
    assert session.last.tokens == expected
