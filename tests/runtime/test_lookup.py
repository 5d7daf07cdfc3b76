"""Drafts that repeat the text: used where they are right more often than streams, and they change
no token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ssdevice.export.phrases import phrase_table
from ssdevice.runtime.adaptive import Adaptive
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.lookup import CERTAIN, MOST, Lookup, LookupOnly
from ssdevice.runtime.loop import Advance, decode, plain
from ssdevice.runtime.phrases import Phrases
from ssdevice.text.stream import Emission
from ssdevice.text.tokenizer import Sample
from ssdevice.tree import Tree
from tests.runtime import scripted
from tests.runtime.scripted import ScriptedCache, ScriptedEngine, make_geometry, random_drafter

VOCAB = 11
WIDE = Tree.of([[0], [1], [0, 0], [1, 0], [0, 0, 0]])
TURN = [1, 5, 2, 7, 7, 3, 9, 4]


@pytest.fixture
def turning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that says TURN over and over, whatever came before."""
    monkeypatch.setattr(
        scripted, "next_token", lambda context, vocab: TURN[len(context) % len(TURN)]
    )


def wrong(cache: ScriptedCache, context: Sequence[int]) -> NDArray[np.int32]:
    """Drafts that the model never says."""
    return np.full((cache.geometry.gamma, cache.geometry.k), VOCAB - 1, np.int32)


def no_streams(cache: ScriptedCache, context: Sequence[int]) -> NDArray[np.int32]:
    """What a step of a model without streams returns."""
    return np.zeros((cache.geometry.gamma, cache.geometry.k), np.int32)


def runs(
    engine: ScriptedEngine, advance: Advance, prompt: Sequence[int], most: int = 40
) -> Iterator[tuple[int, ...]]:
    conversation = engine.new_conversation()
    answer = decode(conversation, prompt, advance, lambda run: Emission("", len(run), False), most)
    return (run.tokens for run in answer)


@pytest.mark.parametrize("tree", [Tree.chain(3), WIDE])
def test_text_that_repeats_is_drafted_where_streams_are_wrong(turning: None, tree: Tree) -> None:
    engine = ScriptedEngine(make_geometry(tree, vocab=VOCAB, context=80), wrong)
    lookup = Lookup()
    sizes = [len(run) for run in runs(engine, lookup, [0], 60)]
    assert lookup.lead == MOST and set(sizes[:8]) == {1} and set(sizes[-5:-1]) == {tree.depth + 1}
    # What was learned lasts; the first turn of a new prompt still has nothing to repeat.
    sizes = [len(run) for run in runs(engine, lookup, [0], 60)]
    assert set(sizes[: len(TURN)]) == {1} and len(sizes) < 2 * len(TURN) + 10


def test_streams_that_are_right_are_left_alone(turning: None) -> None:
    """The prompt says 8 after what the model follows with 7, so lookup is wrong at first."""
    said = [*TURN[:3], 8] * 3
    engine = ScriptedEngine(
        make_geometry(Tree.chain(3), vocab=VOCAB, context=80), random_drafter(0, 1.0)
    )
    lookup = Lookup()
    start = len(TURN) - len(said) % len(TURN)
    sizes = [len(run) for run in runs(engine, lookup, [*[6] * start, *said], 40)]
    assert lookup.lead < 0 and set(sizes[1:-1]) == {4}


@settings(deadline=None)
@given(
    tree=st.sampled_from([Tree.chain(1), Tree.chain(4), WIDE]),
    words=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
    prompts=st.lists(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=15), min_size=1, max_size=3
    ),
    oracle=st.sampled_from([0.0, 0.5, 1.0]),
    lead=st.integers(-2, 2),
)
def test_answers_are_those_of_plain_decoding(
    tree: Tree, words: list[int], prompts: list[list[int]], oracle: float, lead: int
) -> None:
    lookup = Lookup()
    lookup.lead = lead
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            scripted,
            "next_token",
            lambda context, vocab: words[(sum(context) + len(context)) % len(words)],
        )
        engine = ScriptedEngine(
            make_geometry(tree, vocab=VOCAB, context=60), random_drafter(1, oracle)
        )
        for prompt in prompts:
            truth = [token for run in runs(engine, plain, prompt) for token in run]
            assert [token for run in runs(engine, lookup, prompt) for token in run] == truth


def test_going_back_in_the_text_is_no_error(turning: None) -> None:
    engine = ScriptedEngine(make_geometry(Tree.chain(2), vocab=VOCAB, context=80), wrong)
    lookup = Lookup()
    conversation = engine.new_conversation()
    last = conversation.prefill([1])
    for length in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 3, 4, 5):
        conversation.length = length
        last = lookup(conversation, last)[0]
    assert lookup._indexed == 6


def test_lookup_rests_while_streams_are_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last three of random words say nothing, and the drafter knows which word comes next."""
    engine = ScriptedEngine(
        make_geometry(Tree.chain(1), vocab=3, context=3000), random_drafter(0, 1.0)
    )
    lookup = Lookup()
    looked = []
    monkeypatch.setattr(
        lookup, "_next", lambda own=lookup._next: looked.append(lookup.lead) or own()
    )
    sizes = [len(run) for run in runs(engine, lookup, [0], 2500)]
    assert 0 < len(looked) < 200 and max(looked) <= 0 and set(sizes[1:-1]) == {2}


def test_a_replaced_candidate_becomes_the_next_best(turning: None) -> None:
    engine = ScriptedEngine(make_geometry(WIDE, vocab=VOCAB, context=80), wrong)
    lookup = Lookup()
    conversation = engine.new_conversation()
    token = conversation.prefill(TURN[:4])
    conversation.length = 4
    conversation.text[:] = [3, 4, 5, 6, 3, 4, 5]
    conversation.length = len(conversation.text) - 1
    lookup.lead = 1
    conversation.drafts[:] = [[9, 8], [3, 2], [7, 5]]
    conversation.cache.length = conversation.length
    conversation.cache.held[: conversation.length] = conversation.text[:-1]
    lookup(conversation, conversation.text[-1])
    assert token and conversation.verified.tolist() == [[6, 9], [3, 2], [4, 7]]


def test_without_streams_a_text_that_does_not_repeat_itself_is_decoded_plainly(
    turning: None,
) -> None:
    engine = ScriptedEngine(make_geometry(Tree.chain(3), vocab=VOCAB, context=80), no_streams)
    conversation = engine.new_conversation()
    lookup = LookupOnly()
    conversation.prefill([0])
    conversation.length = 1
    assert not lookup(conversation, TURN[1]) and not conversation.cache.steps
    # All calls take the same time.
    adaptive = Adaptive(LookupOnly(), clock=iter(range(1000)).__next__)
    sizes = [len(run) for run in runs(engine, adaptive, [0], 60)]
    assert set(sizes[: len(TURN)]) == {1} and 4 in sizes
    assert sum(size > 1 for size in sizes) > sizes[len(TURN) :].count(1)


def test_two_tokens_that_occurred_before_are_enough_without_streams() -> None:
    """Beside streams, which guess open text better than so short a match, three are needed."""
    engine = ScriptedEngine(make_geometry(Tree.chain(3), vocab=VOCAB, context=80), no_streams)
    for lookup, drafted in ((LookupOnly(), [7, 9, 5]), (Lookup(), [0, 0, 0])):
        lookup.lead = MOST
        conversation = engine.new_conversation()
        conversation.text = [5, 6, 7, 9, 5]
        conversation.length = 5
        lookup._draft(conversation, 6)
        assert conversation.drafts[:, 0].tolist() == drafted


def test_a_short_step_verifies_what_a_short_match_drafts(turning: None) -> None:
    """A match grows from call to call; from CERTAIN tokens on all drafts are verified."""
    geometry = make_geometry(Tree.chain(4), vocab=VOCAB, context=90, short=2)
    conversation = ScriptedEngine(geometry, no_streams).new_conversation()
    lookup = LookupOnly()
    seen: list[tuple[int, int]] = []

    def advance(conversation: Conversation, last: int) -> Sequence[int]:
        tokens = lookup(conversation, last)
        if tokens:
            seen.append((lookup._matched, len(conversation.verified)))
        return tokens or plain(conversation, last)

    answer = decode(conversation, [0], advance, lambda run: Emission("", len(run), False), 60)
    said = [token for run in answer for token in run.tokens]
    assert said == [TURN[i % len(TURN)] for i in range(1, 61)]
    assert {drafts for matched, drafts in seen if matched < CERTAIN} == {2}
    assert {drafts for matched, drafts in seen if matched >= CERTAIN} == {4}


def test_phrases_are_drafted_where_the_text_has_no_match() -> None:
    rows = [Sample((0, 6, 7, 3, 4, 5), 1)] * 3
    lookup = LookupOnly(Phrases(phrase_table(rows, VOCAB), VOCAB))
    conversation = ScriptedEngine(
        make_geometry(Tree.chain(3), vocab=VOCAB, context=80), no_streams
    ).new_conversation()
    conversation.text = [5, 6]
    conversation.length = 2
    lookup._draft(conversation, 7)
    assert conversation.drafts[:, 0].tolist() == [3, 4, 5] and lookup._matched == 0
    # what the text says goes first
    conversation.text = [6, 7, 2, 1, 6]
    conversation.length = 5
    conversation.drafts[:] = 0
    lookup._draft(conversation, 7)
    assert conversation.drafts[:, 0].tolist() == [2, 1, 6] and lookup._matched == 2


@settings(deadline=None)
@given(
    words=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
    prompt=st.lists(st.integers(0, 5), min_size=1),
)
def test_answers_without_streams_are_those_of_plain_decoding(
    words: list[int], prompt: list[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            scripted,
            "next_token",
            lambda context, vocab: words[(sum(context) + len(context)) % len(words)],
        )
        engine = ScriptedEngine(make_geometry(Tree.chain(2), vocab=VOCAB, context=90), no_streams)
        truth = [token for run in runs(engine, plain, prompt[:40]) for token in run]
        adaptive = Adaptive(LookupOnly())
        assert [token for run in runs(engine, adaptive, prompt[:40]) for token in run] == truth


def test_a_draft_that_a_structure_forbids_is_not_verified(turning: None) -> None:
    engine = ScriptedEngine(make_geometry(Tree.chain(2), vocab=VOCAB), wrong)
    for drafter in (Lookup(), LookupOnly()):
        conversation = engine.new_conversation()
        conversation.prefill([1, 2, VOCAB - 1, 1])
        conversation.length = 4
        conversation.drafts[...] = VOCAB - 1
        conversation.allows = lambda token: token != VOCAB - 1
        assert drafter(conversation, 2) == () and not conversation.hopeful()
        conversation.forced = lambda: [5]
        assert len(drafter(conversation, 2)) >= 1


def test_without_streams_a_draft_of_the_step_before_hides_no_match() -> None:
    """Where the host chooses tokens nothing drafts anew after a step, so text of one word has the
    same draft again.
    """
    engine = ScriptedEngine(make_geometry(Tree.chain(2), vocab=VOCAB), no_streams)
    lookup = LookupOnly()
    conversation = engine.new_conversation()
    conversation.prefill([5, 5, 5])
    conversation.length = 3
    conversation.drafts[:] = [[5], [6]]
    assert lookup(conversation, 5) and conversation.verified.tolist() == [[5], [5]]
