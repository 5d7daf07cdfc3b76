"""The loop against a scripted model: plain and speculative decoding agree whatever is drafted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdevice.errors import ContextOverflowError, InputError
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.generation import Reason
from ssdevice.runtime.loop import MODES, Advance, decode, plain, prefill, speculative
from ssdevice.text.stream import Emission
from ssdevice.tree import Tree
from tests.runtime.scripted import (
    ScriptedEngine,
    cache_of,
    continuation,
    make_geometry,
    next_token,
    random_drafter,
)

TREES = (
    Tree.chain(1),
    Tree.chain(4),
    Tree.full(3, 2),
    Tree.of([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 0, 2]]),
)
prompts = st.lists(st.integers(0, 10), min_size=1, max_size=12)


def stop_at(stops: Sequence[int]):  # type: ignore[no-untyped-def]
    """An ``Accept`` that ends at the first of some tokens."""

    def accept(run: Sequence[int]) -> Emission:
        for at, token in enumerate(run):
            if token in stops:
                return Emission("", at + 1, True)
        return Emission("", len(run), False)

    return accept


def flat(runs: Sequence[Sequence[int]]) -> list[int]:
    return [token for run in runs for token in run]


def start(tree: Tree, seed: int = 0, oracle: float = 0.7, context: int = 40) -> Conversation:
    return ScriptedEngine(
        make_geometry(tree, context=context), random_drafter(seed, oracle)
    ).new_conversation()


def run(
    conversation: Conversation,
    prompt: Sequence[int],
    advance: Advance,
    stops: Sequence[int] = (),
    max_tokens: int = 30,
) -> tuple[list[list[int]], Reason]:
    """All runs of one answer and its reason."""
    runs = list(decode(conversation, prompt, advance, stop_at(stops), max_tokens))
    assert all(found.reason is None for found in runs[:-1]) and runs[-1].reason is not None
    return [list(found.tokens) for found in runs], runs[-1].reason


@given(
    st.sampled_from(TREES),
    prompts,
    st.integers(0, 99),
    st.floats(0, 1),
    st.sets(st.integers(0, 10), max_size=2),
)
def test_every_decoding_mode_gives_greedy_decoding(
    tree: Tree, prompt: list[int], seed: int, oracle: float, stops: set[int]
) -> None:
    truth = continuation(prompt, 30, 11)
    first = min((truth.index(stop) for stop in stops if stop in truth), default=29)
    fits = 40 - len(prompt) + 1
    expected = truth[: min(first + 1, fits)]
    for advance in MODES.values():
        conversation = start(tree, seed, oracle)
        runs, reason = run(conversation, prompt, advance, sorted(stops))
        tokens = flat(runs)
        assert tokens == expected
        if tokens[-1] in stops:
            assert reason is Reason.STOP
        else:
            assert reason is (Reason.MAX_TOKENS if len(tokens) == 30 else Reason.CONTEXT)
        # All but the last token are committed, and exactly as plain decoding commits them.
        assert cache_of(conversation).held[: conversation.length].tolist() == [
            *prompt,
            *tokens[:-1],
        ]


@given(st.sampled_from(TREES), prompts, st.integers(1, 25))
def test_max_tokens_is_exact(tree: Tree, prompt: list[int], max_tokens: int) -> None:
    for advance in MODES.values():
        runs, reason = run(start(tree, oracle=1.0), prompt, advance, max_tokens=max_tokens)
        assert len(flat(runs)) == max_tokens
        assert reason is Reason.MAX_TOKENS


@given(st.sampled_from(TREES), st.integers(1, 40), st.integers(20, 44))
def test_the_context_ends_every_mode_at_the_same_token(
    tree: Tree, prompt_tokens: int, context: int
) -> None:
    prompt = [next_token([i], 11) for i in range(min(prompt_tokens, context))]
    answers = set()
    for advance in MODES.values():
        conversation = start(tree, oracle=1.0, context=context)
        runs, reason = run(conversation, prompt, advance, max_tokens=1000)
        assert reason is Reason.CONTEXT
        assert conversation.length == context
        answers.add(tuple(flat(runs)))
    assert answers == {tuple(continuation(prompt, context - len(prompt) + 1, 11))}


def test_good_drafts_save_calls() -> None:
    conversation = start(Tree.chain(4), oracle=1.0)
    runs, _ = run(conversation, [1, 2, 3], speculative, max_tokens=26)
    assert [len(tokens) for tokens in runs] == [1, 5, 5, 5, 5, 5]
    assert cache_of(conversation).steps == 5


@given(prompts, prompts, st.integers(0, 99), st.integers(0, 10))
def test_a_turn_after_a_stop_inside_a_run_continues_what_was_said(
    prompt: list[int], more: list[int], seed: int, stop: int
) -> None:
    """The last token of an answer is not committed, so the next prefill begins with it."""
    answers = set()
    for advance in MODES.values():
        conversation = start(Tree.full(2, 3), seed, 0.9, context=100)
        runs, _ = run(conversation, prompt, advance, [stop], max_tokens=20)
        first = flat(runs)
        second = flat(run(conversation, [first[-1], *more], advance, [stop], max_tokens=20)[0])
        truth = continuation([*prompt, *first, *more], 20, 11)
        assert second == truth[: len(second)]
        answers.add((tuple(first), tuple(second)))
    assert len(answers) == 1


@given(prompts, st.integers(1, 6), st.sampled_from(TREES))
def test_a_closed_generator_leaves_the_conversation_usable(
    prompt: list[int], pieces: int, tree: Tree
) -> None:
    conversation = start(tree, oracle=0.8)
    steps = decode(conversation, prompt, speculative, stop_at(()), 30)
    said: list[int] = []
    for found in islice(steps, pieces):
        said.extend(found.tokens)
    del steps
    assert cache_of(conversation).held[: conversation.length].tolist() == [*prompt, *said[:-1]]
    runs, _ = run(conversation, [said[-1]], plain, max_tokens=5)
    tokens = flat(runs)
    assert tokens == continuation([*prompt, *said], len(tokens), 11)


@given(st.sampled_from(TREES), prompts, st.integers(0, 99))
def test_going_back_is_lowering_the_length(tree: Tree, prompt: list[int], seed: int) -> None:
    conversation = start(tree, seed)
    first, _ = run(conversation, prompt, speculative)
    conversation.length = 0
    again, _ = run(conversation, prompt, plain)
    assert flat(first) == flat(again)


def test_a_prompt_may_fill_the_context_and_no_more() -> None:
    runs, reason = run(start(Tree.chain(2), context=20), [1] * 20, speculative)
    assert [len(tokens) for tokens in runs] == [1] and reason is Reason.CONTEXT
    with pytest.raises(ContextOverflowError, match="21 tokens.*context of 20"):
        prefill(start(Tree.chain(2), context=20), [1] * 21)


def test_a_later_turn_that_does_not_fit_says_what_is_taken() -> None:
    conversation = start(Tree.chain(2), context=20)
    prefill(conversation, [1] * 15)
    with pytest.raises(ContextOverflowError, match="6 tokens after 15 tokens of the conversation"):
        prefill(conversation, [1] * 6)
    assert conversation.length == 15


@pytest.mark.parametrize("prompt", [[], [11], [-1, 3]])
def test_prompts_that_are_no_tokens_are_refused(prompt: list[int]) -> None:
    with pytest.raises(InputError):
        prefill(start(Tree.chain(2)), prompt)
