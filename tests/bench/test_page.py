"""The page of a measurement: well-formed, whole without a network, and frank about losses."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ssdevice.bench.machine import Load
from ssdevice.bench.report import TITLES, as_json, page, write_page
from ssdevice.bench.runner import BenchOptions, BenchResult, measure
from ssdevice.data import Example
from ssdevice.tree import Tree
from tests.runtime.scripted import make_session

HOSTILE = '<script src="//evil">&</script>'
VOID = {"meta"}
COMMAND = ("ssdevice", "bench", f"my bundle {HOSTILE}", "--data", "dev.jsonl")


class Checker(HTMLParser):
    """Collects tags and text; raises AssertionError for an element that is not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    session = make_session(Tree.chain(3), oracle=0.5)
    options = BenchOptions(rounds=2, max_tokens=17)
    measured = measure(
        session, [Example(p, "x") for p in ("one", "two", "three")], options, lambda *_: None
    )
    result = BenchResult(
        measured.examples, measured.modes, measured.acceptance, Load(0, (0, 0, 0), (0, 0, 0)), 0
    )
    setting = {
        "bundle": f"bundles/{HOSTILE}",
        "app": HOSTILE,
        "target": "onnx",
        "precision": "int4",
        "schedule": "deferred",
        "mode": "shared",
        "parameters": 135_000_000,
        "threads": 2,
        "kernels": True,
        "data": "dev.jsonl",
        "app_bytes": 2_500_000,
        "model_mb": 103.0,
        "versions": {"onnxruntime": "1.31.1"},
        "sampling": None,
    }
    memory = {name: {"resident_mb": 209.0, "peak_rss_mb": 333.0} for name in result.modes}
    return as_json(setting, session.engine.geometry, options, result, {}, memory)


def test_it_is_well_formed_and_refers_to_nothing_outside(report: dict[str, Any]) -> None:
    text = page(report, COMMAND)
    found = Checker(text)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in found.tags}
    assert not {"src", "href", "xlink:href", "data"} & {
        name for _, attributes in found.tags for name in attributes
    }
    assert not any(words in text for words in ("url(", "@import", "http:", "https:"))
    assert HOSTILE in found.words and HOSTILE not in text


def test_every_arm_has_a_row_and_a_dot_for_each_prompt(report: dict[str, Any]) -> None:
    found = Checker(page(report, COMMAND))
    for name, arm in report["arms"].items():
        assert found.words.count(TITLES[name]) >= 2 + len(arm["prompt_tokens_per_second"])
        assert f"{arm['tokens_per_second']:.1f}" in found.words
    speculative = report["arms"]["speculative"]["accepted_histogram"]
    assert sum(tag == "rect" for tag, _ in found.tags) == len(speculative)
    for words in (
        "209",
        "103.0",
        "2.5 MB",
        "onnxruntime 1.31.1",
        "--data dev.jsonl",
        "γ = 3",
        report["machine"]["cpu"],
    ):
        assert words in found.words


def test_losses_are_shown_as_losses(report: dict[str, Any]) -> None:
    lost: dict[str, Any] = json.loads(json.dumps(report))
    lost |= {
        "valid": False,
        "speedup": 0.7,
        "speedup_interval": {"estimate": 0.7, "low": 0.6, "high": 0.8},
    }
    lost |= {"equal": False, "differing_prompts": {"speculative": [1]}, "baseline": "plain"}
    for name, speed in (("plain", 100.0), ("speculative", 70.0)):
        lost["arms"][name] |= {
            "tokens_per_second": speed,
            "prompt_tokens_per_second": [speed, None, speed],
        }
    text = page(lost, COMMAND)
    words = Checker(text).words
    assert (
        '<div class="bad"><b>0.70x</b>' in text and '<tr class="bad"><td>speculative</td>' in text
    )
    assert "speculative is slower than the fastest plain one on 2 of 3 prompts" in words
    assert (
        "speculative gave other tokens on 1 prompt; the first is prompt 2" in words
        and "Not valid" in words
    )


def test_other_engines(report: dict[str, Any]) -> None:
    arm = report["arms"]["plain"] | {"version": "llama.cpp 1", "disk_mb": 98.0}
    common = {
        name: report[name]
        for name in ("prompts", "skipped_prompts", "data", "valid", "machine", "ssdevice")
    }
    common |= {
        name: report[name] for name in ("threads", "rounds", "max_tokens", "context", "sampling")
    }
    peers = common | {
        "model": "smol",
        "arms": {HOSTILE: arm},
        "baseline": HOSTILE,
        "skipped": {"hf": "gone"},
    }
    words = Checker(page(peers, COMMAND)).words
    assert HOSTILE in words and "hf was left out: gone" in words and "llama.cpp 1" in words


def test_the_numbers_lie_beside_the_page(report: dict[str, Any], tmp_path: Path) -> None:
    write_page(report, tmp_path / "out", COMMAND)
    assert json.loads((tmp_path / "out" / "report.json").read_text("utf-8")) == json.loads(
        json.dumps(report)
    )
    assert (tmp_path / "out" / "index.html").read_text("utf-8") == page(report, COMMAND)
