"""Conversions are the slow part: each is made once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Conversions = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def conversions(tmp_path_factory: pytest.TempPathFactory) -> Conversions:
    """``conversions(write, route)``: the path of that decoder's package; see decoder.py for the words."""
    made: dict[tuple[str, str], Path] = {}

    def convert(write: str, route: str) -> Path:
        from tests.mil import decoder

        if (write, route) not in made:
            path = tmp_path_factory.mktemp("decoder") / f"{write}_{route}.mlpackage"
            decoder.convert(decoder.Decoder(write, item=route == decoder.EXPORT), route, path)
            made[write, route] = path
        return made[write, route]

    return convert
