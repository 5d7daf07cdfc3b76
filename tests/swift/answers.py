"""A bundle of two apps for Core ML, and what Python's session answers with it."""

from __future__ import annotations

import json
import shutil
from itertools import cycle, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ssdevice.bundle.folder import Bundle
from ssdevice.data import read_examples
from ssdevice.runtime import Session

MODELS = Path(__file__).resolve().parents[2] / "models"
CONTEXT = 192
CHUNK = 16
MAX_TOKENS = 24
NAMES = (
    "Blue Spice",
    "Clowns",
    "Cocum",
    "Cotto",
    "Giraffe",
    "Green Man",
    "Loch Fyne",
    "Strada",
    "The Eagle",
    "The Mill",
    "The Punter",
    "The Vaults",
    "Wildwood",
)
KINDS = ("coffee shop", "restaurant", "pub")
FOODS = ("English", "Italian", "Japanese", "Indian", "Fast food")
PRICES = ("cheap", "moderate", "more than £30", "less than £20")
AREAS = ("riverside", "city centre")
PROMPTS = {
    "sql": (
        "CREATE TABLE singer (name, age, country)\nHow many singers are older than 40?",
        "CREATE TABLE city (name, people, country)\n"
        "Which cities of Österreich have more than 100000 people?",
        *(
            example.prompt
            for example in read_examples([MODELS / "prompts" / "sql.jsonl"], limit=len(NAMES))
        ),
    ),
    "e2e": (
        "name[Alimentum], area[city centre], familyFriendly[no]",
        "name[Zizzi], eatType[pub], food[日本], customer rating[5 out of 5] 🙂",
        *(
            f"name[{name}], eatType[{kind}], food[{food}], priceRange[{price}], area[{area}]"
            for name, kind, food, price, area in zip(
                NAMES, cycle(KINDS), cycle(FOODS), cycle(PRICES), cycle(AREAS)
            )
        ),
    ),
    "base": ("List the names of all customers.",),
}
"""By app. The second ones have characters of several tokens."""
CHAT = (PROMPTS["sql"][0], "And how many are from Österreich?", "List their names.")


RECOMMENDED = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.05}
"""What the model's ``generation_config.json`` says of sampling, here."""


def export(out: Path) -> None:
    """Export the bundle, which takes minutes, unless ``out`` is one already.

    Its host may choose tokens.
    """
    if (out / "manifest.json").is_file() and Bundle.open(out).manifest.sampling is not None:
        return
    from ssdevice.export.plan import ExportOptions, Quant
    from ssdevice.export.stages import export_bundle

    with TemporaryDirectory() as folder:
        model = shutil.copytree(MODELS / "base-7m", Path(folder) / "base-7m")
        settings = model / "generation_config.json"
        settings.write_text(
            json.dumps(json.loads(settings.read_text("utf-8")) | RECOMMENDED), "utf-8"
        )
        options = ExportOptions(
            model=str(model),
            target="coreml",
            quant=Quant.INT8,
            out=out,
            adapters=tuple((app, MODELS / "adapters" / f"{app}-shared") for app in ("sql", "e2e")),
            context=CONTEXT,
            chunk=CHUNK,
            choose=True,
            overwrite=True,
        )
        export_bundle(options, lambda *_: None)


def answers(folder: Path) -> dict[str, Any]:
    """Every prompt by every app that has answers for it, in every mode: ids of the prompt, runs and
    text.

    Some are sampled as the model recommends, with a ``seed``. Then ``chat``, a conversation with
    the first app: messages, tokens of the answers and their texts.
    """
    found = []
    with Session.open(Bundle.open(folder)) as session:
        for app, prompts in PROMPTS.items():
            session.use(app)
            for prompt in prompts:
                for mode, seed in product(
                    ("plain",) if app == "base" else ("plain", "speculative"), (None, 7)
                ):
                    if seed is None or prompt in prompts[:2]:
                        found.append(_answer(session, prompt, mode, seed))
        session.use(next(iter(PROMPTS)))
        turns = []
        for message in CHAT:
            text = "".join(session.chat(message, max_tokens=MAX_TOKENS))
            turns.append({"message": message, "tokens": session.last.tokens, "text": text})
    return {"answers": found, "chat": turns, "max_tokens": MAX_TOKENS}


def _answer(session: Session, prompt: str, mode: str, seed: int | None) -> dict[str, Any]:
    ids = session.prompt_ids(prompt)
    sampling = None if seed is None else session.sampling(seed=seed)
    runs = list(session.runs(ids, max_tokens=MAX_TOKENS, mode=mode, sampling=sampling))
    return {
        "app": session.app,
        "prompt": prompt,
        "ids": ids,
        "mode": mode,
        "seed": seed,
        "max_tokens": MAX_TOKENS,
        "runs": [list(run.tokens) for run in runs],
        "text": session.last.text,
    }
