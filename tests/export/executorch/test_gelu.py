"""Both forms of GELU keep their values in a program: their difference is far above what rounding
explains.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("executorch")

from executorch.runtime import Runtime
from torch import nn

from ssdevice.export.executorch.lowering import partitioner, to_edge


@pytest.mark.lowering
@pytest.mark.parametrize("form", ["none", "tanh"])
def test_a_gelu_computes_what_torch_does(form: str, tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(16, 64), nn.GELU(form), nn.Linear(64, 16)).eval()
    rows = torch.randn(3, 16) * 3
    file = tmp_path / "model.pte"
    with torch.no_grad():
        expected = module(rows)
        program = to_edge(
            {"forward": torch.export.export(module, (rows,))}, partitioner(), {}
        ).to_executorch()
    file.write_bytes(program.buffer)
    method = Runtime.get().load_program(file).load_method("forward")
    assert method is not None
    (found,) = method.execute([rows])
    assert (found - expected).abs().max() < 3e-6
