"""Conversions are the slow part: each is made once a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.once import made_once

Conversions = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def conversions() -> Conversions:
    """``conversions(write, route)``: the path of that decoder's package; see decoder.py for the words."""

    def convert(write: str, route: str) -> Path:
        from tests.mil import decoder

        def make(out: Path) -> None:
            decoder.convert(decoder.Decoder(write, item=route == decoder.EXPORT), route, out)

        return made_once(f"mil/{write}_{route}.mlpackage", make)

    return convert
