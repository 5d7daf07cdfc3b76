"""A bundle of two apps for Core ML, and what Python's session answers with it."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

from ssdevice.bundle.folder import Bundle
from ssdevice.data import read_examples
from ssdevice.runtime import Session

MODELS = Path(__file__).resolve().parents[2] / "models"
CONTEXT, CHUNK, MAX_TOKENS = 192, 16, 24
NAMES = (
    "Blue Spice", "Clowns", "Cocum", "Cotto", "Giraffe", "Green Man", "Loch Fyne", "Strada", "The Eagle", "The Mill",
    "The Punter", "The Vaults", "Wildwood",
)  # fmt: skip
KINDS = ("coffee shop", "restaurant", "pub")
FOODS = ("English", "Italian", "Japanese", "Indian", "Fast food")
PRICES = ("cheap", "moderate", "more than £30", "less than £20")
AREAS = ("riverside", "city centre")
PROMPTS = {
    "sql": (
        "CREATE TABLE singer (name, age, country)\nHow many singers are older than 40?",
        "CREATE TABLE city (name, people, country)\nWhich cities of Österreich have more than 100000 people?",
        *(example.prompt for example in read_examples([MODELS / "prompts" / "sql.jsonl"], limit=len(NAMES))),
    ),
    "e2e": (
        "name[Alimentum], area[city centre], familyFriendly[no]",
        "name[Zizzi], eatType[pub], food[日本], customer rating[5 out of 5] 🙂",
        *(
            f"name[{name}], eatType[{kind}], food[{food}], priceRange[{price}], area[{area}]"
            for name, kind, food, price, area in zip(NAMES, cycle(KINDS), cycle(FOODS), cycle(PRICES), cycle(AREAS))
        ),
    ),
    "base": ("List the names of all customers.",),
}
"""By app. The second ones have characters of several tokens."""
CHAT = (PROMPTS["sql"][0], "And how many are from Österreich?", "List their names.")


def export(out: Path) -> None:
    """Export the bundle, which takes minutes, unless ``out`` is one already."""
    if (out / "manifest.json").is_file():
        return
    from ssdevice.export.plan import ExportOptions, Quant
    from ssdevice.export.stages import export_bundle

    options = ExportOptions(
        model=str(MODELS / "base-7m"),
        target="coreml",
        quant=Quant.INT8,
        out=out,
        adapters=tuple((app, MODELS / "adapters" / f"{app}-shared") for app in ("sql", "e2e")),
        context=CONTEXT,
        chunk=CHUNK,
    )
    export_bundle(options, lambda *_: None)


def answers(folder: Path) -> dict[str, Any]:
    """Every prompt by every app that has answers for it, in every mode: ids of the prompt, runs and text.

    Then ``chat``, a conversation with the first app: messages, tokens of the answers and their texts.
    """
    found = []
    with Session.open(Bundle.open(folder)) as session:
        for app, prompts in PROMPTS.items():
            session.use(app)
            for prompt in prompts:
                ids = session.prompt_ids(prompt)
                for mode in ("plain",) if app == "base" else ("plain", "speculative"):
                    runs = list(session.runs(ids, max_tokens=MAX_TOKENS, mode=mode))
                    found.append(
                        {
                            "app": app,
                            "prompt": prompt,
                            "ids": ids,
                            "mode": mode,
                            "max_tokens": MAX_TOKENS,
                            "runs": [list(run.tokens) for run in runs],
                            "text": session.last.text,
                        }
                    )
        session.use(next(iter(PROMPTS)))
        turns = []
        for message in CHAT:
            text = "".join(session.chat(message, max_tokens=MAX_TOKENS))
            turns.append({"message": message, "tokens": session.last.tokens, "text": text})
    return {"answers": found, "chat": turns, "max_tokens": MAX_TOKENS}
