"""The step and prefill modules with the cache as state of the graph: the internal form of the
contract.

A target chooses how its cache is stored and written, so both are parameters. ``stacked``: one
tensor ``[layers, kv_heads, capacity, head_dim]`` each for keys and values, as in the contract.
Otherwise both are split into one tensor ``[kv_heads, capacity, head_dim]`` per layer, named
``keys.0``, ``values.0``, ``keys.1``, ..: a graph that takes whole tensors then reads its cache in
place. Attention runs over the whole capacity; the masks of the step hide the rows from ``length``
on, which may hold any finite values.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ssdevice.contract import KEYS, VALUES, FunctionSpec, Geometry
from ssdevice.export.forms import FunctionModule, call
from ssdevice.model.attention import KeyValue
from ssdevice.model.step import DraftModule

Write = Callable[[Tensor, Tensor, Tensor], None]
"""``write(state [.., capacity, hd], rows [.., n, hd], length [1])``: put the rows at ``length`` of
the last but one dimension, in place.
"""


def write_by_index(state: Tensor, rows: Tensor, length: Tensor) -> None:
    """A Write at n explicit positions.

    An index beyond the capacity is an error on targets that check indices.
    """
    at = length + torch.arange(rows.shape[-2], dtype=torch.int32)
    every: list[Tensor | None] = [None] * (state.dim() - 2)
    torch.ops.aten.index_put_(state, [*every, at], rows)


class LayerStates(nn.Module):
    """One state tensor ``[kv_heads, capacity, head_dim]`` per layer, named by its number."""

    def __init__(self, geometry: Geometry, dtype: torch.dtype) -> None:
        super().__init__()
        for layer in range(geometry.layers):
            self.register_buffer(str(layer), torch.zeros(state_shape(geometry)[1:], dtype=dtype))

    def __getitem__(self, layer: int) -> Tensor:
        return self.get_buffer(str(layer))


class InternalCacheForm(nn.Module):
    """One function of the contract, with inputs and outputs in the contract's order and the cache
    in buffers.

    ``dtype``: that of the state; rows are computed in float32. ``write``, ``stacked``: see the
    module. ``logits``: ``step`` and ``step_plain`` also return their logits ``[T, V]`` as a last
    output.
    """

    keys: Tensor | LayerStates
    values: Tensor | LayerStates

    def __init__(
        self,
        name: str,
        module: FunctionModule,
        geometry: Geometry,
        *,
        dtype: torch.dtype = torch.float32,
        write: Write = write_by_index,
        stacked: bool = True,
        logits: bool = False,
    ) -> None:
        super().__init__()
        self.name = name
        self.module = module
        self.geometry = geometry
        self.dtype = dtype
        self.write = write
        self.stacked = stacked
        self.logits = logits
        for state in (KEYS, VALUES):
            if stacked:
                self.register_buffer(state, torch.zeros(state_shape(geometry), dtype=dtype))
            else:
                self.add_module(state, LayerStates(geometry, dtype))

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """From the function's inputs to its outputs; the new rows are written at ``length`` after
        all reads.
        """
        module = self.module
        past = self.past()
        if isinstance(module, DraftModule):
            return (self.draft(module, past, tensors),)
        outputs, rows = call(self.name, module, tensors, past, self.logits)
        self.commit(rows, tensors[-1])
        # Without streams there are no drafts, and targets do not take tensors without elements.
        return tuple(one for one in outputs if one.shape[0])

    def draft(self, module: DraftModule, past: list[KeyValue], tensors: Sequence[Tensor]) -> Tensor:
        """Draft after a verified ``path [A]`` and move its ``count [1]`` rows to the front;
        ``length`` counts them.
        """
        path, count, token, state, length = tensors
        start = length - count
        rows = self.rows_at(start + path)
        drafts = module.model.draft_after(
            state[None], token, start, count - 1, past, rows, module.k
        )
        self.commit(rows, start)
        return drafts

    def past(self) -> list[KeyValue]:
        """Per layer (keys, values) ``[1, kv_heads, capacity, head_dim]`` in float32."""
        return self._each(lambda state: state)

    def rows_at(self, at: Tensor) -> list[KeyValue]:
        """Per layer (keys, values) ``[1, kv_heads, n, head_dim]`` in float32 of the positions ``at
        [n]``.
        """
        return self._each(lambda state: state.index_select(1, at))

    def _each(self, view: Callable[[Tensor], Tensor]) -> list[KeyValue]:
        states = [(self.keys[i], self.values[i]) for i in range(self.geometry.layers)]
        return [
            (self._float(view(keys)[None]), self._float(view(values)[None]))
            for keys, values in states
        ]

    def commit(self, rows: Sequence[KeyValue], length: Tensor) -> None:
        """Write the new rows ``[1, kv_heads, n, head_dim]`` of every layer."""
        for state, part in ((self.keys, 0), (self.values, 1)):
            if isinstance(state, LayerStates):
                for layer, pair in enumerate(rows):
                    self.write(state[layer], pair[part][0].to(self.dtype), length)
            else:
                self.write(state, torch.cat([pair[part] for pair in rows]).to(self.dtype), length)

    def _float(self, rows: Tensor) -> Tensor:
        return rows if self.dtype is torch.float32 else rows.float()


def state_shape(geometry: Geometry) -> tuple[int, int, int, int]:
    """``[layers, kv_heads, capacity, head_dim]``, the contract's shape of ``keys`` and of
    ``values``.
    """
    return geometry.layers, geometry.kv_heads, geometry.capacity, geometry.head_dim


def example_inputs(spec: FunctionSpec) -> tuple[Tensor, ...]:
    """Inputs to trace a function with."""
    inputs = []
    for one in spec.inputs:
        shape = [int(size) for size in one.shape]
        inputs.append(torch.ones(shape, dtype=getattr(torch, one.dtype)))
    return tuple(inputs)
