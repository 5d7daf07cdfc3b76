"""The page joins prompt frames to the prompts that jinja2 renders."""

from __future__ import annotations

import json

from tests.apps.web_demo import host
from tests.swift import frames


def test_prompts_are_those_of_templates() -> None:
    cases = frames.record()["cases"]
    done = host.script("prompts.mjs", given=host.lines(cases))
    assert done.returncode == 0, done.stderr
    for case, line in zip(cases, done.stdout.removesuffix("\n").split("\n"), strict=True):
        assert json.loads(line) == case["text"], case["messages"]
