"""Every family: the wrapped layers compute transformers' logits, and a step is plain decoding."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ssdevice.config import Mode, Schedule, StreamConfig, StreamMLP
from ssdevice.model.families import FAMILIES
from ssdevice.model.loading import build
from ssdevice.model.step import StreamModel
from ssdevice.tree import Tree
from tests.conformance.oracle import check, drive, force_drafts
from tests.model.tiny import MODELS, VOCAB, WINDOW, tiny_model
from tests.model.torch_driver import TorchDriver

CONTEXT = 40
CHUNK = 5
GAMMA = 3
K = 2
TREE = Tree.of([(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 0, 1)])
PROMPT = torch.randint(0, VOCAB, (12,), generator=torch.Generator().manual_seed(4)).tolist()
SLIDING = {name for name, (_, values) in MODELS.items() if "sliding_window" in values}
ROWS = 2e-5
"""How far rows may lie from plain decoding's, in parts of the largest value among them.

Float32 sums in another order differ by parts of their largest term, and families differ in size:
the squared ReLU of nemotron's MLP makes rows of 18 where phi has 8. Measured with AVX2 kernels and
without: at most 5e-6 of the largest in every family. A row that read a wrong token is off by
percents.
"""
VARIANTS = {
    "shared": StreamConfig(mode=Mode.SHARED, gamma=GAMMA, msa_layers=2, init_rank=3),
    "lossless": StreamConfig(mode=Mode.LOSSLESS, gamma=GAMMA, msa_layers=2, adapter_rank=3),
    "lossless-adapter": StreamConfig(
        mode=Mode.LOSSLESS, gamma=GAMMA, msa_layers=2, adapter_rank=3, stream_mlp=StreamMLP.ADAPTER
    ),
}
BASES = {name: tiny_model(name) for name in MODELS}
"""One base a family, left as it is: wrapping changes a model's attention, so tests take copies."""


def wrapped(name: str, variant: str | None) -> StreamModel:
    """A StreamModel over a copy of the base, its streams and adapters random and far from zero."""
    model = build(
        copy.deepcopy(BASES[name]), VARIANTS[variant] if variant else None, CONTEXT
    ).eval()
    if model.streams is not None:
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for value in model.streams.parameters():
                value.copy_(0.4 * torch.randn(value.shape, generator=generator))
    return model


def fits(name: str, variant: str) -> bool:
    """Whether the family has the parts that a variant needs."""
    return variant != "lossless-adapter" or not name.startswith("opt")


WIDE = pytest.mark.wide
EVERY = ("llama", "gemma3_text", "qwen3", "opt-before")
"""Families that `make test` decodes, in every variant; `make wide` the rest, in one variant, slow
tests in all.
"""
CASES = [(name, variant) for name in MODELS for variant in VARIANTS if fits(name, variant)]


@contextmanager
def final_hidden(model: StreamModel) -> Iterator[list[Tensor]]:
    """Collects what the last layer puts out in each call."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: object, out: Tensor | tuple[Tensor, ...]) -> None:
        seen.append(out[0] if isinstance(out, tuple) else out)

    handle = model.backbone.layers[-1].register_forward_hook(keep)
    try:
        yield seen
    finally:
        handle.remove()


def test_every_family_of_the_table_is_tested() -> None:
    assert {model_type for model_type, _ in MODELS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_are_those_of_transformers_at_every_position(name: str) -> None:
    tokens = torch.randint(
        0, VOCAB, (CONTEXT,), generator=torch.Generator().manual_seed(6)
    ).tolist()
    expected = BASES[name](torch.tensor([tokens]), use_cache=False).logits[0]
    assert (
        expected.softmax(-1).max(-1).values.mean() > 5 / VOCAB
    )  # far from uniform, so that 1e-4 says something
    model = wrapped(name, None)
    sliding = [window for window in model.backbone.windows() if window is not None]
    assert sliding == ([WINDOW] if name in SLIDING else [])

    modes = {}
    for mode, chunk in (("one pass", CONTEXT), ("chunks", 7), ("steps", 1)):
        driver = TorchDriver(model, Tree.root_only(), 1, Schedule.DEFERRED, CONTEXT, chunk)
        with final_hidden(model) as hidden:
            for at in range(0, CONTEXT, chunk):
                if mode == "steps":
                    driver.plain(tokens[at], at)
                else:
                    driver.prefill(tokens[at : at + chunk], at)
        modes[mode] = model.backbone.head(torch.cat(hidden, dim=1))[0, :CONTEXT]
    for mode, logits in modes.items():
        torch.testing.assert_close(
            logits, expected, rtol=0, atol=1e-4, msg=lambda text, mode=mode: f"{mode}: {text}"
        )


@dataclass
class Recorded:
    """Stream hidden states of end nodes, one ``[γ, D]`` a call that drafted."""

    states: list[Tensor]


def record_streams(model: StreamModel) -> Recorded:
    """Note what reaches the draft head of ``model`` from now on."""
    recorded = Recorded([])
    best = model.best

    def noted(s: Tensor, *others: Any) -> Tensor:
        recorded.states.append(s[0].clone())
        return best(s, *others)

    model.best = noted  # type: ignore[method-assign]
    return recorded


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        case
        if case[0] in EVERY
        else pytest.param(*case, marks=WIDE if case[1] == "lossless" else pytest.mark.slow)
        for case in CASES
    ],
)
def test_oracle_drafts_decode_as_plain_decoding_in_both_schedules(name: str, variant: str) -> None:
    model = wrapped(name, variant)
    recorded = record_streams(model)
    states = []
    drafts = []
    for schedule in Schedule:
        recorded.states = []
        driver = TorchDriver(model, TREE, K, schedule, CONTEXT, CHUNK)
        assert bool(driver.windows) == (name in SLIDING)
        facts = drive(driver, PROMPT, seed=1)
        check(facts, driver, row_tolerance=ROWS * facts.row_size, perturbation_tolerance=0.0)
        states.append(recorded.states)
        drafts.append(facts.drafts)
    # The schedules draft the same: equal states of the streams, so equal candidates but for ties.
    assert len(states[0]) == len(states[1])
    for fused, deferred in zip(*states, strict=True):
        torch.testing.assert_close(fused, deferred, rtol=1e-4, atol=1e-4)
    same = sum(a == b for a, b in zip(*drafts, strict=True))
    assert same >= len(drafts[0]) - 1


@pytest.mark.parametrize(
    "name", [name if name in EVERY else pytest.param(name, marks=WIDE) for name in MODELS]
)
def test_draft_layers_of_every_family_decode_as_plain_decoding(name: str) -> None:
    config = StreamConfig(
        mode=Mode.LOSSLESS, gamma=GAMMA, msa_layers=0, adapter_rank=0, draft_layers=1
    )
    model = build(copy.deepcopy(BASES[name]), config, CONTEXT).eval()
    base = wrapped(name, None)
    own = model.own
    seen = list[list[list[int]]]()
    assert own is not None
    with torch.no_grad():
        for linear in (own.fuse, own.embed):
            linear.weight.copy_(
                0.4 * torch.randn(linear.weight.shape, generator=torch.Generator().manual_seed(2))
            )
    for each in (base, model):
        driver = TorchDriver(each, TREE, K, Schedule.DEFERRED, CONTEXT, CHUNK)
        if each is model:
            facts = drive(driver, PROMPT, seed=1)
            check(facts, driver, row_tolerance=ROWS * facts.row_size, perturbation_tolerance=0.0)
        token = driver.prefill(PROMPT[:CHUNK], 0)[0]
        tokens = []
        for i in range(4):
            token = driver.plain(token, CHUNK + i)
            tokens.append([token])
        seen.append(tokens)
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        case if case[0] in EVERY else pytest.param(*case, marks=WIDE)
        for case in CASES
        if case[1] != "shared"
    ],
)
@torch.no_grad()
def test_lossless_leaves_main_rows_alone(name: str, variant: str) -> None:
    base = wrapped(name, None)
    model = wrapped(name, variant)
    other = wrapped(name, variant)
    assert other.streams is not None
    for value in other.streams.parameters():
        value.mul_(-3)
    # Where no stream row is in the call, every bit is the base's.
    drivers = [
        TorchDriver(m, TREE, K, Schedule.FUSED, CONTEXT, CHUNK) for m in (base, model, other)
    ]
    roots = [driver.prefill(PROMPT[:CHUNK], 0)[0] for driver in drivers]
    tokens = [driver.plain(root, CHUNK) for driver, root in zip(drivers, roots, strict=True)]
    assert len(set(roots)) == len(set(tokens)) == 1
    committed = [torch.from_numpy(driver.rows(0, CHUNK + 1)) for driver in drivers]
    assert torch.equal(committed[0], committed[1]) and torch.equal(committed[0], committed[2])
    # Where stream rows run beside main rows, no stream parameter reaches a main row, whichever rows
    # are committed.
    length = CHUNK + 1
    truth = [tokens[0], *([0] * TREE.emitted)]
    for depth in range(TREE.emitted):
        truth[depth + 1] = drivers[0].plain(truth[depth], length + depth)
    plain_rows = drivers[0].rows(length, length + TREE.emitted)
    close = ROWS * np.abs(plain_rows).max()
    for node in range(TREE.size):
        given = force_drafts(TREE, K, GAMMA, truth[1:], node, VOCAB, random.Random(node))
        outs = [driver.step(truth[0], given, length) for driver in drivers[1:]]
        assert [out.count for out in outs] == [TREE.depths[node] + 1] * 2
        assert outs[0].tokens == outs[1].tokens
        rows = [driver.rows(length, length + outs[0].count) for driver in drivers[1:]]
        assert np.array_equal(rows[0], rows[1])
        np.testing.assert_allclose(
            rows[0], plain_rows[:, :, :, :, : outs[0].count], rtol=0, atol=close
        )
        assert outs[0].drafts != outs[1].drafts  # the parameters do something
