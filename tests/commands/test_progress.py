"""Progress in a log file: a line every few seconds that says where, how far and how long yet."""

from __future__ import annotations

import re
import time

import pytest

from ssdevice.commands import progress
from ssdevice.commands.progress import Progress


def test_lines_come_while_a_stage_is_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.02)
    monkeypatch.setattr(progress, "TICK_SECONDS", 0.01)
    with Progress(quiet=False) as shown:
        shown.report("export", 0, 100, "load the model")
        time.sleep(0.01)
        shown.report("export", 5, 100, "write the graphs, step")
        deadline = time.monotonic() + 20
        text = ""
        while text.count("\n") < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
            text += capsys.readouterr().err
    lines = [line for line in text.splitlines() if "load the model" not in line]
    assert len(lines) >= 2
    left = r"(about \d+ s left|longer than expected)"
    for line in lines:
        assert re.fullmatch(rf"export 5/100, \d+ s so far, {left}: write the graphs, step", line), (
            line
        )


def test_quiet_is_silent_and_a_short_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    for quiet in (True, False):
        with Progress(quiet) as shown:
            shown.report("bench", 1, 2)
    assert capsys.readouterr().err == ""


def test_the_pace_tells_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    shown = Progress(quiet=True)
    shown.report("export", 0, 100)
    assert shown.left() is None
    clock[0] = 100.0
    shown.report("export", 50, 100)
    assert shown.left() == 100
    clock[0] = 180.0
    shown.report("export", 90, 100)
    assert shown.left() == pytest.approx(20) and "about 20 s left" in shown.line()
    clock[0] = 400.0  # no 0 s left while work remains
    assert shown.line() == "export 90/100, 7 min so far, longer than expected"
    shown.report("export", 100, 100)
    assert "left" not in shown.line() and "longer" not in shown.line()
