"""The Xcode project of the iOS demo names what is there, and the picture of its screens shows what
the views say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from tests.swift import screens


@pytest.fixture(scope="module")
def demo(repository: Path) -> Path:
    return repository / "apps" / "ios_demo"


@pytest.fixture(scope="module")
def project(demo: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = yaml.safe_load((demo / "project.yml").read_text("utf-8"))
    return found


@pytest.fixture(scope="module")
def package(demo: Path) -> str:
    return (demo / "Package.swift").read_text("utf-8")


def libraries(package: str) -> dict[str, list[str]]:
    """The package's libraries and their targets."""
    found = re.findall(r'\.library\(name: "(\w+)", targets: \[([^]]*)\]\)', package)
    return {name: re.findall(r'"(\w+)"', targets) for name, targets in found}


def test_the_package_has_a_folder_for_every_target(demo: Path, package: str) -> None:
    targets = re.findall(r'\.(target|executableTarget|testTarget)\(\s*name: "(\w+)"(.*)', package)
    assert {name for _, name, _ in targets} > {"Demo", "DemoModel", "DemoModelTests"}
    for kind, name, rest in targets:
        path = re.search(r'path: "([^"]+)"', rest)
        folder = (
            path.group(1) if path else f"{'Tests' if kind == 'testTarget' else 'Sources'}/{name}"
        )
        assert list((demo / folder).glob("*.swift")), folder
    for name, made_of in libraries(package).items():
        assert {name} == set(made_of), f"library {name}"


def test_paths_and_products_of_the_project_exist(
    demo: Path, project: Mapping[str, Any], package: str
) -> None:
    for path in (value["path"] for value in project["packages"].values()):
        assert (demo / path / "Package.swift").is_file()
    products = libraries(package)
    for target in project["targets"].values():
        for source in target["sources"]:
            assert list((demo / source).glob("*.swift")), source
        for dependency in target["dependencies"]:
            assert dependency["package"] in project["packages"]
            assert dependency["product"] in products


def test_the_project_links_what_its_sources_import(
    demo: Path, project: Mapping[str, Any], package: str
) -> None:
    for target in project["targets"].values():
        sources = [file for source in target["sources"] for file in (demo / source).glob("*.swift")]
        imported = {
            name
            for file in sources
            for name in re.findall(r"^\s*import (\w+)", file.read_text("utf-8"), re.M)
        }
        linked = {dependency["product"] for dependency in target["dependencies"]}
        assert imported & libraries(package).keys() == linked


def test_the_project_builds_for_what_the_package_builds_for(
    project: Mapping[str, Any], package: str
) -> None:
    (least,) = re.findall(r"\.iOS\(\.v(\d+)\)", package)
    assert project["options"]["deploymentTarget"] == {"iOS": f"{least}.0"}
    (tools,) = re.findall(r"swift-tools-version: ([\d.]+)", package)
    assert all(
        target["settings"]["SWIFT_VERSION"] == tools for target in project["targets"].values()
    )


def test_what_the_app_makes_is_ignored_by_git(demo: Path, project: Mapping[str, Any]) -> None:
    ignored = (demo / ".gitignore").read_text("utf-8").splitlines()
    assert {target["info"]["path"] for target in project["targets"].values()} <= set(ignored)


def test_the_picture_is_drawn_from_the_states_beside_it(demo: Path) -> None:
    states = json.loads((demo / "screens.json").read_text("utf-8"))
    assert screens.draw(states) == (demo / "screens.svg").read_text("utf-8"), (
        "the README says how to draw it again"
    )


def test_the_picture_has_the_texts_of_the_views(demo: Path) -> None:
    """All but what shows only while something runs, to screen readers, on a Mac or as a symbol."""
    shown = ("ContentView", "BenchmarkView", "DemoApp")
    views = "".join(
        (demo / "Sources" / "Demo" / f"{name}.swift").read_text("utf-8") for name in shown
    )
    unseen = {"Bundle", "App", "Stop", "text.bubble", "stopwatch"}
    assert literals(views) == set(screens.Label) | unseen


def literals(swift: str) -> set[str]:
    """The strings of Swift code, with Python's fields for what they insert."""
    joined = re.sub(r"\\\n\s*", "", swift)
    fields = re.sub(
        r'\\\(([\w.]+)(?:, specifier: "%([^"]+)")?\)',
        lambda m: f"{{:{m[2]}}}" if m[2] else "{}",
        joined,
    )
    return {a or b for a, b in re.findall(r'"""\n\s*(.*?)\n\s*"""|"([^"\n]+)"', fields)}


def test_text_in_the_picture_is_escaped_and_broken_into_lines(demo: Path) -> None:
    states = json.loads((demo / "screens.json").read_text("utf-8"))
    piece = {"text": 'a < b & "c"  d\n\n', "accepted": True}
    long = {"text": "x" * 100, "accepted": False}
    states["chat"]["exchanges"] = [{"prompt": "</text>", "pieces": [piece, long]}]
    states["chat"] |= {"plain": None, "status": "gone"}
    drawn = []
    for text in texts(screens.draw(states)):
        spans = "".join(span.text or "" for span in text)
        drawn.append((text.text or "") + spans)
    assert {"</text>", 'a < b & "c"  d', screens.Label.NOT_RUN, "gone"} <= set(drawn)
    broken = [line for line in drawn if set(line) == {"x"}]
    assert len(broken) > 1 and sum(map(len, broken)) == 100


def texts(svg: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(svg).findall(".//{http://www.w3.org/2000/svg}text")
