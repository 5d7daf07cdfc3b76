"""What code must not look like here: ``python -m tests.shape [FOLDER..]``. Ruff has other rules.

Each rule stands for a trick that saves a line and costs every reader a minute. CONTRIBUTING.md says
what to write instead.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("ssdevice", "tests")
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def is_table(node: ast.expr) -> bool:
    """Whether an expression is a table of data: constants, names and displays of them."""
    return all(
        isinstance(
            each,
            ast.Constant
            | ast.Name
            | ast.Attribute
            | ast.Tuple
            | ast.List
            | ast.Set
            | ast.Dict
            | ast.UnaryOp
            | ast.USub
            | ast.expr_context,
        )
        for each in ast.walk(node)
    )


def unformatted(source: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Places that the formatter skips and that are no tables."""
    tables = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and is_table(node.value):
            tables.add(node.end_lineno or node.lineno)
    for number, line in enumerate(source.splitlines(), 1):
        if line.rstrip().endswith("# fmt: " + "skip") and number not in tables:
            yield number, "the formatter is told to skip what is no table"


def is_parallel(node: ast.Assign) -> bool:
    """Whether values that have nothing to do with each other are assigned at once.

    A swap and a step of a recurrence (``a, b = b, a + b``) need both at once.
    """
    [target, *more] = node.targets
    if more or not isinstance(target, ast.Tuple) or not isinstance(node.value, ast.Tuple):
        return False
    assigned = {ast.unparse(each) for each in target.elts}
    read = {ast.unparse(each) for each in ast.walk(node.value) if isinstance(each, ast.expr)}
    return not assigned & read


def is_bool_index(node: ast.Subscript) -> bool:
    """Whether a sequence is indexed by what is true or false. A comparison that indexes a name may
    be a mask of an array.
    """
    index = node.slice
    if isinstance(index, ast.Call):
        return getattr(index.func, "id", "") in ("bool", "isinstance", "any", "all", "hasattr")
    if isinstance(index, ast.UnaryOp):
        return isinstance(index.op, ast.Not)
    displayed = isinstance(node.value, ast.Tuple | ast.List | ast.Constant)
    return displayed and isinstance(index, ast.Compare)


def tricks(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines with what a reader has to work out."""
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSIONS):
            for inner in ast.walk(node):
                if inner is not node and isinstance(inner, COMPREHENSIONS):
                    yield node.lineno, "a comprehension inside a comprehension"
                    break
            if any(isinstance(inner, ast.NamedExpr) for inner in ast.walk(node)):
                yield node.lineno, "a walrus inside a comprehension"
        elif isinstance(node, ast.Assign) and is_parallel(node):
            yield node.lineno, "unrelated values assigned at once"
        elif isinstance(node, ast.Expr) and isinstance(
            node.value, (ast.IfExp, ast.BoolOp, *COMPREHENSIONS)
        ):
            yield node.lineno, "an expression as a statement: write the if or the loop"
        elif isinstance(node, ast.Subscript) and is_bool_index(node):
            yield node.lineno, "a sequence indexed by a bool"


def check(folders: tuple[str, ...]) -> list[str]:
    """What is wrong below the folders, a line each."""
    found = []
    for folder in folders:
        path = ROOT / folder
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for file in files:
            source = file.read_text("utf-8")
            tree = ast.parse(source)
            for line, what in sorted({*unformatted(source, tree), *tricks(tree)}):
                found.append(f"{file.relative_to(ROOT)}:{line}: {what}")
    return found


def main() -> int:
    """Print what is wrong; the exit code is 1 if anything is."""
    found = check(tuple(sys.argv[1:]) or FOLDERS)
    print("\n".join(found) or "shape: nothing to say")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
