"""The shipped model with three of its apps, and what is asked of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.soak.questions import ROOT
from tests.soak.soaking import Script

LISTING = "soak.json"
"""In the folder of the bundles: app -> bundle folder."""
MODELS = ROOT / "models"
CONTEXT = 160
CHUNK = 32
APPS = {"sql": "sql-shared", "e2e": "e2e-shared", "gsm8k": "gsm8k-shared"}
PROMPTS = {
    "sql": (
        "CREATE TABLE cities (city, country, mayor)\nWho is the mayor of Lisbon ?",
        "CREATE TABLE cities (city, country, mayor)\nHow many cities are in Portugal ?",
        "CREATE TABLE albums (artist, album, year)\nWhich artist made Blue Horizon ?",
        "CREATE TABLE games (team, score, date)\nWhat was the score of the Lions ?",
        "CREATE TABLE staff (name, salary)\nWho earns more than 5000 ?",
        "CREATE TABLE t (a, b)\nWhat is the highest a when b is 3 ?",
    ),
    "e2e": (
        "name[The Eagle], eatType[coffee shop], food[Japanese]",
        "name[Blue Spice], priceRange[cheap], area[riverside]",
        "name[The Mill], eatType[pub], familyFriendly[yes]",
        "name[Cotto], food[Italian], customer rating[high]",
        "name[Zizzi], near[Burger King]",
        "name[Alimentum], area[city centre], familyFriendly[no]",
    ),
    "gsm8k": (
        "Tom has 3 apples and buys 4 more. How many has he?",
        "A book costs 12 dollars. How much do 5 books cost?",
        "Anna reads 10 pages a day. How many in a week?",
        "There are 20 birds and 8 fly away. How many stay?",
        "A car goes 60 miles an hour. How far in 3 hours?",
        "Ben shares 24 sweets among 6 friends. How many each?",
    ),
}


def script() -> Script:
    """Questions for APPS: CONTEXT is little, so that some prompts fill it and one does not fit."""
    full = {
        app: " ".join(["one two three"] * count)
        for app, count in {"sql": 46, "e2e": 47, "gsm8k": 45}.items()
    }
    return Script(PROMPTS, full, "one two three " * 400)


def export(folder: Path, one: bool) -> dict[str, Path]:
    """The bundle of each app: one with all of them, or one each."""
    from ssdevice.export.plan import ExportOptions, Quant
    from ssdevice.export.stages import export_bundle
    from ssdevice.tree import Tree

    groups = [tuple(APPS)] if one else [(app,) for app in APPS]
    folders = {}
    for apps in groups:
        options = ExportOptions(
            model=str(MODELS / "base-7m"),
            target="onnx",
            quant=Quant.INT8,
            out=folder / "-".join(apps),
            adapters=tuple((app, MODELS / "adapters" / APPS[app]) for app in apps),
            tree=Tree.of([[0], [1], [0, 0], [0, 0, 0]]),
            context=CONTEXT,
            chunk=CHUNK,
        )
        bundle = export_bundle(options, lambda *_: None)
        folders.update(dict.fromkeys(apps, bundle.folder))
    return folders


def main() -> None:
    """``python -m tests.soak.apps FOLDER one|each``: a process of its own, whose memory is not the
    runtime's.
    """
    place = Path(sys.argv[1])
    folders = {app: str(folder) for app, folder in export(place, sys.argv[2] == "one").items()}
    (place / LISTING).write_text(json.dumps(folders), "utf-8")


if __name__ == "__main__":
    main()
