"""Counts the product's lines against the ceilings in ``tests/lines.json``: ``python -m tests.lines [--lower]``.

A line of code holds a token that is neither comment nor docstring. A ceiling falls with every change that makes its
folder shorter (``--lower`` writes that); it rises only by hand, with a feature that an issue names.
"""

from __future__ import annotations

import ast
import json
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CEILINGS = Path(__file__).with_name("lines.json")
PYTHON = ("ssdevice", "export", "runtime", "peers")
KERNELS = "runtime/onnx/kernels, C++"
SILENT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(file: Path) -> int:
    """Lines of code of a Python file."""
    documented = set[int]()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documented |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    with file.open("rb") as stream:
        found = {
            line
            for token in tokenize.tokenize(stream.readline)
            if token.type not in SILENT
            for line in range(token.start[0], token.end[0] + 1)
        }
    return len(found - documented)


def counts() -> dict[str, int]:
    """Folder -> lines: code in Python, all lines of the kernels."""
    found = Counter[str]()
    for top in PYTHON:
        for file in sorted((ROOT / top).rglob("*.py")):
            inside = file.relative_to(ROOT / top).parts
            if not (ROOT / top / inside[0]).is_symlink():
                found["/".join((top, *inside[:-1][:1]))] += code_lines(file)
    kernels = (ROOT / "runtime" / "onnx" / "kernels").iterdir()
    found[KERNELS] = sum(file.read_text().count("\n") for file in kernels if file.suffix in (".cpp", ".h"))
    return dict(found)


def main() -> int:
    """Print what is over its ceiling; the exit code is 1 if something is, or if a ceiling could be lower."""
    found, ceilings = counts(), json.loads(CEILINGS.read_text())
    if "--lower" in sys.argv:
        lowered = {folder: min(lines, ceilings.get(folder, lines)) for folder, lines in found.items()}
        CEILINGS.write_text(json.dumps(lowered, indent=2) + "\n")
        ceilings = lowered
    wrong = 0
    for folder in sorted({*found, *ceilings}):
        lines, ceiling = found.get(folder, 0), ceilings.get(folder, 0)
        if lines != ceiling:
            over = "make it shorter" if lines > ceiling else "lower the ceiling: python -m tests.lines --lower"
            print(f"{folder}: {lines} lines, the ceiling is {ceiling}; {over}")
            wrong = 1
    python = sum(lines for folder, lines in found.items() if folder != KERNELS)
    print(f"{python} lines of code in Python, {found[KERNELS]} lines of kernels")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
