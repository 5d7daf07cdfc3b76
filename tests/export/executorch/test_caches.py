"""Lowered graphs are not remembered."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import fx

pytest.importorskip("executorch", reason="needs the executorch extra")

from executorch.exir.backend import backend_api, utils

from ssdevice.config import Mode, Schedule
from ssdevice.export.executorch.exporter import ExecutorchExporter
from ssdevice.export.executorch.speed import emptied_caches
from ssdevice.export.plan import Quant
from tests.export.executorch import programs


def test_graphs_that_were_compared_are_not_remembered() -> None:
    module = fx.symbolic_trace(torch.nn.Linear(2, 2))
    with emptied_caches():
        assert backend_api.is_identical_graph(module, module)
        assert utils.is_same_node.cache_info().currsize == 0
    backend_api.is_identical_graph(module, module)
    assert utils.is_same_node.cache_info().currsize > 0, "ExecuTorch no longer remembers them"


@pytest.mark.lowering
def test_an_export_leaves_no_graphs(tmp_path: Path) -> None:
    job = programs.job(Quant.INT8, Mode.LOSSLESS, Schedule.DEFERRED, tmp_path / "out")
    before = nodes()
    ExecutorchExporter().export(job, tmp_path)
    assert nodes() - before < 50  # ExecuTorch's passes begin with empty graphs


def nodes() -> int:
    gc.collect()
    return sum(type(one) is fx.Node for one in gc.get_objects())
