"""What graphs give is checked once, for every engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ssdevice.contract import COUNT, NEXT_DRAFTS, NEXT_ROOT, PLAIN, PREFILL, STEP, TOKENS
from ssdevice.errors import BundleError, InputError
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.engine import Outputs
from ssdevice.tree import Tree
from tests.runtime.scripted import ScriptedCache, ScriptedEngine, make_geometry, random_drafter

VOCAB = 11
TREE = Tree.chain(3)


class Recorded(ScriptedCache):
    """Gives ``lies`` in place of what it computed, and records what is committed."""

    lies: dict[str, Any]

    def call(self, function: str, length: int) -> Outputs:
        return {
            **super().call(function, length),
            **{name: np.array(v, np.int32) for name, v in self.lies.items()},
        }

    def commit(self, outputs: Outputs, length: int, count: int) -> None:
        self.committed.append((length, count))

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.lies = {}
        self.committed = []


def conversation() -> tuple[Conversation, Recorded]:
    made = ScriptedEngine(
        make_geometry(TREE, vocab=VOCAB), random_drafter(0, 1.0), Recorded
    ).new_conversation()
    assert isinstance(made.cache, Recorded)
    return made, made.cache


def call(made: Conversation, function: str) -> object:
    return {
        PREFILL: lambda: made.prefill([1, 2]),
        STEP: lambda: made.step(3),
        PLAIN: lambda: made.step_plain(3),
    }[function]()


@pytest.mark.parametrize(
    ("function", "lies", "message"),
    [
        (STEP, {COUNT: [0]}, "step returned 0 tokens, expected 1 to 4"),
        (STEP, {COUNT: [5]}, "step returned 5 tokens"),
        (STEP, {COUNT: [-1]}, "step returned -1 tokens"),
        (STEP, {COUNT: [2], TOKENS: [1, VOCAB, 0, 0]}, "step returned token 11, the model has 11"),
        (STEP, {TOKENS: [-1] * 4}, "step returned token -1"),
        (STEP, {NEXT_DRAFTS: [[1], [2], [VOCAB]]}, "step returned token 11"),
        (PREFILL, {NEXT_ROOT: [-5]}, "prefill returned token -5"),
        (PREFILL, {NEXT_DRAFTS: [[-1], [0], [0]]}, "prefill returned token -1"),
        (PLAIN, {TOKENS: [1 << 30]}, "step_plain returned token 1073741824"),
    ],
)
def test_impossible_outputs_are_refused_and_not_committed(
    function: str, lies: dict[str, Any], message: str
) -> None:
    made, cache = conversation()
    made.prefill([4, 5])
    made.length = 2
    drafts = made.drafts.copy()
    cache.committed.clear()
    cache.lies = lies
    with pytest.raises(BundleError, match=f"scripted: {message}"):
        call(made, function)
    assert cache.committed == [] and made.length == 2 and np.array_equal(made.drafts, drafts)


def test_tokens_beyond_the_count_are_not_looked_at() -> None:
    made, cache = conversation()
    made.prefill([4, 5])
    made.length = 2
    cache.lies = {COUNT: [1], TOKENS: [3, -9, 99, 99]}
    assert made.step(1) == [3]
    assert cache.committed == [(0, 2), (2, 1)]


def test_padding_of_a_chunk_is_the_same_whatever_came_before() -> None:
    made, cache = conversation()
    made.prefill([1, 2, 3, 4])
    made.prefill([5])
    assert cache.inputs["chunk"].tolist() == [5, 0, 0, 0] and cache.inputs["valid"].tolist() == [1]


def test_a_closed_engine_and_a_missing_function_are_said() -> None:
    made, _ = conversation()
    made.engine.functions = frozenset({PREFILL})
    with pytest.raises(BundleError, match="the bundle has no step; it has prefill"):
        made.step(1)
    made.engine.close()
    with pytest.raises(InputError, match="closed"):
        made.prefill([1])
