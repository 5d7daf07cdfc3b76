"""The compiled kernels as a file: where it is put, and that nothing else is loaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ssdevice.cli import main
from ssdevice.contract import STEP
from ssdevice.errors import BundleError, InputError
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.onnx import kernels
from ssdevice.runtime.onnx.engine import OnnxEngine
from ssdevice.tree import Tree
from tests.compiled_kernels import COMPILER, NO_COMPILER, built, native_objects
from tests.fuzz.operator_graphs import region
from tests.runtime.scripted import make_geometry
from tests.runtime.tiny_bundle import tiny_bundle

pytestmark = pytest.mark.skipif(COMPILER is None, reason=NO_COMPILER)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of this test's own, which engines find."""
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o755)
    monkeypatch.setenv(kernels.FOLDER, str(folder))
    file = folder / built("native").name
    shutil.copy(built("native"), file)
    assert kernels.library() == file
    return file


def refusal(file: Path) -> str:
    """What is said instead of loading a library."""
    with pytest.raises(InputError) as raised, kernels.crew(file, 1):
        pass
    return str(raised.value)


def test_the_command_puts_the_kernels_where_engines_find_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "kernels"
    script = tmp_path / "compiler"
    monkeypatch.setenv(kernels.FOLDER, str(folder))
    # The compiler, which only links what other tests have compiled of the sources that it is given.
    given = f"[{native_objects()!r}.get(given, given) for given in sys.argv[1:]]"
    called = f"import subprocess, sys\nsubprocess.run([{COMPILER!r}, *{given}], check=True)\n"
    script.write_text(f"#!{sys.executable}\n{called}")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    folder.mkdir(mode=0o755)
    (folder / f"{kernels.PREFIX}of-another-version.so").touch()
    assert kernels.library() is None and main(["kernels"]) == 0
    file = kernels.library()
    assert file is not None and str(file) in capsys.readouterr().out
    with kernels.crew(file, 1):
        assert list(folder.iterdir()) == [file]


@pytest.fixture(scope="module")
def bundle() -> Path:
    """Made before there is a library, which an export would use."""
    return tiny_bundle("fp32").folder


def test_a_graph_of_an_older_version_says_what_to_do(tmp_path: Path, library: Path) -> None:
    x = np.ones((1, 4), np.float32)
    file = tmp_path / "step.onnx"
    file.write_bytes(region("2 1\nAdd : 0 1 > 2", x, x).model())
    engine = OnnxEngine(
        {STEP: file}, make_geometry(Tree.chain(2)), "float32", EngineOptions(threads=1)
    )
    with pytest.raises(
        BundleError, match=r"no operator of this name.*export it again.*--no-kernels"
    ):
        engine.session(STEP)


def test_half_a_library_is_one_line_and_can_be_left_out(
    bundle: Path, library: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.truncate(library, library.stat().st_size // 2)
    arguments = ["run", str(bundle), "--prompt", "abc", "--max-tokens", "2", "--quiet"]
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "its sha256 is another" in line and "ssdevice kernels" in line and "--no-kernels" in line
    assert main([*arguments, "--no-kernels"]) == 0


@pytest.mark.parametrize("change", [b"", b"no library", b"\0"])
def test_other_contents_are_refused(library: Path, change: bytes) -> None:
    library.write_bytes(library.read_bytes() + change if change == b"\0" else change)
    assert "its sha256 is another" in refusal(library)


def test_what_was_compiled_elsewhere_is_loaded_or_one_line(library: Path) -> None:
    library.write_bytes(b"for another system")
    other = kernels.put(library, library.parent)
    said = refusal(other)
    assert "cannot be loaded" in said and "ssdevice kernels" in said


def test_a_library_of_something_else_is_one_line(library: Path, tmp_path: Path) -> None:
    source = tmp_path / "other.c"
    other = tmp_path / "other.so"
    for left_out in (*kernels.SYMBOLS, ""):
        given = [name for name in kernels.SYMBOLS if name != left_out]
        source.write_text("".join(f"void {name}(void) {{}}\n" for name in given))
        subprocess.run([str(COMPILER), "-x", "c", "-shared", "-o", other, source], check=True)
        file = kernels.put(other, library.parent)
        if left_out:
            said = refusal(file)
            assert f"it has no {left_out};" in said and "ssdevice kernels" in said
        else:
            kernels.loaded(file)


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_a_library_that_others_can_change_is_refused(library: Path, mode: int) -> None:
    library.chmod(mode)
    said = refusal(library)
    assert said.startswith(
        f"{library} can be changed by other users (mode {mode:o}); chmod go-w {library}, or set "
    )
    assert kernels.FOLDER in said and "--no-kernels" in said
    library.chmod(0o755)
    library.parent.chmod(mode)
    assert f"{library.parent} can be changed by other users" in refusal(library)
    with pytest.raises(InputError, match="chmod go-w"):
        kernels.build()


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for one, quickly: writes what the other tests have compiled.

    The cache is ``tmp_path``.
    """
    script = tmp_path / "compiler"
    script.write_text(
        f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp "{built("native")}" "$2"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(kernels.FOLDER, raising=False)
    return script


def test_a_cache_that_a_group_can_change_is_closed_to_it(compiler: Path) -> None:
    folder = compiler.parent / "ssdevice"
    folder.mkdir()
    folder.chmod(0o2775)  # with a umask of 002, as many systems have it
    with kernels.crew(kernels.build(), 1):
        assert folder.stat().st_mode & 0o777 == 0o755


def test_what_is_no_folder_for_kernels_is_one_line(compiler: Path) -> None:
    (compiler.parent / "ssdevice").symlink_to("nowhere")
    with pytest.raises(
        InputError, match=f"cannot be made a folder .File exists.; set {kernels.FOLDER} to"
    ):
        kernels.build()


def test_a_library_or_folder_of_another_user_is_refused(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = library.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    if owner:  # root's are trusted by everyone
        assert "belongs to another user" in refusal(library)
    monkeypatch.undo()
    if os.getuid() == 0:
        for path in (library, library.parent):
            os.chown(path, 12345, -1)
            assert f"{path} belongs to another user (id 12345)" in refusal(library)
            os.chown(path, 0, -1)


def test_a_link_is_as_good_as_what_it_leads_to(library: Path, tmp_path: Path) -> None:
    link = tmp_path / library.name
    link.symlink_to(library)
    with kernels.crew(link, 1):
        pass
    library.parent.chmod(0o777)
    assert "can be changed by other users" in refusal(link)


def test_a_library_that_is_gone_is_one_line(library: Path) -> None:
    library.unlink()
    assert "cannot be read (No such file or directory)" in refusal(library)


def test_what_a_compiler_says_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(kernels.FOLDER, str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InputError, match=r"CXX is no-such-compiler.*apt-get install g\+\+"):
        kernels.build()
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(InputError, match="false cannot compile the kernels"):
        kernels.build()
    assert list(tmp_path.iterdir()) == [] and kernels.library() is None
