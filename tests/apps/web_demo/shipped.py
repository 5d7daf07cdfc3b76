"""The shipped 7 M model with two apps, as a bundle and as answers of ``Session``."""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from pathlib import Path

from ssdevice.bundle.folder import Bundle
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.session import Session
from tests.once import made_once

MODELS = Path(__file__).resolve().parents[3] / "models"
APPS = {"sql": "sql-shared", "e2e": "e2e-shared"}


@cache
def bundle() -> Bundle:
    """Both apps in INT8; adapters stand apart, so apps are switched in place.

    The host may choose tokens.
    """

    def export(out: Path) -> None:
        from ssdevice.export.plan import ExportOptions, Quant
        from ssdevice.export.stages import export_bundle

        adapters = tuple((name, MODELS / "adapters" / folder) for name, folder in APPS.items())
        options = ExportOptions(
            model=str(MODELS / "base-7m"),
            target="onnx",
            quant=Quant.INT8,
            out=out,
            adapters=adapters,
            choose=True,
        )
        export_bundle(options, lambda *_: None)

    return Bundle.open(made_once("web/shipped", export))


def prompts(app: str) -> list[str]:
    """Thirty prompts of the kind that an app was trained for; the base has those of ``sql``."""
    if app == "e2e":
        parts = product(
            ("Aromi", "The Eagle", "Zizzi"),
            ("Italian", "English"),
            ("cheap", "high"),
            ("yes", "no", None),
        )
        texts = [
            f"name[{name}], food[{food}], priceRange[{price}]"
            + (f", familyFriendly[{family}]" if family else "")
            for name, food, price, family in parts
        ]
        return texts[:30]
    files = [MODELS / "prompts" / name for name in ("sql.jsonl", "general.jsonl")]
    rows = [row for file in files for row in file.read_text("utf-8").splitlines()]
    return [json.loads(row)["prompt"] for row in rows[:30]]


def session(app: str) -> Session:
    return Session.open(bundle(), app=app, options=EngineOptions(threads=1, kernels=False))
