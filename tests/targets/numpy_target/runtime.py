"""The runtime side: the contract's functions in NumPy, over a cache that a conversation keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ssdevice.bundle.folder import Bundle
from ssdevice.contract import (
    CHUNK,
    COUNT,
    DRAFTS,
    LENGTH,
    NEXT_DRAFTS,
    NEXT_ROOT,
    PLAIN,
    PREFILL,
    ROOT,
    STEP,
    TOKENS,
    VALID,
    Geometry,
)
from ssdevice.runtime.engine import Cache, Engine, EngineOptions, Inputs, Outputs
from ssdevice.runtime.target import RuntimeTarget

Array = np.ndarray[Any, Any]


class Llama:
    """A llama's weights by name, and its layers on rows ``h [R, hidden]`` at ``positions [R]``."""

    def __init__(self, file: Path, geometry: Geometry) -> None:
        self.w = dict(np.load(file))
        self.geometry = geometry

    def norm(self, h: Array, weight: str) -> Array:
        return (
            h / np.sqrt(np.square(h).mean(-1, keepdims=True) + self.w["epsilon"]) * self.w[weight]
        )

    def heads(self, x: Array, weight: str, positions: Array | None = None) -> Array:
        """``[heads, R, head_dim]``, turned by its position where there is one."""
        x = (x @ self.w[weight].T).reshape(len(x), -1, self.geometry.head_dim).transpose(1, 0, 2)
        if positions is None:
            return x
        first, second = np.split(x, 2, axis=-1)
        return (
            x * self.w["cos"][positions]
            + np.concatenate([-second, first], -1) * self.w["sin"][positions]
        )

    def run(
        self, layers: range, h: Array, positions: Array, past: Array, seen: Array
    ) -> tuple[Array, Array]:
        """Hidden states after the layers, and their new rows ``[layers, 2, kv_heads, R,
        head_dim]``.

        ``past [layers, 2, kv_heads, P, head_dim]``: rows that all see; ``seen [R, R]``: new rows
        that each sees.
        """
        new = []
        for i in layers:
            x = self.norm(h, f"{i}.input_layernorm")
            q, k = (self.heads(x, f"{i}.{name}", positions) for name in ("q_proj", "k_proj"))
            new.append(np.stack([k, self.heads(x, f"{i}.v_proj")]))
            keys, values = np.concatenate([past[i], new[-1]], axis=2)
            q = q.reshape(len(keys), -1, *q.shape[1:])  # query heads by key head
            scores = q @ keys[:, None].transpose(0, 1, 3, 2) / np.sqrt(self.geometry.head_dim)
            scores[..., past.shape[3] :][..., ~seen] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = weights / weights.sum(-1, keepdims=True) @ values[:, None]
            h = (
                h
                + mixed.reshape(-1, *mixed.shape[2:]).transpose(1, 0, 2).reshape(len(h), -1)
                @ self.w[f"{i}.o_proj"].T
            )
            x = self.norm(h, f"{i}.post_attention_layernorm")
            gate = x @ self.w[f"{i}.gate_proj"].T
            h = (
                h
                + (gate / (1 + np.exp(-gate)) * (x @ self.w[f"{i}.up_proj"].T))
                @ self.w[f"{i}.down_proj"].T
            )
        return h, np.stack(new)

    def logits(self, h: Array) -> Array:
        return self.norm(h, "norm") @ self.w["head"].T

    def call(self, function: str, given: Mapping[str, Array], cache: Array) -> dict[str, Array]:
        """A function of the contract; accepted rows go to ``cache [layers, 2, kv_heads, capacity,
        head_dim]``.
        """
        tree = self.geometry.tree
        length = int(given[LENGTH][0])
        first = int(self.w["first_msa"])
        every = self.geometry.layers
        if function == STEP:
            tokens = np.concatenate([given[ROOT], given[DRAFTS].reshape(-1)])[
                list(tree.draft_indices(self.geometry.k))
            ]
            positions = length + np.array(tree.depths)
            seen = np.array(tree.ancestors, bool)
        else:
            tokens = given[CHUNK][: given[VALID][0]] if function == PREFILL else given[ROOT]
            positions = length + np.arange(len(tokens))
            seen = np.tri(len(tokens), dtype=bool)
        past = cache[:, :, :, :length]
        middle, below = self.run(range(first), self.w["embed"][tokens], positions, past, seen)
        top, above = self.run(range(first, every), middle, positions, past, seen)
        predicted = self.logits(top).argmax(-1).astype(np.int32)
        path = (
            [len(tokens) - 1]
            if function != STEP
            else list(tree.path_table[self.end(tokens, predicted)])
        )
        rows = range(len(tokens)) if function != STEP else list(dict.fromkeys(path))
        cache[:, :, :, length : length + len(rows)] = np.concatenate([below, above])[:, :, :, rows]
        if function == PLAIN:
            return {TOKENS: predicted}
        drafts = self.drafts(middle[path[-1]], length + len(rows), cache)
        if function == PREFILL:
            return {NEXT_ROOT: predicted[-1:], NEXT_DRAFTS: drafts}
        return {
            TOKENS: predicted[path],
            COUNT: np.array([len(rows)], np.int32),
            NEXT_DRAFTS: drafts,
        }

    def end(self, tokens: Array, predicted: Array) -> int:
        """The deepest node whose whole path was predicted, the first of equals."""
        tree = self.geometry.tree
        stands = [True]
        for node in range(1, self.geometry.tree.size):
            stands.append(
                stands[tree.parents[node]] and tokens[node] == predicted[tree.parents[node]]
            )
        return max(range(tree.size), key=lambda node: (stands[node], tree.depths[node], -node))

    def drafts(self, h: Array, length: int, cache: Array) -> Array:
        """Candidates ``[γ, k]`` of the streams of the last committed token, in state ``h`` below
        the MSA layers.
        """
        gamma = self.geometry.gamma
        k = self.geometry.k
        if not gamma:
            return np.zeros((0, k), np.int32)
        layers = range(int(self.w["first_msa"]), self.geometry.layers)
        start = h + self.w["identifiers"]
        own = np.tri(gamma, dtype=bool)
        s, _ = self.run(layers, start, length + np.arange(gamma), cache[:, :, :, :length], own)
        return np.argsort(-self.logits(s), axis=-1, kind="stable")[:, :k].astype(np.int32)


class NumPyEngine(Engine):
    """One file of weights."""

    def __init__(self, file: Path, geometry: Geometry, functions: Sequence[str]) -> None:
        super().__init__(geometry, frozenset(functions), file)
        self.model = Llama(file, geometry)

    def new_cache(self, inputs: Inputs, beside: Cache | None = None) -> NumPyCache:
        return NumPyCache(inputs, self.model)

    def release(self) -> None:
        return


class NumPyCache(Cache):
    """Rows ``[layers, 2, kv_heads, capacity, head_dim]``."""

    def __init__(self, inputs: Inputs, model: Llama) -> None:
        super().__init__(inputs)
        g = model.geometry
        self.model = model
        self.array = np.zeros((g.layers, 2, g.kv_heads, g.capacity, g.head_dim), np.float32)

    def call(self, function: str, length: int) -> Outputs:
        return self.model.call(function, self.inputs, self.array)

    def rows(self, start: int, end: int) -> Array:
        part = self.array[:, :, :, start:end].transpose(0, 1, 3, 2, 4)
        return part.reshape(-1, end - start, self.model.geometry.row_width)


class NumPyRuntime(RuntimeTarget):
    name = "numpy"
    extra = "export"

    def open_engine(self, bundle: Bundle, app: str | None, options: EngineOptions) -> Engine:
        return NumPyEngine(bundle.file("weights"), bundle.geometry, bundle.functions)


TARGET = NumPyRuntime()
