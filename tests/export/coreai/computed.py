"""What Core AI's runtime computes of a module; for tests that have found its packages."""

from __future__ import annotations

from pathlib import Path

import torch
from coreai.runtime import NDArray
from torch import Tensor, nn

from ssdevice.export.coreai.exporter import TorchConverter, get_decomp_table
from ssdevice.runtime.coreai.engine import OpenAsset


def computed(module: nn.Module, x: Tensor, folder: Path) -> Tensor:
    """The result of a module of one tensor, from an asset that is written below ``folder``."""
    program = torch.export.export(module, (x,)).run_decompositions(get_decomp_table())
    converter = TorchConverter().add_exported_program(
        program, input_names=["x"], output_names=["y"], state_names=[]
    )
    converter.to_coreai().save_asset(folder / "module.aimodel")
    asset = OpenAsset(folder / "module.aimodel")
    try:
        return torch.from_numpy(
            asset.call("main", {"x": NDArray(x.numpy())}, {})["y"].numpy().copy()
        )
    finally:
        asset.close()
