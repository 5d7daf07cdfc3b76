"""Attention over several separate runs of key and value rows, as Hugging Face layers call it.

Past, tree and stream rows are never concatenated: the scores against each run are computed
separately and then joined, so the cache is read in place. Keys and values are lists of ``[batch,
kv_heads, rows, head_dim]``. A target may attend in another way: see ``ssdevice.model.operators``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "ssdevice"
MASKED = -1e9
"""Additive mask of an invisible row; see ``Operators.mask_value`` for half-precision targets."""

KeyValue = tuple[Tensor, Tensor]
Context = Sequence[Sequence[KeyValue]]
"""By layer the runs of rows before the new ones."""


@dataclass(frozen=True)
class Attending:
    """One layer's attention: ``query [B, heads, Q, hd]`` over the runs of ``keys`` and ``values``.

    ``mask``: additive, ``[B or 1, 1, Q, sum of run lengths]``. ``positions [B or 1, Q]``: of the
    query rows. ``softcap``: bound of a tanh over the scores.
    """

    query: Tensor
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    mask: Tensor
    positions: Tensor
    scale: float
    softcap: float | None


Attention = Callable[[Attending], Tensor]
"""Grouped-query attention; the result is ``[B, Q, heads, hd]``."""


class Rows:
    """The cache object that Hugging Face layers see.

    It keeps each layer's new rows and puts them after the past ones. ``past[i]``: runs of committed
    rows of layer i, each (keys, values). ``positions``: of the new rows. After the layers ran,
    ``new[i]`` has layer i's new keys and values, ``[batch, kv_heads, rows, head_dim]`` each.
    """

    is_compileable = False

    def __init__(self, past: Context, positions: Tensor, attention: Attention) -> None:
        self.past = past
        self.positions = positions
        self.attention = attention
        self.new: dict[int, KeyValue] = {}

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: object
    ) -> "tuple[Runs, list[Tensor]]":
        """Called by a layer's attention with its new rows, ``[B, kv_heads, rows, head_dim]`` each.

        Returns the runs of keys and of values, the new ones last, which ``_attend_rows`` receives.
        """
        self.new[layer] = (keys, values)
        all_keys = [run_keys for run_keys, _ in self.past[layer]]
        all_values = [run_values for _, run_values in self.past[layer]]
        return Runs(self, [*all_keys, keys]), [*all_values, values]


class Runs(list[Tensor]):
    """The runs of keys that pass through a layer's own code, with the ``Rows`` they came from."""

    def __init__(self, rows: Rows, keys: Sequence[Tensor]) -> None:
        super().__init__(keys)
        self.rows = rows


def attend(asked: Attending) -> Tensor:
    """The default Attention, ``[B, Q, heads, hd]``.

    Heads of a group share their keys as rows of one matrix product.
    """
    weights = _weights(asked)
    first, *others = asked.values
    if not others:
        out = torch.matmul(weights, first)
    else:
        end = first.shape[2]
        out = torch.matmul(weights[..., :end], first)
        for values in others:
            start = end
            end = start + values.shape[2]
            out = torch.add(out, torch.matmul(weights[..., start:end], values))
    return out.reshape(asked.query.shape).transpose(1, 2)


def attend_once(asked: Attending) -> Tensor:
    """An Attention, ``[B, Q, heads, hd]``, whose sum over all rows is rounded once.

    In half precision, separate sums over past and new rows are rounded separately. A drafted row,
    whose ancestors are new, would then differ from the same row in plain decoding, whose ancestors
    are past. So the values are concatenated.
    """
    weights = _weights(asked)
    values = asked.values
    joined = values[0]
    if len(values) > 1:
        joined = torch.cat(list(values), dim=2)
    return torch.matmul(weights, joined).reshape(asked.query.shape).transpose(1, 2)


def _weights(asked: Attending) -> Tensor:
    """Softmax of the scores, ``[B, kv_heads, group * Q, sum of run lengths]``."""
    keys = asked.keys
    softcap = asked.softcap
    batch, heads, rows, dim = asked.query.shape
    kv_heads = keys[0].shape[1]
    groups = heads // kv_heads
    q = (asked.query * asked.scale).reshape(batch, kv_heads, groups * rows, dim)
    parts = [torch.matmul(q, k.transpose(2, 3)) for k in keys]
    scores = parts[0]
    if len(parts) > 1:
        scores = torch.cat(parts, dim=-1)
    scores = scores.reshape(batch, kv_heads, groups, rows, -1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    weights = torch.softmax(scores + asked.mask[:, :, None], dim=-1).to(asked.query.dtype)
    return weights.reshape(batch, kv_heads, groups * rows, -1)


def _attend_rows(
    module: nn.Module,
    query: Tensor,
    keys: Runs,
    values: Sequence[Tensor],
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The function that Hugging Face layers call: it runs the ``Attention`` of their ``Rows``."""
    rows = keys.rows
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    asked = Attending(query, keys, values, attention_mask, rows.positions, scale, softcap)
    return rows.attention(asked), None  # None in place of the weights, which nobody asks for


AttentionInterface.register(NAME, _attend_rows)
