"""The page's modules in Node, and the page in Chromium."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ssdevice.bundle.folder import Bundle
from ssdevice.commands.web import MODULES, RUNTIME, TREE
from ssdevice.text.tokenizer import user_content

HERE = Path(__file__).parent
PACKAGES = TREE / MODULES


def needs_packages(*names: str) -> None:
    """Skip the test without Node, and without the packages of the page or those in ``names``."""
    if shutil.which("node") is None:
        pytest.skip("needs node")
    if not all((PACKAGES / name).exists() for name in (*RUNTIME, *names)):
        pytest.skip("needs the packages of `make web`")


def script(name: str, *arguments: object, given: str = "") -> subprocess.CompletedProcess[str]:
    """What a script here says."""
    needs_packages()
    command = ["node", str(HERE / name), str(TREE), str(PACKAGES), *map(str, arguments)]
    return subprocess.run(
        command, input=given, capture_output=True, text=True, check=False, timeout=600
    )


def lines(values: Iterable[Any]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def framed(
    bundle: Bundle, app: str, prompts: Sequence[str], max_tokens: int
) -> list[dict[str, Any]]:
    """Requests to ``decode.mjs`` as the page makes them."""
    instruction = bundle.app(app).instruction
    return [
        {"app": app, "prompt": user_content(instruction, prompt), "max_tokens": max_tokens}
        for prompt in prompts
    ]


def decoded(folder: Path, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers of the page's modules, see ``decode.mjs``."""
    done = script("decode.mjs", folder, given=lines(requests))
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def damaged(bundle: Bundle, out: Path, name: str) -> Path:
    """A copy of a bundle in which one byte of a file differs."""
    shutil.copytree(bundle.folder, out)
    file = bundle.file(name).relative_to(bundle.folder)
    content = bytearray((out / file).read_bytes())
    content[len(content) // 2] ^= 1
    (out / file).write_bytes(content)
    return out
