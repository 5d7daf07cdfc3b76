"""What the generation_config.json of a model asks for and a bundle does not do is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from ssdevice.bundle.manifest import NOT_APPLIED
from ssdevice.bundle.sampling import ModelSampling
from ssdevice.errors import InputError
from ssdevice.export.crosscheck.generation import (
    generation_config,
    generation_notes,
    model_sampling,
    unapplied,
)
from tests.export.models import write_base


@pytest.mark.parametrize(
    "asked",
    [
        {"repetition_penalty": 1.1},
        {"encoder_repetition_penalty": 1.2},
        {"no_repeat_ngram_size": 2},
        {"num_beams": 3},
        {"suppress_tokens": [5]},
        {"begin_suppress_tokens": [5, 0]},
        {"bad_words_ids": [[5], [7, 8]]},
        {"min_new_tokens": 1},
        {"min_length": 9},
        {"forced_bos_token_id": 0},
        {"forced_eos_token_id": 1},
        {"sequence_bias": [[[5], 2.0]]},
        {"exponential_decay_length_penalty": [5, 1.1]},
        {"stop_strings": ["."]},
        {"guidance_scale": 1.5},
        {"token_healing": True},
        {"watermarking_config": {"bias": 2.5}},
    ],
    ids=str,
)
def test_settings_that_change_greedy_answers_are_named(asked: dict[str, Any]) -> None:
    (name,) = asked
    (found,) = unapplied(GenerationConfig(**asked))
    assert found.startswith(f"{name}=")
    (note,) = generation_notes(GenerationConfig(**asked))
    assert note.startswith(NOT_APPLIED) and found in note


@pytest.mark.parametrize(
    "asked",
    [
        {
            "eos_token_id": [1, 2],
            "pad_token_id": 0,
            "bos_token_id": 1,
            "max_new_tokens": 9,
            "max_length": 20,
        },
        {
            "repetition_penalty": 1.0,
            "num_beams": 1,
            "no_repeat_ngram_size": 0,
            "min_length": 0,
            "guidance_scale": 1,
        },
        {
            "suppress_tokens": [],
            "bad_words_ids": None,
            "token_healing": False,
            "length_penalty": 2.0,
        },
        {
            "chat_format": "chatml",
            "max_window_size": 6144,
        },  # Qwen's own, which transformers does not know
    ],
    ids=str,
)
def test_settings_that_change_nothing_are_not_named(asked: dict[str, Any]) -> None:
    assert generation_notes(GenerationConfig(**asked)) == ()


def test_sampling_is_named_once_and_gently() -> None:
    notes = generation_notes(GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9))
    assert notes == (
        "generation_config.json asks for sampling (temperature=0.6, top_p=0.9); "
        "the bundle decodes greedily",
    )
    assert (
        generation_notes(GenerationConfig(temperature=0.6)) == ()
    )  # without do_sample it says nothing


def test_long_values_are_cut() -> None:
    (note,) = generation_notes(GenerationConfig(suppress_tokens=list(range(10_000))))
    assert len(note) < 300


def test_the_settings_are_those_with_which_transformers_opens_the_folder(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    file = write_base(tmp_path) / "generation_config.json"
    file.write_text(json.dumps({"repetition_penalty": 1.5, "eos_token_id": [1, 7]}))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path).generation_config
    assert generation_config(tmp_path).to_dict() == expected.to_dict()
    assert generation_config(tmp_path).eos_token_id == [1, 7]

    file.unlink()  # older models have such settings in config.json
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_beams": 2}))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path).generation_config
    assert generation_config(tmp_path).to_dict() == expected.to_dict()
    assert unapplied(expected) == ["num_beams=2"]

    file.write_text("{")
    with pytest.raises(InputError, match=r"generation_config\.json: transformers cannot read it"):
        generation_config(tmp_path)


ALL = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.01,
    "typical_p": 0.9,
    "repetition_penalty": 1.1,
    "no_repeat_ngram_size": 4,
    "min_new_tokens": 2,
    "min_length": 9,
    "suppress_tokens": [5],
    "begin_suppress_tokens": [6, 7],
    "bad_words_ids": [[1], [2, 3]],
}


def folder_that_asks(folder: Path, asked: dict[str, Any]) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(asked))
    return folder


def test_what_a_host_applies_is_in_the_manifest_and_not_in_notes(tmp_path: Path) -> None:
    """Values that switch a setting off, and those of other settings, are not in it."""
    assert model_sampling(folder_that_asks(tmp_path, ALL), 300) == ModelSampling(
        True, 0.6, 20, 0.95, 0.01, 0.9, 1.1, 4, 2, 9, (5,), (6, 7), ((1,), (2, 3))
    )
    assert generation_notes(GenerationConfig(**ALL), choose=True) == ()
    left = GenerationConfig(**ALL, num_beams=2, top_h=0.3)
    assert [note.split(" asks for ")[1] for note in generation_notes(left, choose=True)] == [
        "settings that a bundle does not apply: num_beams=2: "
        "generate() of transformers gives other answers",
        "sampling (top_h=0.3); the bundle does not apply this",
    ]
    for off in (
        {"eos_token_id": 2},
        {"top_k": 0, "top_p": 1.0, "suppress_tokens": [], "repetition_penalty": 1.0},
    ):
        assert model_sampling(folder_that_asks(tmp_path, off), 300) is None
    assert model_sampling(folder_that_asks(tmp_path, {"do_sample": True}), 300) == ModelSampling(
        True
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_p": 0.0},
        {"temperature": -1.0},
        {"temperature": "hot"},
        {"suppress_tokens": [300]},
        {"bad_words_ids": [[]]},
        {"top_k": 1.5},
        {"temperature": 1e9},
    ],
    ids=str,
)
def test_what_no_host_could_apply_is_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"generation_config\.json"):
        model_sampling(folder_that_asks(tmp_path, {"do_sample": True, **wrong}), 300)
