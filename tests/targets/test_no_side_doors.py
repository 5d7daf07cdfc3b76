"""A target is two folders and nothing else: the rest of the product names none, asks for none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssdevice import targets

FOLDERS = tuple(
    f"ssdevice.{side}.{name}" for side in ("export", "runtime") for name in targets.BUILT_IN
)
REGISTRY = "ssdevice/targets.py"
TORCH = ("node", "spec")
"""Names of torch's own things that have a target: nodes of a graph, entries of its signature."""


def neutral_files(repository: Path) -> Iterator[Path]:
    """The product's files outside the folders of targets."""
    for file in sorted((repository / "ssdevice").rglob("*.py")):
        if not set(file.relative_to(repository).parts) & set(targets.BUILT_IN):
            yield file


def about_targets(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines that branch on a target, name one where values are looked up, or import from its
    folder.
    """
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [str(node.module), *(f"{node.module}.{name}" for name in names)]
            if any(f"{name}.".startswith(f"{folder}.") for name in names for folder in FOLDERS):
                yield node.lineno, "imports a target"
        elif isinstance(node, ast.Compare) and any(
            is_target(one) for one in (node.left, *node.comparators)
        ):
            yield node.lineno, "compares targets"
        elif isinstance(node, ast.Match) and is_target(node.subject):
            yield node.lineno, "matches targets"
        elif isinstance(node, ast.Constant) and node.value in targets.BUILT_IN:
            yield node.lineno, "names a target"


def is_target(node: ast.expr) -> bool:
    """Whether an expression is called ``target``, as in ``manifest.target`` or
    ``args.target.value``.
    """
    while isinstance(node, ast.Attribute) and node.attr == "value":
        node = node.value
    if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in TORCH:
        return False
    return "target" in (getattr(node, "attr", None), getattr(node, "id", None))


def test_nothing_outside_its_folders_knows_a_target(repository: Path) -> None:
    found = [
        f"{file.relative_to(repository)}:{line}: {what}"
        for file in neutral_files(repository)
        if file.relative_to(repository).as_posix() != REGISTRY
        for line, what in about_targets(ast.parse(file.read_text("utf-8")))
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "if manifest.target is Target.ONNX: pass",
        "if args.target.value == wanted: pass",
        "x = 1 if target != other else 2",
        "match target:\n    case _: pass",
        "EXTRAS = {'onnx': 'export'}",
        "from ssdevice.runtime.onnx.engine import OnnxEngine",
        "def f():\n    from ssdevice.export import coreml",
        "import ssdevice.export.executorch",
    ],
)
def test_each_kind_of_branch_is_found(code: str) -> None:
    assert list(about_targets(ast.parse(code)))
