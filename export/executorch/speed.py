"""Faster lowering: skips work that ExecuTorch 1.4 does for other kinds of models.

A pass of the lowering interprets every operator of a graph, at about a millisecond each, whether or not it changes
anything. The resulting program is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.fx.traceback
from torch.fx import Node

# Passes of the XNNPACK backend for operators that a step never has: convolutions, batch norms, PReLU, resized images,
# fused attention and operators with several results.
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
    """The origin of a node without its history, which every pass would copy and nest more deeply."""

    def __init__(self, node: Node | None, pass_name: str = "", action: Any = None) -> None:
        super().__init__(None, pass_name, action)
        if node is not None:
            self.node_info = self.NodeInfo(node.name, str(node.target), id(node.graph))


@contextmanager
def faster() -> Iterator[None]:
    """In this context graphs are lowered without the work described above."""
    from executorch.backends.xnnpack import xnnpack_preprocess
    from executorch.backends.xnnpack.partition.config import xnnpack_config

    manager: Any = xnnpack_preprocess.XNNPACKPassManager

    def needed(program: Any, passes: Any = None) -> Any:
        made = manager(program, passes=passes)
        made.passes = [one for one in made.passes if one.__name__ not in NEEDLESS]
        return made

    with (
        # XNNPACK refuses run-time sizes, because it does not support empty tensors. Here the only such size is that of
        # the visible cache, which has at least one row.
        patch.object(xnnpack_config, "has_free_unbacked_symbols", lambda _: False),
        patch.object(xnnpack_preprocess, "XNNPACKPassManager", needed),
        patch.object(torch.fx.traceback, "NodeSource", Origin),
    ):
        yield
