"""Adapters as the state of a program: factors go to their slots, smaller ranks are filled up, the
rest is refused.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ssdevice.adapters.slots import Slot, SlotKind, SlotLayout, Variant, read_layout
from ssdevice.adapters.weights import AdapterWeights, Factors, fill
from ssdevice.config import Mode, StreamConfig, to_json
from ssdevice.errors import ConfigError, InputError

GAMMA = 2
HIDDEN = 6
SLOTS = (
    Slot(SlotKind.LORA, ("model.layers.0.q",), 6, (4,), state="m.layers.0.q.adapter", rank=3),
    Slot(SlotKind.STREAM, ("layers.1.up",), 4, (6,), state="m.streams.up", rank=2),
)
KIND = Variant(
    True, StreamConfig(Mode.SHARED, 1, 2), slots=SLOTS, identifiers="m.streams.identifiers"
)
LAYOUT = SlotLayout(HIDDEN, (KIND, replace(KIND, streams=None)))


def weights(rank: int = 2, inputs: int = 6, streams: int = 3) -> AdapterWeights:
    chance = np.random.default_rng(0)
    pair = Factors(
        *(chance.normal(size=shape).astype(np.float32) for shape in ((rank, inputs), (4, rank)))
    )
    identifiers = chance.normal(size=(streams, HIDDEN)).astype(np.float32)
    return AdapterWeights(
        Path("adapter"), None, True, identifiers, {(SlotKind.LORA, "model.layers.0.q"): pair}
    )


def test_factors_stand_in_their_slot_and_zeros_elsewhere() -> None:
    given = weights(rank=2)
    found = fill(given, KIND, GAMMA, HIDDEN)
    pair = given.factors[SlotKind.LORA, "model.layers.0.q"]
    down = found["m.layers.0.q.adapter.down"]
    up = found["m.layers.0.q.adapter.up"]
    assert down.shape == (1, 6, 3) and up.shape == (1, 3, 4)
    np.testing.assert_allclose(down[0] @ up[0], (pair.up @ pair.down).T, atol=1e-6)
    assert not down[0, :, 2].any() and not up[0, 2].any()
    assert not found["m.streams.up.down"].any() and not found["m.streams.up.up"].any()
    assert given.identifiers is not None
    np.testing.assert_array_equal(found["m.streams.identifiers"], given.identifiers[:GAMMA])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (weights(rank=4), "a rank of at most 3"),
        (weights(inputs=5), r"have shapes \[2, 5\] and \[4, 2\], its slot takes 6 inputs"),
        (weights(streams=1), r"identifiers have shape \[1, 6\], the bundle needs \[2, 6\]"),
        (
            replace(
                weights(),
                factors={(SlotKind.LORA, "lm_head"): Factors(np.zeros((1, 6)), np.zeros((4, 1)))},
            ),
            "no lora slot for 'lm_head'",
        ),
    ],
)
def test_what_has_no_slot_is_refused(given: AdapterWeights, message: str) -> None:
    with pytest.raises(InputError, match=message):
        fill(given, KIND, GAMMA, HIDDEN)


def test_a_lora_without_streams_sets_the_identifiers_to_zeros() -> None:
    plain = LAYOUT.variant("lora")
    assert plain is not None and LAYOUT.variant("base") is None
    found = fill(replace(weights(), identifiers=None), plain, GAMMA, HIDDEN)
    assert not found["m.streams.identifiers"].any() and found["m.layers.0.q.adapter.down"].any()


def test_a_layout_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "slots.json"
    file.write_text(json.dumps(to_json(LAYOUT)))
    assert read_layout(file) == LAYOUT
    spoilt = {**to_json(KIND), "slots": [{**to_json(SLOTS[0]), "rank": 0}]}
    for change in ({"schema_version": 1}, {"variants": [spoilt]}, {"ranks": 1}):
        file.write_text(json.dumps({**to_json(LAYOUT), **change}))
        with pytest.raises(ConfigError):
            read_layout(file)
