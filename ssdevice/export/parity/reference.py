"""The torch reference of the parity gate, and the interface that artifacts share with it."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ssdevice.contract import GREEDY, PLAIN, PREFILL, STEP, STEP_SHORT, Geometry
from ssdevice.export.exporter import ExportJob
from ssdevice.export.forms import function_module
from ssdevice.export.parity.difference import Array
from ssdevice.export.parity.products import flat
from ssdevice.export.weights import kind_of
from ssdevice.model.attention import KeyValue

Drafts = list[list[int]]
FIRST_PROMPT_ID = 3


@dataclass
class Cache:
    """Committed rows, ``[layers, 2, 1, kv_heads, capacity, head_dim]``, and how many are valid."""

    rows: Tensor
    length: int = 0

    def past(self) -> list[KeyValue]:
        """Per layer (keys, values) of the valid rows, rounded up so that there is always one."""
        end = max(self.length, 1)
        return [(layer[0][:, :, :end], layer[1][:, :, :end]) for layer in self.rows]

    def commit(self, rows: Sequence[KeyValue], count: int) -> None:
        """Append the first ``count`` of the new rows of every layer."""
        for layer, (keys, values) in zip(self.rows, rows, strict=True):
            layer[0, :, :, self.length : self.length + count] = keys[:, :, :count]
            layer[1, :, :, self.length : self.length + count] = values[:, :, :count]
        self.length += count


def int32(value: int) -> Tensor:
    """A contract integer: shape [1]."""
    return torch.tensor([value], dtype=torch.int32)


class StepOut(NamedTuple):
    """The result of a step: ``tokens`` are those that count, ``drafts`` γ rows of k ids."""

    tokens: list[int]
    drafts: Drafts


class Driver(Protocol):
    """One conversation with an exported artifact. Each call commits its rows at ``length``."""

    def prefill(self, tokens: Sequence[int], length: int) -> tuple[int, Drafts]:
        """Commit 1 to C tokens: (the next token, drafts)."""

    def step(self, last: int, drafts: Drafts, length: int) -> StepOut:
        """One speculative step after the token ``last``, a short one for fewer drafts; accepted
        rows are committed.
        """

    def plain(self, last: int, length: int) -> int:
        """One plain step; one row is committed."""

    def rows(self, start: int, end: int) -> Array | None:
        """Committed rows ``[2 * layers, end - start, kv_heads * head_dim]``; None if they cannot be
        read.
        """


class TorchDriver:
    """The reference as a Driver. ``main``/``streams``: logits of the last call, ``[rows, V]`` each.

    ``jitter``: relative size of random changes to every product and embedding, drawn from ``seed``.
    Such a reference rounds at other places, and shows how much quantization amplifies that.
    """

    def __init__(self, job: ExportJob, jitter: float = 0.0, seed: int = 0) -> None:
        plan = job.plan
        model = job.loaded.model
        self.geometry = g = plan.geometry
        names = [name for name in plan.function_names if name in GREEDY]
        self.modules = {name: function_module(name, model, g, plan.schedule) for name in names}
        self.model = model
        self.jitter = jitter
        self.draw = torch.Generator().manual_seed(seed)
        size = max(g.chunk, g.tree.emitted) + g.context
        # The system gives NumPy's zeros memory when they are written; the gate writes few rows of a
        # long context.
        self.cache = Cache(
            torch.from_numpy(np.zeros((g.layers, 2, 1, g.kv_heads, size, g.head_dim), np.float32))
        )
        self.main: Array = np.zeros((0, g.vocab), np.float32)
        # Logits of the drafts; those of a model without streams are zeros for certain.
        self.streams: Array = np.full(
            (0 if self.model.streams else g.gamma, g.vocab), -np.inf, np.float32
        )
        self.streams[:, :1] = 0.0

    def prefill(self, tokens: Sequence[int], length: int) -> tuple[int, Drafts]:
        ids = torch.tensor(
            [*tokens, *([0] * (self.geometry.chunk - len(tokens)))], dtype=torch.int32
        )
        out = self._call(PREFILL, length, ids, int32(len(tokens)))
        self.cache.commit(out.rows, len(tokens))
        return int(out.token), out.drafts.tolist()

    def step(self, last: int, drafts: Drafts, length: int) -> StepOut:
        name = STEP if len(drafts) == self.geometry.gamma else STEP_SHORT
        out = self._call(name, length, int32(last), torch.tensor(drafts, dtype=torch.int32))
        count = int(out.count)
        self.cache.commit(out.rows, count)
        return StepOut(out.tokens[:count].tolist(), out.drafts.tolist())

    def plain(self, last: int, length: int) -> int:
        out = self._call(PLAIN, length, int32(last), torch.zeros(0, 1, dtype=torch.int32))
        self.cache.commit(out.rows, 1)
        return int(out.tokens)

    def rows(self, start: int, end: int) -> Array:
        rows = self.cache.rows[:, :, 0, :, start:end].transpose(2, 3)
        return (
            rows.reshape((2 * self.geometry.layers, end - start, self.geometry.row_width))
            .numpy()
            .copy()
        )

    def _call(self, function: str, length: int, *inputs: Tensor) -> Any:
        self.cache.length = length
        seen: list[Array] = []

        def spread(_: object, __: object, logits: Tensor) -> None:
            """Drafts are compared by token id, so a draft vocabulary's logits go to their ids."""
            assert self.model.streams is not None
            everywhere = np.full((logits[0].shape[0], self.geometry.vocab), -np.inf, np.float32)
            everywhere[:, self.model.streams.draft_ids.numpy()] = flat(logits)
            seen.append(everywhere)

        with torch.no_grad(), ExitStack() as hooks:
            if self.jitter:
                hooks.enter_context(jittered(self.model, self.jitter, self.draw))
            head = self.model.backbone.lm_head
            hooks.enter_context(
                head.register_forward_hook(lambda _, __, logits: seen.append(flat(logits)))
            )
            if self.model.draft_head is not None:
                hooks.enter_context(self.model.draft_head.register_forward_hook(spread))
            out = self.modules[function](*inputs, int32(length), self.cache.past())
        self.main = seen[0]
        self.streams = (
            np.concatenate(seen[1:]) if len(seen) > 1 else self.streams
        )  # streams may follow one another
        return out


@contextmanager
def jittered(model: nn.Module, jitter: float, draw: torch.Generator) -> Iterator[None]:
    """In this context every product and embedding of a model changes at random by ``jitter`` of its
    size.
    """

    def change(_: object, __: object, output: Tensor) -> Tensor:
        return output * (1 + jitter * torch.randn(output.shape, generator=draw))

    with ExitStack() as hooks:
        for part in model.modules():
            if kind_of(part) is not None:
                hooks.enter_context(part.register_forward_hook(change))
        yield


def force_drafts(
    g: Geometry, node: int, continuation: Sequence[int], draw: np.random.Generator
) -> Drafts:
    """Drafts ``[γ, k]`` with the continuation on the path to ``node`` and other ids everywhere
    else.
    """
    path = g.tree.paths[node]
    drafts = []
    for j in range(g.gamma):
        true = continuation[j] if j < len(continuation) else -1
        row = [
            (i + 1) % g.vocab if i == true else i for i in draw.integers(0, g.vocab, g.k).tolist()
        ]
        if j < len(path):
            row[path[j]] = true
        drafts.append(row)
    return drafts


def random_prompt(g: Geometry, length: int) -> list[int]:
    """Random ids, so that rows differ from each other."""
    return [
        int(i)
        for i in np.random.default_rng(0).integers(
            min(FIRST_PROMPT_ID, g.vocab - 1), g.vocab, length
        )
    ]


def run_prefill(driver: Driver, tokens: Sequence[int], chunk: int) -> tuple[int, Drafts]:
    result: tuple[int, Drafts] = (0, [])
    for at in range(0, len(tokens), chunk):
        result = driver.prefill(tokens[at : at + chunk], at)
    return result
