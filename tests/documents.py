"""The documents of the repository, and the code in them."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def documents() -> list[Path]:
    """All of them but the record of changes, which names what is gone."""
    found = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("models/**/*.md"),
        *ROOT.glob("apps/*/*.md"),
        *ROOT.glob("research/*.md"),
    ]
    return sorted(path.relative_to(ROOT) for path in found if path.name != "CHANGELOG.md")


def blocks(document: Path, language: str | None = None, chapter: str | None = None) -> list[str]:
    """Blocks of code of a document or of one chapter: those in fences, of one language or of any,
    and indented ones.
    """
    text = document.read_text("utf-8")
    if chapter is not None:
        [text] = re.findall(
            rf"^## {re.escape(chapter)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL
        )
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    found = [code for named, code in fenced if language in (None, named)]
    if language is None:
        rest = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        found += [
            textwrap.dedent(code)
            for code in re.findall(r"(?:^ {4}.*\n(?:\n(?= {4}))?)+", rest, re.MULTILINE)
        ]
    return found


def inline(document: Path) -> list[str]:
    """Code inside sentences."""
    text = re.sub(r"^```.*?^```$", "", document.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose) if code.strip()]


def commands(document: Path) -> list[list[str]]:
    """The arguments of every ``ssdevice`` command in blocks."""
    return [command for block in blocks(document) for command in commands_of(block)]


def commands_of(block: str) -> list[list[str]]:
    """Those of a block.

    A command goes on after a backslash and inside quotes; an ``[--option]`` is taken.
    """
    found = []
    lines = block.replace("\\\n", " ").splitlines()
    while lines:
        command = lines.pop(0)
        if not command.strip().startswith("ssdevice "):
            continue
        command = re.sub(r"\[(--[^\]]*)\]", r"\1", command)
        while True:
            try:
                words = shlex.split(command, comments=True)
                break
            except ValueError:  # a quotation goes on
                command += "\n" + lines.pop(0)
        found.append(words[1:])
    return found
