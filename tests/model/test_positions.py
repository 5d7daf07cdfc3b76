"""Position tables reach every row of every call."""

from __future__ import annotations

from hypothesis import given

from ssdevice.contract import Geometry
from ssdevice.model.loading import POSITION_MARGIN
from tests.core.test_contract import geometries


@given(geometries())
def test_every_row_has_a_position(g: Geometry) -> None:
    tree_rows = [
        g.context + depth + stream for depth in g.tree.depths for stream in range(g.gamma + 1)
    ]
    chunk_rows = [
        g.context + row + stream for row in range(g.chunk) for stream in range(g.gamma + 1)
    ]
    assert max(tree_rows + chunk_rows) < g.context + POSITION_MARGIN
