"""The wheel holds every module of the tree once."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from ssdevice import targets
from ssdevice.commands.web import SOURCES
from ssdevice.runtime.onnx import kernels

LINKS = ("export", "runtime")
"""Links at the top of the tree to the two folders that people look for first."""
PAGE = "apps/web_demo"


def modules(root: Path) -> set[str]:
    """The modules of the tree, as paths in a wheel."""
    return {file.relative_to(root).as_posix() for file in (root / "ssdevice").rglob("*.py")}


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built without network and compiler from a copy of the sources."""
    return build(repository, tmp_path_factory, SSDEVICE_PURE_WHEEL="1")


def build(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, **environment: str
) -> zipfile.ZipFile:
    copy = tmp_path_factory.mktemp("tree")
    out = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(repository / "ssdevice", copy / "ssdevice", ignore=ignored)
    shutil.copytree(repository / PAGE, copy / PAGE, ignore=shutil.ignore_patterns("node_modules"))
    for name in ("pyproject.toml", "setup.py", "LICENSE", "README.md"):
        shutil.copy(repository / name, copy)
    code = f"import setuptools.build_meta as backend; backend.build_wheel({str(out)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=copy,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    [path] = out.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_every_module_once(repository: Path, wheel: zipfile.ZipFile) -> None:
    names = [name for name in wheel.namelist() if name.endswith(".py")]
    assert len(names) == len(set(names))
    missing = sorted(modules(repository) - set(names))
    assert not missing, (
        f"not in the wheel, add their packages to [tool.setuptools] in pyproject.toml: {missing}"
    )
    assert set(names) == modules(repository), "the wheel holds modules that the tree does not"


COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
echo library > "$2"
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the kernels are for Linux and macOS")
def test_a_wheel_of_a_platform_holds_the_kernels_where_engines_look(
    repository: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    wheel = build(repository, tmp_path_factory, CXX=str(compiler))
    assert re.search(r"-py3-none-(?!any)\w+\.whl$", str(wheel.filename))
    [name] = [name for name in wheel.namelist() if name.endswith(kernels.SUFFIX)]
    place = tmp_path / "kernels"
    place.mkdir()
    file = place / Path(name).name
    file.write_bytes(wheel.read(name))
    assert (
        Path(name).parent.as_posix() == "ssdevice/runtime/onnx/kernels"
        and file.read_text() == "library\n"
    )
    monkeypatch.delenv(kernels.FOLDER, raising=False)
    monkeypatch.setattr(kernels, "SOURCES", place)
    monkeypatch.setattr(kernels, "_name", lambda: file.name[: file.name.rindex("-") + 1])
    assert kernels.library() == file


def test_a_wheel_without_kernels_is_for_every_platform(wheel: zipfile.ZipFile) -> None:
    assert str(wheel.filename).endswith("-py3-none-any.whl")
    assert not any(name.endswith(kernels.SUFFIX) for name in wheel.namelist())


def test_wheel_puts_nothing_beside_the_package(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"ssdevice"}
    assert {"ssdevice/py.typed", "ssdevice/bench/page.html"} <= set(wheel.namelist())


def test_wheel_holds_the_page(repository: Path, wheel: zipfile.ZipFile) -> None:
    found = {Path(name).name for name in wheel.namelist() if name.startswith("ssdevice/web/")}
    assert found == {
        file.name for pattern in SOURCES for file in (repository / PAGE).glob(pattern)
    } | {"package.json"}


def test_every_package_has_an_init(repository: Path) -> None:
    homes = modules(repository)
    folders = {str(Path(home).parent) for home in homes}
    assert not sorted(folder for folder in folders if f"{folder}/__init__.py" not in homes)


def test_core_needs_no_heavy_dependency(wheel: zipfile.ZipFile) -> None:
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    requires = Parser().parsestr(wheel.read(name).decode()).get_all("Requires-Dist", [])
    core = {
        line.split(">")[0].split("=")[0].split("<")[0].strip()
        for line in requires
        if "extra ==" not in line
    }
    assert core == {"numpy", "onnxruntime", "tokenizers", "safetensors", "jinja2", "rich"}


def test_links_point_at_the_real_folders(repository: Path) -> None:
    for name in LINKS:
        link = repository / name
        assert link.is_symlink() and link.resolve() == repository / "ssdevice" / name


def project_of(repository: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((repository / "pyproject.toml").read_text("utf-8"))[
        "project"
    ]
    return project


def test_script_and_extras_are_declared(repository: Path) -> None:
    project = project_of(repository)
    assert project["scripts"] == {"ssdevice": "ssdevice.cli:main"}
    assert set(project["optional-dependencies"]) == {
        "export",
        "train",
        "coreml",
        "executorch",
        "coreai",
        "bench",
        "sign",
        "smollm2",
        "peers",
        "structure",
        "serve",
        "all",
        "dev",
    }


def test_targets_name_extras_that_are_declared(repository: Path) -> None:
    declared = {"", *project_of(repository)["optional-dependencies"]}
    for name in targets.BUILT_IN:
        found = targets.find(name)
        assert {targets.load(found.export).extra, targets.load(found.runtime).extra} <= declared, (
            name
        )


def test_every_third_party_import_is_declared(repository: Path) -> None:
    project = project_of(repository)
    lines = [
        *project["dependencies"],
        *chain.from_iterable(project["optional-dependencies"].values()),
    ]
    declared = {re.split(r"[^A-Za-z0-9_-]", line)[0].replace("-", "_") for line in lines}
    modules = {"llama_cpp_python": "llama_cpp", "coreai_core": "coreai"}
    declared = {modules.get(name, name) for name in declared}
    imported: dict[str, str] = {}
    for file in (repository / "ssdevice").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in names:
                imported[name.split(".")[0]] = str(file.relative_to(repository))
    missing = {
        name: file
        for name, file in imported.items()
        if name not in declared | sys.stdlib_module_names | {"ssdevice"}
    }
    assert not missing, f"imported but not in pyproject.toml: {missing}"
