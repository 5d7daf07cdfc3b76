"""An app's adapter folder: what is written is what is read, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ssdevice.adapters.settings import (
    PEFT_CONFIG,
    PEFT_WEIGHTS,
    SETTINGS,
    WEIGHTS,
    AdapterFolder,
    AdapterSettings,
    BaseIdentity,
    read_settings,
)
from ssdevice.adapters.weights import AdapterWeights
from ssdevice.config import Mode, Schedule, StreamConfig, StreamMLP
from ssdevice.errors import ConfigError, InputError, UnsupportedModelError
from ssdevice.model.adapter import load_streams, write_streams
from ssdevice.model.loading import load
from ssdevice.model.lora import LoraLinear
from ssdevice.model.streams import Streams
from ssdevice.tree import Tree
from tests.model.reference import Reference
from tests.model.tiny import tiny_model

CONTEXT = 32
CONFIGS = {
    "shared": StreamConfig(gamma=3, msa_layers=2, init_rank=2, lora_rank=0),
    "lossless": StreamConfig(mode=Mode.LOSSLESS, gamma=3, msa_layers=2, adapter_rank=2),
    "lossless-adapter": StreamConfig(
        mode=Mode.LOSSLESS, gamma=3, msa_layers=2, adapter_rank=2, stream_mlp=StreamMLP.ADAPTER
    ),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a tiny model."""
    folder = tmp_path_factory.mktemp("base")
    tiny_model("llama").save_pretrained(folder)
    return folder


def fresh(base: Path, config: StreamConfig) -> Streams:
    from ssdevice.model.loading import build, load_hf

    streams = build(load_hf(base), config, CONTEXT).streams
    assert streams is not None
    with torch.no_grad():
        for value in streams.parameters():
            value.copy_(torch.randn_like(value))
    return streams


def write(base: Path, folder: Path, config: StreamConfig) -> Streams:
    streams = fresh(base, config)
    hf_config = tiny_model("llama").config
    settings = AdapterSettings(
        app="notes",
        streams=config,
        base=BaseIdentity.of(base, hf_config),
        instruction="Sum up.",
        training={"steps": 3},
    )
    write_streams(folder, streams, settings)
    return streams


@pytest.mark.parametrize("name", CONFIGS)
def test_what_was_written_is_loaded(base: Path, tmp_path: Path, name: str) -> None:
    written = write(base, tmp_path / "notes", CONFIGS[name])
    loaded = load(base, tmp_path / "notes", CONTEXT)
    assert loaded.settings == read_settings(tmp_path / "notes")
    assert loaded.settings is not None and loaded.settings.instruction == "Sum up."
    assert loaded.model.streams is not None
    state = loaded.model.streams.state_dict()
    assert state.keys() == written.state_dict().keys()
    for key, value in written.state_dict().items():
        stored = value.half().float() if key.startswith("adapters.") else value
        assert torch.equal(state[key], stored), key
    # What was loaded is what decodes.
    reference = Reference(loaded.model, Tree.chain(3), 1, Schedule.DEFERRED, CONTEXT)
    assert reference.speculative([1, 2, 3], 20).tokens == reference.plain([1, 2, 3], 20).tokens


def test_the_file_holds_the_streams_alone(base: Path, tmp_path: Path) -> None:
    write(base, tmp_path / "a", CONFIGS["lossless"])
    names = load_file(str(tmp_path / "a" / WEIGHTS))
    assert "identifiers" in names
    assert all(name == "identifiers" or name.startswith("adapters.") for name in names)
    assert names["identifiers"].dtype == torch.float32


def damage_missing(weights: dict[str, torch.Tensor]) -> None:
    del weights["identifiers"]


def damage_shape(weights: dict[str, torch.Tensor]) -> None:
    weights["identifiers"] = weights["identifiers"][:, :-1].contiguous()


def damage_nan(weights: dict[str, torch.Tensor]) -> None:
    weights["identifiers"][0, 0] = float("nan")


def damage_infinity(weights: dict[str, torch.Tensor]) -> None:
    weights["f.up.weight"][0, 0] = float("inf")


def damage_extra(weights: dict[str, torch.Tensor]) -> None:
    weights["identifiers.2"] = torch.zeros(1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_missing, r"tensor 'identifiers' is missing"),
        (damage_shape, r"tensor 'identifiers' has shape \[3, 31\], expected \[3, 32\]"),
        (damage_nan, r"tensor 'identifiers' has values that are not finite"),
        (damage_infinity, r"tensor 'f.up.weight' has values that are not finite"),
        (damage_extra, r"unexpected tensor 'identifiers.2'"),
    ],
)
def test_damaged_weights_are_refused_and_change_nothing(
    base: Path, tmp_path: Path, damage: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    write(base, tmp_path, CONFIGS["shared"])
    file = tmp_path / WEIGHTS
    weights = load_file(str(file))
    damage(weights)
    save_file(weights, str(file))
    streams = fresh(base, CONFIGS["shared"])
    before = {name: value.clone() for name, value in streams.state_dict().items()}
    with pytest.raises(InputError, match=message):
        load_streams(tmp_path, streams)
    for name, value in streams.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"{}"])
def test_a_file_that_is_not_safetensors_is_refused(
    base: Path, tmp_path: Path, content: bytes
) -> None:
    write(base, tmp_path, CONFIGS["shared"])
    (tmp_path / WEIGHTS).write_bytes(content)
    with pytest.raises(InputError, match="cannot be read as safetensors"):
        load(base, tmp_path, CONTEXT)


def test_absent_weights_are_refused(base: Path, tmp_path: Path) -> None:
    write(base, tmp_path, CONFIGS["shared"])
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(InputError, match="no such file"):
        load(base, tmp_path, CONTEXT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mistral"}, "its model_type is mistral, the model's is llama"),
        ({"hidden_size": 64}, "its hidden_size is 64, the model's is 32"),
        ({"layers": 5}, "its layers is 5, the model's is 3"),
        ({"vocab": 5}, "its vocab is 5, the model's is 97"),
        ({"sha256": "00"}, "its sha256 is 00, the model's is [0-9a-f]{64}"),
    ],
)
def test_an_adapter_of_another_base_is_refused(
    base: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    streams = write(base, tmp_path, CONFIGS["shared"])
    settings = read_settings(tmp_path)
    write_streams(tmp_path, streams, replace(settings, base=replace(settings.base, **change)))
    with pytest.raises(InputError, match=f"was trained for another base: {message}"):
        load(base, tmp_path, CONTEXT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strems": {}}, "unknown key 'strems', did you mean 'streams'"),
        ({"schema_version": 2}, "schema_version is 2, this ssdevice reads 1"),
        ({"app": 5}, "app: expected a string"),
        ({"streams": {"gamma": 0}}, "gamma is 0, expected 1 to 32"),
    ],
)
def test_settings_are_strict(
    base: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    write(base, tmp_path, CONFIGS["shared"])
    file = tmp_path / SETTINGS
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | change), "utf-8")
    with pytest.raises(ConfigError, match=message):
        load(base, tmp_path, CONTEXT)


def test_fewer_streams_than_trained_may_be_kept_but_not_more(base: Path, tmp_path: Path) -> None:
    write(base, tmp_path, CONFIGS["shared"])
    assert load(base, tmp_path, CONTEXT, gamma=2).model.gamma == 2
    with pytest.raises(
        UnsupportedModelError, match="the tree needs 4 streams, the adapter was trained with 3"
    ):
        load(base, tmp_path, CONTEXT, gamma=4)


def test_lossless_streams_over_a_lora_cannot_share_a_base_with_other_apps(
    base: Path, tmp_path: Path
) -> None:
    write(base, tmp_path, CONFIGS["lossless"])
    (tmp_path / PEFT_CONFIG).write_text("{}", "utf-8")
    for refused in (
        lambda: AdapterWeights.read(tmp_path),
        lambda: AdapterFolder.open(tmp_path).check_apart(),
    ):
        with pytest.raises(
            InputError, match="lossless streams over a LoRA cannot share a bundle .* by itself"
        ):
            refused()


def test_an_adapter_that_lacks_a_file_is_refused(base: Path, tmp_path: Path) -> None:
    streams = fresh(base, config := replace(CONFIGS["shared"], lora_rank=2))
    identity = BaseIdentity.of(base, tiny_model("llama").config)
    write_streams(tmp_path, streams, AdapterSettings("notes", config, identity))
    with pytest.raises(
        InputError, match="trained with a LoRA of rank 2, but there is no adapter_config.json"
    ):
        AdapterFolder.open(tmp_path)
    shared_with_lora(base, tmp_path)
    for lost, left in ((PEFT_CONFIG, PEFT_WEIGHTS), (SETTINGS, WEIGHTS)):
        kept = (tmp_path / lost).read_bytes()
        (tmp_path / lost).unlink()
        with pytest.raises(
            InputError, match=f"{left} without {lost}; copy the whole adapter folder"
        ):
            load(base, tmp_path, CONTEXT)
        (tmp_path / lost).write_bytes(kept)
    assert AdapterFolder.open(tmp_path).has_lora


def test_folders_that_are_no_adapters_are_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="absent: no such folder"):
        load(base, tmp_path / "absent", CONTEXT)
    with pytest.raises(
        InputError, match="neither streams.json nor adapter_config.json; expected an adapter folder"
    ):
        load(base, tmp_path, CONTEXT)
    (tmp_path / "default").mkdir()
    (tmp_path / "default" / PEFT_CONFIG).write_text("{}", "utf-8")
    with pytest.raises(
        InputError,
        match=r"nor adapter_config.json \(that is in default\); expected an adapter folder",
    ):
        load(base, tmp_path, CONTEXT)
    (tmp_path / PEFT_CONFIG).write_text("{}", "utf-8")
    with pytest.raises(InputError, match="peft_type is 'None', expected 'LORA'"):
        load(base, tmp_path, CONTEXT)


def test_a_lora_is_merged_into_main_and_stream_rows(base: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    lora = get_peft_model(
        tiny_model("llama"), LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    )
    lora.save_pretrained(tmp_path)
    write(base, tmp_path, CONFIGS["shared"])
    merged = load(base, tmp_path, CONTEXT).model.backbone.layers[2].mlp.down_proj.weight
    expected = lora.merge_and_unload().model.layers[2].mlp.down_proj.weight
    torch.testing.assert_close(merged, expected)
    without = load(base, None, CONTEXT)
    assert without.settings is None and without.model.streams is None
    assert not torch.allclose(without.model.backbone.layers[2].mlp.down_proj.weight, expected)


def shared_with_lora(base: Path, folder: Path, **options: Any) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        **{"r": 2, "target_modules": "all-linear", "init_lora_weights": False, **options}
    )
    get_peft_model(tiny_model("llama"), config).save_pretrained(folder)
    write(base, folder, CONFIGS["shared"])


@pytest.mark.parametrize(
    "options", [{}, {"use_rslora": True, "lora_alpha": 3}, {"rank_pattern": {"q_proj": 3}}]
)
def test_a_lora_beside_the_base_computes_what_a_merged_one_does(
    base: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    shared_with_lora(base, tmp_path, **options)
    merged = load(base, tmp_path, CONTEXT).model
    apart = load(base, tmp_path, CONTEXT, merge=False).model
    linears = {
        name: part for name, part in apart.backbone.named_modules() if isinstance(part, LoraLinear)
    }
    assert len(linears) == 7 * merged.backbone.num_layers
    for name, part in linears.items():
        whole = merged.backbone.get_submodule(name)
        x = torch.randn(3, part.base.in_features)
        torch.testing.assert_close(part(x), whole(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{"use_dora": True}, {"bias": "all"}, {"target_modules": ["embed_tokens"]}]
)
def test_a_lora_that_cannot_stand_apart_is_refused(
    base: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    shared_with_lora(base, tmp_path, **options)
    with pytest.raises(UnsupportedModelError, match="slot"):
        load(base, tmp_path, CONTEXT, merge=False)
