"""The page in headless Chromium, from the command that serves it to the tokens on the screen:
``make web-test``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ssdevice.bundle.folder import Bundle
from ssdevice.commands import web
from ssdevice.commands.web import HEADERS, Site, page
from ssdevice.serve.names import LOOPBACK
from tests.apps.web_demo import host, shipped
from tests.serve.serving import running

pytestmark = pytest.mark.slow  # exports the shipped model and starts a browser
SCREENSHOT = "screenshot.png"


@contextmanager
def serving(files: Site, headers: Mapping[str, str] = HEADERS) -> Iterator[str]:
    """The address of a server of these files while it runs."""
    with running(page(files, headers)) as port:
        yield f"http://{LOOPBACK}:{port}/"


def chromium() -> str:
    """The browser; without one the test is skipped."""
    found = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if found is None:
        pytest.skip("needs Chromium")
    return found


def visited(
    address: str, *requests: Mapping[str, Any], screenshot: Path | None = None
) -> dict[str, Any]:
    """What a visitor of the page sees, see ``browser.mjs``."""
    host.needs_packages("playwright-core")
    arguments = [chromium(), address, *([screenshot] if screenshot else [])]
    done = host.script("browser.mjs", *arguments, given=host.lines(requests))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert all(asked.startswith(address) for asked in found["requests"] + found["again"]), (
        "another origin"
    )
    return found


def site(bundle: Bundle) -> Site:
    host.needs_packages()
    return web.site(bundle)


def test_the_page_gives_the_tokens_of_a_session(tmp_path: Path) -> None:
    asked = [
        {"app": app, "prompt": shipped.prompts(app)[turn]}
        for turn in range(3)
        for app in shipped.APPS
    ]
    with serving(site(shipped.bundle())) as address:
        found = visited(address, *asked, screenshot=tmp_path / SCREENSHOT)
    assert found["about"].startswith("llama, 7 M parameters, INT8") and found["status"] == "Ready."
    assert not found["errors"]
    for request, seen in zip(asked, found["answers"], strict=True):
        with shipped.session(request["app"]) as session:
            ids = session.prompt_ids(request["prompt"])
            wanted = [
                token
                for run in session.runs(ids, max_tokens=128, mode="plain")
                for token in run.tokens
            ]
            text = session.last.text
        assert seen["tokens"] == {"plain": wanted, "speculative": wanted}
        assert seen["plain"] == seen["speculative"] == text
        assert seen["accepted"] > 0 and seen["status"] == "Both answers have the same tokens."
        assert all("tokens/s" in speed for speed in seen["speeds"])
    # What was checked once is kept: of the bundle, the second visit asks only for the manifest.
    assert [asked for asked in found["again"] if "/bundle/" in asked] == [
        f"{address}bundle/manifest.json"
    ]
    assert (tmp_path / SCREENSHOT).stat().st_size < 150_000


def test_a_seed_decides_what_the_page_samples() -> None:
    request = {"app": "sql", "prompt": shipped.prompts("sql")[0]}
    seeds = ("7", "1234567890123456789", "7")
    sampled = [{**request, "temperature": "1.5", "seed": seed} for seed in seeds]
    with serving(site(shipped.bundle())) as address:
        found = visited(address, request, *sampled)
    assert not found["errors"]
    assert all(seen["status"] == "Both answers have the same tokens." for seen in found["answers"])
    greedy, one, other, again = [seen["tokens"]["speculative"] for seen in found["answers"]]
    assert one == again and len({tuple(tokens) for tokens in (greedy, one, other)}) == 3


def test_a_stopped_answer_is_the_beginning_of_the_whole() -> None:
    request = {"app": "sql", "prompt": shipped.prompts("sql")[0]}
    with serving(site(shipped.bundle())) as address:
        stopped, whole = visited(address, {**request, "stop": True}, request)["answers"]
    # The stop is there before the first call ends: at most its token is shown.
    assert (
        stopped["tokens"] in ({}, {"plain": whole["tokens"]["plain"][:1]})
        and stopped["status"] == "Stopped."
    )
    assert whole["status"] == "Both answers have the same tokens."


def test_a_static_host_without_headers_runs_one_thread_and_refuses_damage(tmp_path: Path) -> None:
    web.write(site(shipped.bundle()), tmp_path / "site")
    prompt = shipped.prompts("sql")[0]
    written = tmp_path / "site"
    files = {
        file.relative_to(written).as_posix(): file for file in written.rglob("*") if file.is_file()
    }
    with serving(files, headers={}) as address:
        found = visited(address, {"app": "sql", "prompt": prompt})
        assert found["about"].endswith(", 1 thread")
        assert found["answers"][0]["status"] == "Both answers have the same tokens."
        weights = files["bundle/weights.bin"]
        content = bytearray(weights.read_bytes())
        content[1000] ^= 1
        weights.write_bytes(content)
        damaged = visited(address)  # a new browser, which keeps nothing of the first
    assert damaged["status"] == "weights.bin is damaged: its sha256 is not the one in manifest.json"
    assert "answers" in damaged and not damaged["answers"]


def test_int4_is_refused_in_one_line(tmp_path: Path) -> None:
    files = dict(site(shipped.bundle()))
    manifest = json.loads((shipped.bundle().folder / "manifest.json").read_text("utf-8"))
    files["bundle/manifest.json"] = tmp_path / "manifest.json"
    files["bundle/manifest.json"].write_text(json.dumps({**manifest, "precision": "int4"}), "utf-8")
    with serving(files) as address:
        found = visited(address)
    assert found["status"] == "INT4 has no fast kernel in browsers; export with --quant int8"
