"""Sessions over a scripted model: text, stops, turns, cancelling."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdevice.errors import ContextOverflowError, InputError
from ssdevice.runtime.loop import Reason
from ssdevice.runtime.session import ADVANCES, Session
from ssdevice.tree import Tree
from tests.runtime.scripted import ScriptedConversation, continuation, make_session

TREE = Tree.of([[0], [1], [0, 0], [0, 0, 0]])
texts = st.text("abc xyz", min_size=1, max_size=12).filter(str.strip)


def truth(session: Session, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens up to the stop token."""
    tokens = continuation(prompt, count, session.engine.geometry.vocab)
    return tokens[: tokens.index(0) + 1] if 0 in tokens else tokens


def conversation_of(session: Session) -> ScriptedConversation:
    conversation = session._conversation
    assert isinstance(conversation, ScriptedConversation)
    return conversation


@given(texts, st.integers(0, 50))
def test_every_arm_gives_the_same_text_and_tokens(prompt: str, seed: int) -> None:
    session = make_session(TREE, seed=seed)
    ids = session.prompt_ids(prompt)
    expected = truth(session, ids, 60)
    for arm in ADVANCES:
        runs = list(session.runs(ids, max_tokens=60, arm=arm))
        assert session.last.tokens == expected
        assert [token for run in runs for token in run.tokens] == expected
        assert "".join(run.text for run in runs) == session.last.text == session.tokenizer.decode(expected)
        assert sum(session.last.accepted) == len(expected) - 1
        assert session.last.reason is (Reason.STOP if expected[-1] == 0 else Reason.MAX_TOKENS)
        assert all((run.drafts is None) == (arm != "speculative") for run in runs[1:] if run.tokens)


@given(texts, st.integers(0, 20))
def test_a_stop_string_ends_every_arm_at_the_same_token(prompt: str, at: int) -> None:
    session = make_session(TREE)
    ids = session.prompt_ids(prompt)
    whole = session.tokenizer.decode(truth(session, ids, 60))
    stop = whole[at : at + 2]
    if len(stop) < 2:
        return
    answers = set()
    for arm in ADVANCES:
        text = "".join(run.text for run in session.runs(ids, max_tokens=60, stop=[stop], arm=arm))
        assert text == whole[: whole.index(stop)]
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
    assert session.last.steps == 0 and session.last.tokens_per_step == 0 and session.last.tokens_per_second == 0


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
    conversation = conversation_of(session)
    committed, chunks = conversation.length, []
    original = conversation.prefill
    conversation.prefill = lambda chunk: (chunks.append(len(chunk)), original(chunk))[1]  # type: ignore[method-assign]
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


def test_an_answer_ends_when_a_newer_one_begins() -> None:
    session = make_session(TREE)
    first = session.generate("hello", max_tokens=30)
    next(first)
    alone = "".join(make_session(TREE).generate("b", max_tokens=5))
    assert "".join(session.generate("b", max_tokens=5)) == alone
    with pytest.raises(InputError, match="newer"):
        list(first)


def test_bad_requests_are_refused_before_anything_runs() -> None:
    session = make_session(TREE, context=20)
    with pytest.raises(InputError, match="nothing was generated"):
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
