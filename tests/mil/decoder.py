"""A decoder small enough for a test and its conversions: two layers, grouped heads, a cache in the graph's state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.mil.builder import coremltools

VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM, CAPACITY, ROWS = 96, 64, 2, 4, 2, 16, 32, 3
K = 2
COMMITTED = (3, 1, 2, 3, 2, 3)  # rows kept of each step; the others are overwritten by the next
QKV = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
CACHE = (LAYERS, KV_HEADS, CAPACITY, HEAD_DIM)
SLICE, MASK = "slice", "mask"
TRACE, EXPORT = "trace", "export"
INPUTS = {"tokens": (1, ROWS), "length": (1,)}
OUTPUTS = ("chosen", "logits", "best")


class Decoder(nn.Module):
    """``tokens`` [1, ROWS] after ``length`` [1] committed ones -> argmax, logits and top-K ids; the cache is written.

    ``write``: how rows reach the cache: a slice at a run-time offset, or a mask over the whole cache.
    ``item``: read the offset with .item(), which torch.export needs and tracing must not see.
    """

    def __init__(self, write: str, item: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.write, self.item = write, item
        self.register_buffer("keys", torch.zeros(CACHE, dtype=torch.float16))
        self.register_buffer("values", torch.zeros(CACHE, dtype=torch.float16))
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Parameter(torch.randn(CAPACITY, HEAD_DIM) * 0.5)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        kv = 2 * KV_HEADS * HEAD_DIM
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, HEADS * HEAD_DIM + kv) for _ in range(LAYERS))
        self.out = nn.ModuleList(nn.Linear(HEADS * HEAD_DIM, WIDTH) for _ in range(LAYERS))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(LAYERS))
        for parameter in self.parameters():
            parameter.data = parameter.data.half().float()  # what a float16 program can hold

    def forward(self, tokens: Tensor, length: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = torch.arange(ROWS)
        positions = length + rows
        hidden = self.embed(tokens)
        mask = torch.where(torch.arange(CAPACITY)[None] <= positions[:, None], 0.0, -1e4)
        place = self.places[positions]
        for layer in range(LAYERS):
            normed = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-5)
            query, key, value = self.qkv[layer](normed).split(QKV, -1)
            query = query.reshape(1, ROWS, HEADS, HEAD_DIM).transpose(1, 2) + place
            key = key.reshape(1, ROWS, KV_HEADS, HEAD_DIM).transpose(1, 2) + place
            value = value.reshape(1, ROWS, KV_HEADS, HEAD_DIM).transpose(1, 2)
            past_keys = self.commit(self.keys, layer, key, length, positions)
            past_values = self.commit(self.values, layer, value, length, positions)
            grouped = query.reshape(1, KV_HEADS, HEADS // KV_HEADS * ROWS, HEAD_DIM)
            scores = grouped @ past_keys.transpose(-1, -2) / HEAD_DIM**0.5
            scores = scores.reshape(1, HEADS, ROWS, CAPACITY) + mask
            mixed = scores.softmax(-1).reshape(1, KV_HEADS, -1, CAPACITY) @ past_values
            mixed = mixed.reshape(1, HEADS, ROWS, HEAD_DIM).transpose(1, 2).reshape(1, ROWS, WIDTH)
            hidden = hidden + self.out[layer](mixed)
            hidden = hidden + self.down[layer](nn.functional.silu(self.up[layer](hidden)))
        logits = self.head(hidden)
        return logits.argmax(-1).int(), logits, logits.topk(K)[1].int()

    def commit(self, cache: Tensor, layer: int, rows: Tensor, length: Tensor, positions: Tensor) -> Tensor:
        """Write one layer's rows [1, KV_HEADS, ROWS, HEAD_DIM] and return its cache as float32."""
        if self.write == SLICE:
            start: Any = length[0]
            if self.item:
                start = length[0].item()
                torch._check(start >= 0)
                torch._check(start <= CAPACITY - ROWS)
            cache[layer : layer + 1, :, start : start + ROWS, :] = rows.half()
        else:
            hit = (torch.arange(CAPACITY)[:, None] == positions[None]).half()
            old = cache[layer : layer + 1]
            cache[layer : layer + 1] = old * (1 - hit.sum(-1, keepdim=True)) + hit @ rows.half()
        return cache[layer : layer + 1].float()

    def reset(self) -> None:
        """Empty the cache."""
        self.keys.zero_()
        self.values.zero_()


def convert(model: Decoder, route: str, path: Path) -> None:
    """Convert through jit.trace or torch.export and save."""
    ct = coremltools()
    model = model.eval()
    example = tuple(torch.zeros(shape, dtype=torch.int32) for shape in INPUTS.values())
    with torch.no_grad():
        if route == TRACE:
            source = torch.jit.trace(model, example, check_trace=False)
        else:
            source = torch.export.export(model, example).run_decompositions({})
    model.reset()
    states = [ct.StateType(ct.TensorType(shape=CACHE, dtype=np.float16), name=name) for name in ("keys", "values")]
    converted = ct.convert(
        source,
        inputs=[ct.TensorType(name, shape, dtype=np.int32) for name, shape in INPUTS.items()],
        outputs=[ct.TensorType(name) for name in OUTPUTS],
        states=states,
        minimum_deployment_target=ct.target.iOS18,
        skip_model_load=True,
    )
    converted.save(str(path))


def steps(seed: int = 1) -> list[tuple[np.ndarray, int]]:
    """Tokens [1, ROWS] and how many rows precede them."""
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(0, VOCAB, (1, ROWS)).astype(np.int32) for _ in COMMITTED]
    return list(zip(tokens, np.cumsum((0, *COMMITTED))[:-1].tolist(), strict=True))
