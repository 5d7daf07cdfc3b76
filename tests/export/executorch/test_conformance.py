"""Speculative output is plain output on ExecuTorch, for every way a step can end."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

pytest.importorskip("executorch")

from ssdevice.config import Mode, Schedule
from ssdevice.contract import DRAFT, VERIFY, VERIFY_PLAIN
from ssdevice.export.plan import Quant
from ssdevice.runtime.engine import Engine, EngineOptions, open_engine
from ssdevice.runtime.sampling.options import Sampling
from ssdevice.runtime.session import Session
from tests.conformance.engine_driver import OracleDriver
from tests.conformance.oracle import check, drive
from tests.export.executorch import programs
from tests.runtime.sampling.promise import SAMPLERS, check_forced_drafts

PROMPT = [7, 21, 3, 44, 9, 30, 12]


@pytest.mark.parametrize(
    "combination",
    [
        pytest.param(
            combination,
            marks=pytest.mark.lowering if combination == programs.QUICK else pytest.mark.slow,
        )
        for combination in itertools.product(
            (Quant.FP32, Quant.INT8, Quant.INT4),
            (Mode.SHARED, Mode.LOSSLESS),
            (Schedule.DEFERRED, Schedule.FUSED),
        )
    ],
    ids="-".join,
)
def test_speculative_output_is_plain_output(combination: tuple[Quant, Mode, Schedule]) -> None:
    bundle = programs.bundle(*combination)
    conform(open_engine(bundle, None, EngineOptions()))
    if combination != programs.QUICK:
        for sampling in SAMPLERS[::3]:
            check_forced_drafts(open_engine(bundle, None, EngineOptions()), sampling, exactly=True)
    assert bundle.manifest.parity["counts"] == bundle.geometry.tree.emitted
    assert bundle.manifest.parity["products"] > 100


@pytest.mark.lowering
def test_speculative_output_of_draft_layers_is_plain_output() -> None:
    bundle = programs.draft_layers()
    assert bundle.geometry.layers == 3  # two of the model's
    conform(open_engine(bundle, None, EngineOptions()))
    check_forced_drafts(open_engine(bundle, None, EngineOptions()), SAMPLERS[0], exactly=True)


@pytest.mark.lowering
def test_speculative_output_of_an_app_in_slots_is_plain_output() -> None:
    """In INT8, which makes levels of what FP32 would hide in its last bit."""
    conform(open_engine(programs.slots(), "one", EngineOptions()))


@pytest.mark.lowering
@pytest.mark.parametrize("sampling", SAMPLERS, ids=range(len(SAMPLERS)))
def test_sampled_output_has_the_bits_of_plain_output(sampling: Sampling) -> None:
    """Tokens and log-probabilities, of apps in slots; every step is two calls."""
    bundle = programs.slots()
    for app in ("one", "two"):
        engine = open_engine(bundle, app, EngineOptions())
        assert check_forced_drafts(engine, sampling, exactly=True) == set(
            range(1, bundle.geometry.tree.emitted + 1)
        )


@pytest.mark.lowering
def test_apps_without_streams_sample_plainly_and_greedy_answers_stay() -> None:
    with Session.open(programs.slots(), app="base") as session:
        assert {VERIFY_PLAIN} == session.engine.functions & {VERIFY, VERIFY_PLAIN, DRAFT}
        greedy = list(session.generate("a b", max_tokens=9))
        answers = [
            list(
                session.generate("a b", max_tokens=9, sampling=Sampling(seed=seed, temperature=2.0))
            )
            for seed in (1, 1, 2)
        ]
        assert answers[0] == answers[1] != answers[2]
        assert list(session.generate("a b", max_tokens=9)) == greedy


def conform(engine: Engine) -> None:
    driver = OracleDriver(engine)
    facts = drive(driver, PROMPT, seed=1)
    assert np.isfinite(driver.rows(0, driver.context)).all()
    # Every row stands in the column of its position, so plain decoding adds the same numbers in the
    # same order; rejected rows share no scale with others. Neither changes a bit.
    check(facts, driver, 0.0, perturbation_tolerance=0.0)
    engine.close()
