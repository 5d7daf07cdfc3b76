"""Layers of their own that draft, one token after the other, in the place of streams (EAGLE, 2401.15077; the states of
several layers together: EAGLE-3, 2503.01840).

They are layers like the base's, after its last one, and have cache rows as those have. A committed row reads the fused
states of its position. So its keys and values do not depend on the token chosen after it, which EAGLE's do: a tree's
rows are known when it is verified. Draft j of node t stands for the row of position t + j, as stream j does.
"""

from __future__ import annotations

import copy
from typing import cast

import torch
from torch import Tensor, nn

from ssdevice.model.backbone import Backbone

TAPS = 0.27, 0.63, 1.0
"""The shares of the base's layers after which its states are read: 8, 19 and 30 of 30."""


class DraftLayers(nn.Module):
    """``layers``, begun as copies of the base's last one, and a ``norm`` after them.

    ``after``: the numbers of base layers whose states are fused.
    """

    def __init__(self, backbone: Backbone, count: int) -> None:
        super().__init__()
        width = int(backbone.config.hidden_size)
        self.after = [max(1, round(backbone.num_layers * share)) for share in TAPS]
        self.norms = nn.ModuleList(copy.deepcopy(backbone.norm) for _ in TAPS)
        self.embed_norm, self.norm = copy.deepcopy(backbone.norm), copy.deepcopy(backbone.norm)
        self.fuse = nn.Linear(len(TAPS) * width, width, bias=False)
        self.embed = nn.Linear(width, width, bias=False)
        self.layers = nn.ModuleList(backbone.add_layer() for _ in range(count))
        with torch.no_grad():  # at first it is the state after the last layer, normed
            self.fuse.weight[:, :-width].zero_()
            self.fuse.weight[:, -width:].copy_(torch.eye(width))
            self.embed.weight.zero_()
        self.requires_grad_(True)

    def fused(self, states: Tensor) -> Tensor:
        """What a row reads, ``[B, R, D]``, of its states after the layers ``after``, ``[B, R, 3 D]``."""
        normed = [norm(h) for norm, h in zip(self.norms, states.chunk(len(TAPS), dim=-1), strict=True)]
        return cast(Tensor, self.fuse(torch.cat(normed, dim=-1)))

    def start(self, state: Tensor, chosen: Tensor) -> Tensor:
        """A draft's state before the layers: that of the row or draft before it, and its token's embedding."""
        return state + cast(Tensor, self.embed(self.embed_norm(chosen)))
