"""The weights of a folder are the files that transformers loads; others do not matter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ssdevice.adapters.base_files import INDEX, WHOLE, weight_files, weights_sha256
from ssdevice.errors import InputError

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 123\n"


def sharded(folder: Path, *names: str) -> Path:
    (folder / INDEX).write_text(
        json.dumps({"weight_map": {str(i): name for i, name in enumerate(names)}})
    )
    return folder


def test_files_that_transformers_does_not_load_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / WHOLE).write_text("weights")
    alone = weights_sha256(tmp_path)
    for stray in ("consolidated.safetensors", "model.fp16.safetensors", "pytorch_model.bin"):
        (tmp_path / stray).write_text(POINTER)
    sharded(
        tmp_path, "model-00001-of-00001.safetensors"
    )  # transformers looks for the whole file first
    assert weight_files(tmp_path) == [tmp_path / WHOLE]
    assert weights_sha256(tmp_path) == alone


def test_an_index_names_its_files_once_each_and_in_order(tmp_path: Path) -> None:
    sharded(tmp_path, "b.safetensors", "a.safetensors", "b.safetensors")
    for name in ("a", "b", "consolidated"):
        (tmp_path / f"{name}.safetensors").write_text(name)
    assert weight_files(tmp_path) == [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]


def test_a_config_may_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"transformers_weights": "other.safetensors"}')
    for name in (WHOLE, "other.safetensors"):
        (tmp_path / name).write_text(name)
    assert weight_files(tmp_path) == [tmp_path / "other.safetensors"]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model-q4.gguf", "model.fp16.safetensors"])
def test_weights_in_another_form_are_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"no \.safetensors weights: neither .*index.json$"):
        weight_files(tmp_path)
    (tmp_path / name).write_text("")
    with pytest.raises(
        InputError, match=rf"{name} is not what transformers loads; convert it with transformers"
    ):
        weight_files(tmp_path)


def test_a_pointer_and_a_file_that_is_missing_are_named(tmp_path: Path) -> None:
    sharded(tmp_path, "a.safetensors", "b.safetensors")
    (tmp_path / "a.safetensors").write_text(POINTER)
    with pytest.raises(
        InputError, match=r"a\.safetensors is a Git LFS pointer, not the file itself: fetch it"
    ):
        weight_files(tmp_path)
    (tmp_path / "a.safetensors").write_text("")
    with pytest.raises(
        InputError, match=r"b\.safetensors: no such file, but model.safetensors.index.json lists it"
    ):
        weight_files(tmp_path)


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}'])
def test_an_index_that_lists_nothing_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(InputError, match="'weight_map' is not a table of tensor to file"):
        weight_files(tmp_path)
