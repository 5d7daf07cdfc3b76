"""A draft vocabulary: streams choose among a list of tokens, and what decoding emits stays the
same.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ssdevice.adapters.settings import WEIGHTS, AdapterSettings, BaseIdentity
from ssdevice.adapters.weights import AdapterWeights
from ssdevice.config import Mode, Schedule, StreamConfig
from ssdevice.errors import ConfigError, InputError
from ssdevice.model.adapter import load_streams, write_streams
from ssdevice.model.loading import build, load
from ssdevice.model.operators import top_k
from ssdevice.model.step import StreamModel
from ssdevice.tree import Tree
from tests.model.reference import Reference
from tests.model.tiny import VOCAB, tiny_model

CONFIG = StreamConfig(
    mode=Mode.LOSSLESS, gamma=3, msa_layers=2, adapter_rank=2, draft_vocabulary=20
)


def model_of(config: StreamConfig) -> StreamModel:
    torch.manual_seed(3)
    model = build(tiny_model("llama"), config, 64).eval()
    assert model.streams is not None
    if config.draft_vocabulary:
        picked = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[
            : config.draft_vocabulary
        ]
        model.streams.draft_ids.copy_(picked.sort().values)
        model.take_draft_rows()
    return model


def test_candidates_are_the_best_of_the_list() -> None:
    model = model_of(CONFIG)
    assert model.streams is not None
    s = torch.randn(1, 3, model.backbone.config.hidden_size)
    everywhere = model.backbone.head(s)[0]
    outside = torch.ones(VOCAB, dtype=torch.bool)
    outside[model.streams.draft_ids] = False
    node = torch.zeros(1, dtype=torch.int32)
    assert torch.equal(
        model.best(s, node, node, 4), top_k(everywhere.masked_fill(outside, -1e9), 4)
    )


def test_what_is_decoded_does_not_depend_on_the_list() -> None:
    found = []
    for config in (CONFIG, replace(CONFIG, draft_vocabulary=0)):
        reference = Reference(model_of(config), Tree.full(2, 2), 2, Schedule.DEFERRED, 64, chunk=16)
        result = reference.speculative([3, 1, 4, 1, 5], 30)
        assert result.tokens == reference.plain([3, 1, 4, 1, 5], 30).tokens
        found.append(result.tokens)
    assert found[0] == found[1]


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A base in ``base`` and an adapter beside it that was written with a list."""
    tiny_model("llama").save_pretrained(tmp_path / "base")
    model = model_of(CONFIG)
    assert model.streams is not None
    identity = BaseIdentity.of(tmp_path / "base", model.backbone.config)
    write_streams(tmp_path / "app", model.streams, AdapterSettings("app", CONFIG, identity))
    return tmp_path / "app"


def test_the_list_goes_with_the_adapter(adapter: Path) -> None:
    model = load(adapter.parent / "base", adapter, 64).model
    expected = model_of(CONFIG)
    assert model.streams is not None and expected.streams is not None
    assert torch.equal(model.streams.draft_ids, expected.streams.draft_ids)
    assert model.draft_head is not None and expected.draft_head is not None
    assert torch.equal(model.draft_head.weight, expected.draft_head.weight)


@pytest.mark.parametrize(
    "ids", [[5] * 20, list(range(20))[::-1], [*range(19), VOCAB], [-1, *range(19)]]
)
def test_a_wrong_list_is_refused(adapter: Path, ids: list[int]) -> None:
    tensors = load_file(adapter / WEIGHTS)
    save_file({**tensors, "draft_ids": torch.tensor(ids, dtype=torch.int32)}, adapter / WEIGHTS)
    streams = model_of(CONFIG).streams
    assert streams is not None
    with pytest.raises(InputError, match="ascending ids"):
        load_streams(adapter, streams)


def test_slots_refuse_it(adapter: Path) -> None:
    with pytest.raises(InputError, match="--draft-vocabulary 0"):
        AdapterWeights.read(adapter)


@pytest.mark.parametrize("size", [-1, 1, 1 << 30])
def test_the_size_has_bounds(size: int) -> None:
    with pytest.raises(ConfigError, match="draft_vocabulary"):
        replace(CONFIG, draft_vocabulary=size)
