"""The choice of tokens against transformers' processors, exact probabilities, and a brute-force
walk.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from ssdevice.errors import BundleError, InputError
from ssdevice.runtime.sampling.choice import Chooser, truncated, walk
from ssdevice.runtime.sampling.noise import gumbel
from ssdevice.runtime.sampling.options import Sampling
from ssdevice.tree import Tree

torch = pytest.importorskip("torch")
from transformers.generation import logits_process as hf  # noqa: E402

VOCAB = 40


def scores_of(
    seed: int, size: int = VOCAB, spread: float = 3.0
) -> np.ndarray[Any, np.dtype[np.float32]]:
    return (np.random.default_rng(seed).normal(size=size) * spread).astype(np.float32)


TRUNCATIONS = {
    "top_k": lambda value: hf.TopKLogitsWarper(value),
    "top_p": lambda value: hf.TopPLogitsWarper(value),
    "min_p": lambda value: hf.MinPLogitsWarper(value),
    "typical_p": lambda value: hf.TypicalLogitsWarper(mass=value),
}


@pytest.mark.parametrize(
    "asked",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 5000},
        {"top_p": 0.05},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"min_p": 0.02},
        {"min_p": 1.0},
        {"typical_p": 0.2},
        {"typical_p": 0.9},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.05},
        {"top_p": 0.9, "typical_p": 0.7},
    ],
    ids=str,
)
def test_truncation_is_that_of_transformers(asked: dict[str, float]) -> None:
    for seed, size in product(range(10), (2, 40, 1500)):
        scores = scores_of(seed, size)
        want = torch.tensor(scores)[None]
        for name, value in asked.items():
            want = TRUNCATIONS[name](value)(None, want)
        found, ids = truncated(scores, Sampling(temperature=1.0, **asked))  # type: ignore[arg-type]
        assert (list(range(size)) if ids is None else ids.tolist()) == torch.isfinite(
            want[0]
        ).nonzero()[:, 0].tolist()
        assert np.array_equal(found, scores if ids is None else scores[ids])


@pytest.mark.parametrize("name", ["top_p", "min_p", "typical_p"])
@pytest.mark.parametrize("value", [5e-324, 1e-300, 1e-17, 1e-3])
def test_the_smallest_parts_leave_as_much_as_in_transformers(name: str, value: float) -> None:
    """Of equal tokens transformers leaves any, we the lowest ids: the scores are compared."""
    for scores in (
        scores_of(3),
        np.round(scores_of(4)),
        np.full(7, 2.5, np.float32),
        np.zeros(1, np.float32),
    ):
        for top_k in (0, 1):
            want = torch.tensor(scores)[None]
            want = TRUNCATIONS["top_k"](1)(None, want) if top_k else want
            want = TRUNCATIONS[name](value)(None, want)[0]
            found, _ = truncated(scores, Sampling(temperature=1.0, top_k=top_k, **{name: value}))  # type: ignore[arg-type]
            assert sorted(found) == sorted(want[torch.isfinite(want)].tolist())


@given(st.integers(0, 10_000), st.sampled_from((7, 256, 300, 5000, 20_000)), st.floats(0.2, 6))
def test_short_cuts_lead_to_the_best_of_what_truncation_leaves(
    seed: int, size: int, spread: float
) -> None:
    rng = np.random.default_rng(seed)
    logits = scores_of(seed, size, spread)
    logits[rng.integers(0, size, size // 3)] = -np.inf
    logits[rng.integers(0, size)] = spread  # one is possible
    asked = {
        "top_k": int(rng.choice([0, 1, 5, 50, 5000])),
        "top_p": float(rng.choice([1, 0.2, 0.9, 0.999])),
        "min_p": float(rng.choice([0, 0.05, 0.5])),
        "typical_p": float(rng.choice([1, 1, 0.3, 0.95])),
    }
    sampling = Sampling(temperature=float(rng.choice([0.3, 1.0, 2.5])), seed=seed, **asked)  # type: ignore[arg-type]
    kept, ids = truncated(logits / np.float32(sampling.temperature), sampling)
    ids = np.arange(size) if ids is None else ids
    for position in range(3):
        chooser = Chooser(sampling, [1] * position, [0], size)
        expected = ids[np.argmax(kept.astype(np.float64) + gumbel(seed, position, ids, size))]
        assert chooser(logits) == expected


PROCESSORS: list[tuple[dict[str, Any], list[Any]]] = [
    ({"repetition_penalty": 1.3}, [hf.RepetitionPenaltyLogitsProcessor(1.3)]),
    ({"no_repeat_ngram_size": 1}, [hf.NoRepeatNGramLogitsProcessor(1)]),
    ({"no_repeat_ngram_size": 3}, [hf.NoRepeatNGramLogitsProcessor(3)]),
    (
        {"bad_words": ((5,), (7, 8), (1, 2, 3))},
        [hf.NoBadWordsLogitsProcessor([[5], [7, 8], [1, 2, 3]], eos_token_id=0)],
    ),
    (  # a stop token among bad words is not banned
        {"bad_words": ((0,), (5,))},
        [hf.NoBadWordsLogitsProcessor([[0], [5]], eos_token_id=0)],
    ),
    ({"min_length": 15}, [hf.MinLengthLogitsProcessor(15, 0, device="cpu")]),
    ({"min_new_tokens": 9}, [hf.MinNewTokensLengthLogitsProcessor(6, 9, 0, device="cpu")]),
    ({"suppress": (4, 9)}, [hf.SuppressTokensLogitsProcessor([4, 9], device="cpu")]),
    (
        {"begin_suppress": (4, 9)},
        [hf.SuppressTokensAtBeginLogitsProcessor([4, 9], 6, device="cpu")],
    ),
    (
        {"logit_bias": {3: 2.5, 6: -4.0}},
        [hf.SequenceBiasLogitsProcessor([[[3], 2.5], [[6], -4.0]])],
    ),
    (
        {
            "repetition_penalty": 0.8,
            "no_repeat_ngram_size": 2,
            "suppress": (1,),
            "logit_bias": {2: 9.0},
        },
        [
            hf.SequenceBiasLogitsProcessor([[[2], 9.0]]),
            hf.RepetitionPenaltyLogitsProcessor(0.8),
            hf.NoRepeatNGramLogitsProcessor(2),
            hf.SuppressTokensLogitsProcessor([1], device="cpu"),
        ],
    ),
]


@pytest.mark.parametrize(
    ("asked", "theirs"), PROCESSORS, ids=[str(asked) for asked, _ in PROCESSORS]
)
def test_processors_are_those_of_transformers(asked: dict[str, Any], theirs: list[Any]) -> None:
    prompt = [5, 1, 2, 7, 8, 2]
    chooser = Chooser(Sampling(**asked), prompt, [0], VOCAB)
    text = list(prompt)
    for step in range(60):
        logits = scores_of(step, spread=1.0)
        want = torch.tensor(logits)[None]
        for each in theirs:
            want = each(torch.tensor([text]), want)
        if not torch.isfinite(want).any():
            return
        text.append(int(want[0].argmax()))
        assert chooser(logits) == text[-1], step


def test_presence_and_frequency_penalties_are_of_the_answer() -> None:
    """OpenAI's formula: logit - count * frequency - (count > 0) * presence."""
    chooser = Chooser(Sampling(presence_penalty=1.0, frequency_penalty=0.5), [3, 3, 3], [0], 4)
    logits = np.array([0, 0, 1.0, 3.5], np.float32)
    # 3 is worth 3.5, then 3.5 - 1.5, 3.5 - 2, and 1.0 of token 2 wins over 3.5 - 2.5 by its lower
    # id.
    assert [chooser(logits) for _ in range(5)] == [3, 3, 3, 2, 3]


CASES = [
    Sampling(temperature=0.7),
    Sampling(temperature=1.2, top_k=5),
    Sampling(temperature=1.0, top_p=0.8),
    Sampling(temperature=0.9, repetition_penalty=1.5, logit_bias={2: 1.0}),
    Sampling(temperature=1.0, min_p=0.1, frequency_penalty=0.4),
]


@pytest.mark.parametrize(
    "sampling",
    [*CASES[:2], *(pytest.param(each, marks=pytest.mark.wide) for each in CASES[2:])],
    ids=lambda s: f"T={s.temperature}",
)
def test_tokens_have_their_exact_probabilities(sampling: Sampling) -> None:
    check_distribution(sampling, 4_800)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", CASES, ids=lambda s: f"T={s.temperature}")
def test_tokens_have_their_exact_probabilities_in_the_long_run(sampling: Sampling) -> None:
    check_distribution(sampling, 100_000)


def check_distribution(sampling: Sampling, draws: int) -> None:
    """A chi-square test against exact probabilities."""
    size = 12
    prompt = [1, 2, 2]
    logits = scores_of(4, size, 1.5)
    expected = exact(sampling, logits, prompt)
    counts: Counter[int] = Counter()
    for seed, before in product(range(draws // 16), range(16)):
        # Noise depends on the position; what is asked for here does not.
        chooser = Chooser(replace(sampling, seed=seed), [1] * before + prompt, [0], size)
        counts[chooser(logits)] += 1
    observed = np.array([counts[i] for i in range(size)])
    assert not observed[expected == 0].any()
    kept = expected > 0
    assert chisquare(observed[kept], expected[kept] * draws).pvalue > 1e-4


def exact(sampling: Sampling, logits: Any, prompt: list[int]) -> Any:
    """The probabilities by transformers' processors and a softmax."""
    want = torch.tensor(logits)[None]
    for token, bias in sampling.logit_bias.items():
        want[0, token] += bias
    if sampling.repetition_penalty != 1:
        want = hf.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(
            torch.tensor([prompt]), want
        )
    want = want / sampling.temperature
    for name, none in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        if getattr(sampling, name) != none:
            want = TRUNCATIONS[name](getattr(sampling, name))(None, want)
    return want.double().softmax(-1)[0].numpy()


@given(st.integers(0, 10_000))
def test_the_walk_is_that_of_a_search_through_all_paths(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = Tree.of([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
    drafts = np.stack([rng.permutation(3)[:2] for _ in range(3)]).astype(
        np.int32
    )  # candidates of a stream differ
    choices = rng.integers(0, 3, size=tree.size).tolist()
    path, tokens = walk(tree, drafts, lambda node: choices[node])
    accepted = [0]
    for node in range(1, tree.size):  # accepted: its parent is, and it holds what was chosen there
        ranks = tree.paths[node]
        parent = tree.parents[node]
        if parent in accepted and drafts[len(ranks) - 1, ranks[-1]] == choices[parent]:
            accepted.append(node)
    deepest = max(tree.depths[node] for node in accepted)
    assert len(path) == deepest + 1
    assert set(path) <= set(accepted)
    assert tokens == [choices[node] for node in path]


def test_log_probabilities_are_of_the_model_itself() -> None:
    logits = scores_of(1)
    chooser = Chooser(
        Sampling(temperature=0.5, top_k=3, repetition_penalty=2.0, logprobs=4), [1], [0], VOCAB
    )
    token = chooser(logits)
    want = torch.tensor(logits).double().log_softmax(-1)
    (found,) = chooser.logprobs
    assert found.chosen == pytest.approx(float(want[token]), abs=1e-6)
    assert list(found.ids) == want.topk(4).indices.tolist()
    assert found.values == pytest.approx(want.topk(4).values.tolist(), abs=1e-6)


def test_tokens_that_the_model_rules_out_have_no_log_probability() -> None:
    logits = np.array([-np.inf, 1.0, -np.inf, 1.0], np.float32)
    chooser = Chooser(Sampling(logprobs=4), [1], [0], 4)
    assert chooser(logits) == 1
    assert chooser.logprobs[0].ids == (1, 3)
    assert chooser.logprobs[0].values == pytest.approx([np.log(0.5)] * 2)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("penalty", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("size", [1e30, -1e30, 4.0])
def test_no_option_makes_scores_of_sound_logits_infinite(size: float, penalty: float) -> None:
    """At the ends of all ranges at once."""
    truncations = ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 1.0}, {"typical_p": 0.5})
    for bias, truncation in product((1e30, -1e30), truncations):
        asked = {
            "temperature": 1e-6,
            "repetition_penalty": penalty,
            "presence_penalty": -100.0,
            "frequency_penalty": -100.0,
            "logit_bias": dict.fromkeys(range(VOCAB), bias),
        }
        chooser = Chooser(Sampling(**asked, **truncation), [*range(VOCAB)], [0], VOCAB)  # type: ignore[arg-type]
        for step in range(3):
            chooser(np.clip(scores_of(step) * np.float32(size), -1e30, 1e30))


def test_a_processor_of_ones_own_sees_the_text() -> None:
    seen: list[list[int]] = []

    def only_even(ids: Any, scores: Any) -> Any:
        seen.append(list(ids))
        return np.where(np.arange(len(scores)) % 2, -np.inf, scores).astype(np.float32)

    chooser = Chooser(Sampling(temperature=1.0, processors=(only_even,)), [9], [0], VOCAB)
    tokens = [chooser(scores_of(i)) for i in range(5)]
    assert not any(token % 2 for token in tokens)
    assert seen == [[9, *tokens[:i]] for i in range(5)]


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 1e-9}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2.0}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"seed": 1 << 64}, "seed"),
        ({"seed": -1}, "seed"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logprobs": -1}, "logprobs"),
        ({"bad_words": ((),)}, "bad_words"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"logit_bias": {1: "1"}}, "logit_bias of token 1 is '1', expected a number"),
        ({"logit_bias": {1: float("inf")}}, "from -1e30 to 1e30, nor -inf"),
        ({"logit_bias": {1: -1e38}}, "from -1e30 to 1e30, nor -inf"),
        ({"logit_bias": {1: -(10**400)}}, "from -1e30 to 1e30, nor -inf"),
        ({"repetition_penalty": 1e-37}, "repetition_penalty is 1e-37, expected 0.01 to 100"),
        ({"temperature": 10**400}, "temperature is 1000"),
    ],
    ids=str,
)
def test_values_outside_their_range_are_refused(asked: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        Sampling(**asked)


def test_tokens_that_the_model_does_not_have_are_refused() -> None:
    for asked in ({"suppress": (VOCAB,)}, {"logit_bias": {-1: 1.0}}, {"bad_words": ((1, 99),)}):
        with pytest.raises(InputError, match=f"not one of the model's {VOCAB}"):
            Chooser(Sampling(**asked), [1], [0], VOCAB)  # type: ignore[arg-type]


def test_logits_without_a_largest_number_are_an_error() -> None:
    chooser = Chooser(Sampling(temperature=1.0), [1], [0], VOCAB)
    for wrong in (np.nan, np.inf):
        logits = scores_of(0)
        logits[7] = wrong
        with pytest.raises(BundleError, match="not numbers"):
            chooser(logits)
    everything = Chooser(Sampling(suppress=tuple(range(VOCAB))), [1], [0], VOCAB)
    with pytest.raises(InputError, match="forbids every token"):
        everything(scores_of(0))
