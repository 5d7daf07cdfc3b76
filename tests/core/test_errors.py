"""Exit codes and messages: 2 for what the caller can correct, 1 for a failure."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

from ssdevice import errors
from ssdevice.adapters.storage import read_tensors
from ssdevice.config import read_json
from ssdevice.errors import InputError, MissingExtraError, ParityError, SSDeviceError, first_line

CLASSES = [
    c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__
]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_belongs_to_the_hierarchy(cls: type[SSDeviceError]) -> None:
    assert issubclass(cls, SSDeviceError)
    assert cls.exit_code == (2 if issubclass(cls, InputError) else 1)
    assert cls.__doc__


def test_a_failed_check_is_not_the_callers_fault() -> None:
    assert ParityError.exit_code == SSDeviceError.exit_code == 1


def test_missing_extra_says_what_to_install() -> None:
    error = MissingExtraError("coreml", "coremltools")
    assert (
        str(error)
        == "coremltools is not installed; install it with: pip install 'ssdevice[coreml]'"
    )
    assert "pip install 'ssdevice'" in str(MissingExtraError("", "onnxruntime"))


def test_a_message_of_another_library_does_not_end_where_it_begins() -> None:
    details = (
        "Error(s) in loading state_dict for Linear:\n"
        "\tsize mismatch for weight: [3] and [4].\n"
        "\tmore"
    )
    assert first_line(RuntimeError(details)) == (
        "Error(s) in loading state_dict for Linear: size mismatch for weight: [3] and [4]."
    )
    assert first_line(ValueError("\n")) == "ValueError"
    assert first_line(ValueError("one\ntwo")) == "one" and first_line(ValueError("cut:")) == "cut"


@pytest.mark.parametrize("read", [read_json, read_tensors])
def test_a_pointer_of_git_lfs_is_named(tmp_path: Path, read: Callable[[Path], object]) -> None:
    file = tmp_path / "file"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(
        InputError,
        match="file is a Git LFS pointer, not the file itself: fetch it with 'git lfs pull'",
    ):
        read(file)
