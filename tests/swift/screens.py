"""``python -m tests.swift.screens SCREENS.json PICTURE.svg`` draws the screens of apps/ios_demo
from recorded states.

``ScreenTests`` of the Swift package records what the view models hold; no device draws anything
here.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

WIDTH = 390
MARGIN = 20
GAP = 36
PADDING = 12
TABS = 52
"""Pixels: a screen is as wide as that of an iPhone, and as high as its contents need."""
BODY = 16
FOOTNOTE = 13
INK = "#000"
GREY = "#808085"
BLUE = "#007aff"
GREEN = "#34c759"
LINE = "#d1d1d6"
GROUND = "#f2f2f7"
WHITE = "#fff"
SANS = "-apple-system, system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
EM = {SANS: 0.53, MONO: 0.61}
"""How wide a character is, as a part of the size: lines are broken by it, as the reader's font is
not known.
"""
NOTES = (
    "Drawn by a program from states that the view models had on Linux. "
    "No device ran or drew these screens.",
    "Speeds, times and memory are those of an interpreter on a busy machine: "
    "they say nothing about a device.",
)


class Label(StrEnum):
    """Texts of the views in ``Sources/Demo``, with Python's fields in place of Swift's."""

    CHAT = "Chat"
    CONTINUES = "Go on with the conversation"
    SPECULATIVE = "Speculative"
    PLAIN = "Plain"
    SPEED = "{:.1f} tokens/s, {:.2f} per step"
    NOT_RUN = "not run"
    DEVICE = "Device"
    MEMORY = "{:.0f} MB at most, {}"
    BENCHMARK = "Benchmark"
    PROMPTS = "Prompts, with an empty line between them"
    ROUNDS = "{} rounds"
    TOKENS = "{} tokens at most"
    MEASURE = "Measure"
    MODES = "Modes"
    MODE = "{:.1f} tokens/s, {:.2f} per step, first after {:.0f} ms"
    SPEEDUP = "Speed-up"
    RATIO = "{:.2f}"
    COSTS = "Cost by width"
    COST = "{}, {} wide"
    MILLISECONDS = "{:.2f} ms"
    REPORT = "Report as JSON"


class Block(NamedTuple):
    """A part of a screen: elements with the origin in its upper left corner, and its height."""

    markup: str
    height: float


def draw(screens: Mapping[str, Any]) -> str:
    """Both screens side by side, as the text of an SVG file."""
    form = _form(screens["benchmark"])
    inside = max(form.height, _chat(screens["chat"], 0).height)
    chat = _chat(screens["chat"], inside)
    height = inside + 2 * MARGIN + TABS
    parts = [
        _moved(_screen(chat, height, WHITE, Label.CHAT), GAP, GAP),
        _moved(_screen(form, height, GROUND, Label.BENCHMARK), WIDTH + 2 * GAP, GAP),
        *(
            _text(GAP, GAP + height + 8 + 18 * at, note, FOOTNOTE, GREY)
            for at, note in enumerate(NOTES, 1)
        ),
    ]
    wide = 2 * WIDTH + 3 * GAP
    high = f"{height + 2 * GAP + 26:g}"
    size = f'width="{wide}" height="{high}" viewBox="0 0 {wide} {high}"'
    opened = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{SANS}" xml:space="preserve">'
    )
    title = f"<title>{escape(' '.join(['The screens of the demo.', *NOTES]))}</title>"
    return "\n".join([opened, title, _box(WHITE, "100%", "100%"), *parts, "</svg>", ""])


def _screen(contents: Block, height: float, ground: str, chosen: Label) -> str:
    parts = [_box(ground, WIDTH, height, 32, LINE), _moved(contents.markup, MARGIN, MARGIN)]
    parts.append(_moved(_box(LINE, WIDTH, 1), 0, height - TABS))
    for at, tab in enumerate((Label.CHAT, Label.BENCHMARK)):
        color = BLUE if tab is chosen else GREY
        parts.append(
            _text(WIDTH * (1 + 2 * at) / 4, height - TABS / 2 + 5, tab, FOOTNOTE, color, "middle")
        )
    return "\n".join(parts)


def _chat(state: Mapping[str, Any], height: float) -> Block:
    """The conversation, which takes the height that pickers and controls leave and is scrolled to
    its end.
    """
    # On a phone pickers show their values and no label.
    shown = [state["selected"] or "", *([state["app"]] if len(state["apps"]) > 1 else [])]
    pickers = _stacked([_lines([(f"{value} ▾", BLUE)]) for value in shown], PADDING)
    said = []
    for exchange in state["exchanges"]:
        answer = [
            (piece["text"], GREEN if piece["accepted"] else INK) for piece in exchange["pieces"]
        ]
        said += [_lines([(exchange["prompt"], GREY)]), _lines(answer, font=MONO)]
    talk = _stacked(said, 8)
    controls = _controls(state)
    free = height - pickers.height - talk.height - controls.height - 2 * PADDING
    return _stacked([_stacked([pickers, Block("", max(free, 0))]), talk, controls], PADDING)


def _controls(state: Mapping[str, Any]) -> Block:
    on = state["continues"]
    right = WIDTH - 2 * MARGIN
    switch = _box(GREEN if on else LINE, 51, 31, 15) + _moved(
        _box(WHITE, 27, 27, 13), 22 if on else 2, 2
    )
    toggle = _text(0, 21, Label.CONTINUES) + _moved(switch, right - 51, 0)
    prompt = _lines([(state["prompt"], INK)], right - 2 * PADDING)
    high = min(max(prompt.height + 2 * PADDING, 60), 120)
    editor = _box(WHITE, right, high, 0, LINE) + _moved(prompt.markup, PADDING, PADDING)
    buttons = _box(BLUE, 120, 34, 8) + _text(
        60, 22, Label.SPECULATIVE, color=WHITE, anchor="middle"
    )
    buttons += _moved(
        _box(GROUND, 72, 34, 8) + _text(36, 22, Label.PLAIN, color=BLUE, anchor="middle"), 132, 0
    )
    rows = []
    for label, rate in (
        (Label.SPECULATIVE, state.get("speculative")),
        (Label.PLAIN, state.get("plain")),
    ):
        speed = (
            Label.SPEED.format(rate["tokens_per_second"], rate["tokens_per_step"])
            if rate
            else Label.NOT_RUN
        )
        rows.append(_labeled(label, speed, right, FOOTNOTE))
    memory = Label.MEMORY.format(state["megabytes"], state["thermal_state"])
    rows += [_labeled(Label.DEVICE, memory, right, FOOTNOTE), *_status(state, FOOTNOTE)]
    divider = Block(_box(LINE, right, 1), 1)
    return _stacked(
        [Block(toggle, 31), Block(editor, high), Block(buttons, 34), divider, *rows], PADDING
    )


def _form(state: Mapping[str, Any]) -> Block:
    wide = WIDTH - 2 * MARGIN - 2 * PADDING
    steppers = [
        _stepper(Label.ROUNDS.format(state["rounds"])),
        _stepper(Label.TOKENS.format(state["max_tokens"])),
    ]
    sections = [
        _section(Label.PROMPTS, [_lines([(state["prompts"], INK)], wide), *steppers]),
        _section("", [_lines([(Label.MEASURE, BLUE)]), *_status(state, BODY)]),
    ]
    if state["rows"]:
        values = []
        for row in state["rows"]:
            numbers = (row["tokens_per_second"], row["tokens_per_step"], row["first_token_ms"])
            values.append((row["mode"], Label.MODE.format(*numbers)))
        if state.get("speedup") is not None:
            values.append((Label.SPEEDUP, Label.RATIO.format(state["speedup"])))
        sections.append(_section(Label.MODES, [_labeled(*pair, wide) for pair in values]))
        costs = [
            (
                Label.COST.format(cost["function"], cost["width"]),
                Label.MILLISECONDS.format(cost["milliseconds"]),
            )
            for cost in state["costs"]
        ]
        sections.append(_section(Label.COSTS, [_labeled(*pair, wide) for pair in costs]))
        if state.get("file"):
            sections.append(_section("", [_lines([(Label.REPORT, BLUE)])]))
    return _stacked(sections, 16)


def _status(state: Mapping[str, Any], size: float) -> list[Block]:
    return [_lines([(state["status"], GREY)], size=size)] if state["status"] else []


def _section(header: str, rows: Sequence[Block]) -> Block:
    """Rows on a white card with lines between them, below a header."""
    wide = WIDTH - 2 * MARGIN
    card = _stacked(rows, 2 * PADDING)
    lines = ""
    y = 0.0
    for row in rows[:-1]:
        y += row.height + 2 * PADDING
        lines += _moved(_box(LINE, wide - PADDING, 1), PADDING, y)
    high = card.height + 2 * PADDING
    drawn = Block(_box(WHITE, wide, high, 10) + lines + _moved(card.markup, PADDING, PADDING), high)
    above = (
        [Block(_moved(_lines([(header, GREY)], size=FOOTNOTE).markup, PADDING, 0), 17)]
        if header
        else []
    )
    return _stacked([*above, drawn], 6)


def _stepper(text: str) -> Block:
    buttons = _box(GROUND, 94, 32, 8) + _text(24, 22, "−", anchor="middle")
    buttons += _moved(_box(LINE, 1, 18), 47, 7) + _text(70, 22, "+", anchor="middle")
    return Block(
        _text(0, 16, text) + _moved(buttons, WIDTH - 2 * MARGIN - 2 * PADDING - 94, -6), 20
    )


def _labeled(label: str, value: str, width: float, size: float = BODY) -> Block:
    """A label on the left and a value on the right, in several lines if it is long."""
    left = width - (len(label) + 2) * EM[SANS] * size
    lines = [match[0].rstrip() for match in _broken(value, left / size / EM[SANS])]
    texts = [
        _text(width, (at + 0.8) * 1.25 * size, line, size, GREY, "end")
        for at, line in enumerate(lines)
    ]
    return Block(_text(0, size, label, size) + "".join(texts), 1.25 * size * len(lines))


def _lines(
    pieces: Sequence[tuple[str, str]],
    width: float = WIDTH - 2 * MARGIN,
    size: float = BODY,
    font: str = SANS,
) -> Block:
    """Texts and their colours, one behind the other, in lines of a width."""
    colors = [color for text, color in pieces for _ in text]
    rows: list[str] = []
    for match in _broken("".join(text for text, _ in pieces), width / size / EM[font]):
        spans = ""
        for color, places in groupby(range(*match.span()), colors.__getitem__):
            written = "".join(match.string[at] for at in places)
            spans += f'<tspan fill="{color}">{escape(written)}</tspan>'
        y = (len(rows) + 0.8) * 1.25 * size
        rows.append(f'<text y="{y:g}" font-size="{size:g}" font-family="{font}">{spans}</text>')
    return Block("\n".join(rows), 1.25 * size * len(rows))


def _broken(text: str, columns: float) -> Iterable[re.Match[str]]:
    """Lines of at most so many characters, broken at spaces if there are any.

    Empty lines are kept.
    """
    most = max(int(columns), 1)
    return re.finditer(rf"[^\n]{{1,{most}}}(?: |$|(?=\n))|[^\n]{{{most}}}|(?<=\n)(?=\n)", text)


def _stacked(blocks: Iterable[Block], gap: float = 0) -> Block:
    parts = []
    y = 0.0
    for block in blocks:
        parts.append(_moved(block.markup, 0, y))
        y += block.height + gap
    return Block("\n".join(parts), max(y - gap, 0))


def _moved(markup: str, x: float, y: float) -> str:
    return f'<g transform="translate({x:g} {y:g})">{markup}</g>' if markup else ""


def _box(
    fill: str, width: float | str, height: float | str, corner: float = 0, stroke: str = "none"
) -> str:
    return (
        f'<rect width="{width}" height="{height}" rx="{corner}" fill="{fill}" stroke="{stroke}"/>'
    )


def _text(
    x: float, y: float, text: str, size: float = BODY, color: str = INK, anchor: str = "start"
) -> str:
    place = f'x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{color}" text-anchor="{anchor}"'
    return f"<text {place}>{escape(text)}</text>"


if __name__ == "__main__":
    states, picture = map(Path, sys.argv[1:])
    picture.write_text(draw(json.loads(states.read_text("utf-8"))), "utf-8")
