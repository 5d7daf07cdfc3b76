"""Reports the product's size: ``python -m tests.lines [COMMIT]``.

Tokens of code by folder, and how many there are more or fewer than at a commit (default: where this
branch left main; on main itself, the commit before). Comments, docstrings and layout do not count,
so nothing is gained by making lines longer. It is a report and no gate.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOVED = ("export/", "runtime/", "peers/")
"""Folders that moved into ssdevice."""
PRODUCT = ("ssdevice/", "apps/cpp_host/", *MOVED)
LAYOUT = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}
CPP_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[A-Za-z_]\w*|\d[\w.]*|[^\s\w]')
CPP_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def python_tokens(source: str) -> int:
    """Tokens of Python that are neither layout, comment nor a string that is a statement."""
    count = 0
    begins = True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        documents = begins and token.type == tokenize.STRING
        if token.type not in LAYOUT and not documents:
            count += 1
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            begins = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    return count


def cpp_tokens(source: str) -> int:
    """Tokens of C++ without its comments."""
    return len(CPP_TOKEN.findall(CPP_COMMENT.sub("", source)))


def count(files: Iterator[tuple[str, str]]) -> Counter[str]:
    """Folder and language -> tokens."""
    found = Counter[str]()
    for name, source in files:
        path = Path(name)
        folder = "/".join(path.parts[:3][:-1] if len(path.parts) < 4 else path.parts[:3])
        if path.suffix == ".py":
            found[folder] += python_tokens(source)
        else:
            found[f"{folder} (C++)"] += cpp_tokens(source)
    return found


def is_product(name: str) -> bool:
    """Whether a file of the tree is code that the product runs."""
    inside = name.startswith(
        ("ssdevice/", "export/", "runtime/", "peers/", "apps/cpp_host/", "core/")
    )
    return inside and name.endswith((".py", ".cpp", ".h"))


def git(*arguments: str) -> str:
    """What a git command prints."""
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def tree() -> Iterator[tuple[str, str]]:
    """The files of the product in this tree, with their text."""
    for name in git("ls-files").splitlines():
        file = ROOT / name
        if is_product(name) and file.is_file():
            yield name, file.read_text("utf-8")


def commit(revision: str) -> Iterator[tuple[str, str]]:
    """The files of the product at a commit, under the folders that they have now."""
    for name in git("ls-tree", "-r", "--name-only", revision).splitlines():
        if is_product(name):
            home = name
            if name.startswith(MOVED):
                home = f"ssdevice/{name}"
            yield home, git("show", f"{revision}:{name}")


def base() -> str:
    """The commit to compare with."""
    found = git("merge-base", "HEAD", "main").strip()
    return (
        git("rev-parse", "HEAD~1").strip() if found == git("rev-parse", "HEAD").strip() else found
    )


def main() -> int:
    """Print the report."""
    now = count(tree())
    try:
        before = count(commit(sys.argv[1] if len(sys.argv) > 1 else base()))
    except subprocess.CalledProcessError:  # a clone without history
        before = now
    for folder in sorted({*now, *before}):
        print(f"{folder:42} {now[folder]:8} {now[folder] - before[folder]:+7}")
    print(f"{'all':42} {now.total():8} {now.total() - before.total():+7}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
