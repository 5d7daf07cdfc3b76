"""Weights in mapped files are those in memory, and leave memory when they are told to."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from ssdevice.model import mapped as module
from ssdevice.model.loading import load_hf
from ssdevice.model.mapped import LARGE, mapped, release, released_after
from tests.model.tiny import MODELS, tiny_model

FLOATS = LARGE // 4


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * 4096


@pytest.mark.parametrize("name", MODELS)
def test_every_family_loads_the_same_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LARGE", 1)
    tiny_model(name).to(torch.bfloat16).save_pretrained(tmp_path)
    usual = load_hf(tmp_path)
    other = load_hf(tmp_path, scratch=tmp_path)
    for kind in ("named_parameters", "named_buffers"):
        wanted = dict(getattr(usual, kind)())
        found = dict(getattr(other, kind)())
        assert wanted.keys() == found.keys()
        for key, value in wanted.items():
            assert found[key].dtype == value.dtype, key
            assert torch.equal(found[key], value), key


def test_a_checkpoint_in_several_files_is_loaded_whole(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    wanted = load_hf(tmp_path).state_dict()
    assert all(
        torch.equal(wanted[k], v)
        for k, v in load_hf(tmp_path, scratch=tmp_path).state_dict().items()
    )


def test_values_and_changes_survive_their_release_and_no_file_is_left(tmp_path: Path) -> None:
    values = torch.arange(FLOATS, dtype=torch.float32).reshape(4, -1)
    found = mapped(values, tmp_path)
    found[1] *= 2
    release()
    assert torch.equal(found[0], values[0]) and torch.equal(found[1], 2 * values[1])
    assert not list(tmp_path.iterdir())


def test_small_tensors_and_a_folder_that_is_not_there_mean_memory(tmp_path: Path) -> None:
    small = torch.ones(8, dtype=torch.bfloat16)
    assert torch.equal(mapped(small, tmp_path), small.float())
    large = torch.ones(FLOATS)
    assert mapped(large, tmp_path / "absent").data_ptr() == large.data_ptr()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_released_weights_are_not_in_memory(tmp_path: Path) -> None:
    layer = torch.nn.Linear(4096, 4096, bias=False)
    layer.weight.data = mapped(layer.weight, tmp_path)
    x = torch.ones(1, 4096)
    with torch.no_grad():
        wanted = layer(x)
        held = resident()
        with released_after([layer]):
            assert torch.equal(layer(x), wanted)
    assert held - resident() > 0.9 * layer.weight.nbytes
