"""Lowering in less time: work that ExecuTorch 1.4 does for other models than these is left out.

A pass of the lowering interprets every operator of a graph, at about a millisecond each, whether it changes anything or
not. The product is the same program; only the time to make it differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.fx.traceback
from torch.fx import Node

# Passes of the XNNPACK backend for what a step never holds: convolutions, batch norms, PReLU, resized images, fused
# attention and operators with several results.
NEEDLESS = (
    "ConvertToUpsampleBilinear2d",
    "ConvertToSDPAPass",
    "ConstPropPass",
    "FuseBatchNormPass",
    "DecomposeBatchNorm",
    "RemoveGetItemPass",
    "InsertPadQDQPass",
    "Conv1dUnsqueezePass",
    "PReLUReshapePass",
    "ChannelsLastTaggedReshapePass",
)


class Origin(torch.fx.traceback.NodeSource):
    """Where a node comes from, without the history of that node: it is copied at every pass, deeper each time."""

    def __init__(self, node: Node | None, pass_name: str = "", action: Any = None) -> None:
        super().__init__(None, pass_name, action)
        if node is not None:
            self.node_info = self.NodeInfo(node.name, str(node.target), id(node.graph))


@contextmanager
def faster() -> Iterator[None]:
    """Within this context graphs are lowered without the work described above."""
    from executorch.backends.xnnpack import xnnpack_preprocess
    from executorch.backends.xnnpack.partition.config import xnnpack_config

    manager: Any = xnnpack_preprocess.XNNPACKPassManager

    def needed(program: Any, passes: Any = None) -> Any:
        made = manager(program, passes=passes)
        made.passes = [one for one in made.passes if one.__name__ not in NEEDLESS]
        return made

    with (
        # Sizes known only when a call runs are refused for fear of empty tensors, which XNNPACK has none of. Here the
        # only such size is that of the visible cache, at least one row.
        patch.object(xnnpack_config, "has_free_unbacked_symbols", lambda _: False),
        patch.object(xnnpack_preprocess, "XNNPACKPassManager", needed),
        patch.object(torch.fx.traceback, "NodeSource", Origin),
    ):
        yield
