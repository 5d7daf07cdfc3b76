"""Deep models of little width with outlier channels, and torch artifacts of them in which faults
can be planted.

An artifact computes what the reference computes with another rounding: sums in float64 for the
float32 forms, every module's result in half precision for ``fp16``. It is a Driver and shows its
products, as a real target does, in a second where converting a deep model takes minutes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from types import MethodType, SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ssdevice.config import Mode, Schedule, StreamConfig
from ssdevice.contract import (
    CHUNK,
    COUNT,
    DRAFTS,
    FUNCTIONS,
    NEXT_DRAFTS,
    NEXT_ROOT,
    PREFILL,
    ROOT,
    ROWS,
    STEP,
    TOKENS,
    VALID,
    Geometry,
)
from ssdevice.export.exporter import ExportJob
from ssdevice.export.parity.difference import Array
from ssdevice.export.parity.products import Call, Product, followed
from ssdevice.export.parity.reference import Drafts, StepOut, TorchDriver
from ssdevice.export.plan import ExportPlan
from ssdevice.model.loading import LoadedModel, build
from ssdevice.model.step import StreamModel
from ssdevice.tree import Tree
from tests.model.tiny import MODELS, SEEDS, randomise, tiny_config

TREE = Tree.of([[0], [1], [0, 0]])
VOCAB = 150
WIDTH = 128
CONTEXT = 64
CHUNK_SIZE = 16
OUTLIERS = (5, 40, 97)
"""Channels that stand out in every norm, as a few do in real models."""


def deep_model(name: str, layers: int, mode: Mode = Mode.LOSSLESS) -> StreamModel:
    """A random model of a family with ``layers`` layers, two of them MSA layers; outliers in some
    channels.
    """
    from transformers import AutoModelForCausalLM

    model_type, values = MODELS[name]
    kinds = values.get("layer_types")
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 160,
        "num_hidden_layers": layers,
    }
    if kinds:
        sizes["layer_types"] = (kinds * layers)[:layers]
    config = tiny_config(model_type, **{**values, **sizes})
    hf = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomise(hf, SEEDS.get(name, 0))
    with torch.no_grad():
        for path, value in hf.named_parameters():
            if value.dim() == 1 and value.shape[0] == WIDTH and "norm" in path:
                value[list(OUTLIERS)] *= 8
            if path.endswith(("layers.1.mlp.down_proj.weight", "layers.2.mlp.down_proj.weight")):
                value[list(OUTLIERS)] *= 12
    torch.manual_seed(0)
    model = build(hf.eval(), StreamConfig(mode, TREE.depth, 2, adapter_rank=4), CONTEXT)
    assert model.streams is not None
    with torch.no_grad():
        for value in model.streams.parameters():
            value.copy_(torch.randn_like(value) * 0.3)
        model.streams.identifiers *= 10  # as large beside the hidden states as trained ones are
    return model.eval()


def job_of(model: StreamModel, schedule: Schedule = Schedule.DEFERRED) -> ExportJob:
    """What the gate reads of an export."""
    backbone = model.backbone
    geometry = Geometry(
        layers=backbone.num_layers,
        kv_heads=backbone.kv_heads,
        head_dim=backbone.head_dim,
        vocab=VOCAB,
        gamma=TREE.depth,
        k=TREE.width,
        tree=TREE,
        context=CONTEXT,
        chunk=CHUNK_SIZE,
    )
    plan = SimpleNamespace(geometry=geometry, schedule=schedule, function_names=FUNCTIONS)
    loaded = SimpleNamespace(model=model)
    return ExportJob(cast(ExportPlan, plan), cast(LoadedModel, loaded), lambda *_: None)


class Artifact:
    """A copy of a job's model as an artifact: ``parity.reference.Driver`` and
    ``parity.products.Shown``.

    ``model`` is there to be damaged. ``spoil``: changes what a call gives, ``(function, outputs) ->
    None``.
    """

    slotted = False

    def __init__(self, job: ExportJob, half: bool = False) -> None:
        self.model = copy.deepcopy(job.loaded.model)
        self.dtype = np.float16 if half else np.float32
        for part in self.model.modules():
            if half:
                part.register_forward_hook(_to_half)
            elif isinstance(part, nn.Linear):
                part.forward = MethodType(_in_float64, part)  # type: ignore[method-assign]
        self.geometry = job.plan.geometry
        self.inner = TorchDriver(
            ExportJob(job.plan, cast(LoadedModel, SimpleNamespace(model=self.model)), job.report)
        )
        self.names = followed(self.model, False, job.plan.schedule)
        self.spoil: Callable[[str, dict[str, Array]], None] = lambda *_: None

    def close(self) -> None:
        pass

    def spell(self, parameter: str) -> str:
        """See Shown."""
        return parameter

    def call(self, function: str, integers: Mapping[str, Array], length: int, past: Array) -> Call:
        """See Shown."""
        seen: list[Product] = []
        hooks = []
        for module, names in self.names.items():
            before, after = _seeing(seen, names[0])
            hooks.append(
                module.register_forward_pre_hook(before, prepend=True)
            )  # before inputs are quantized
            hooks.append(module.register_forward_hook(after))
        self._write(0, past)
        try:
            out = self._run(function, integers, length)
        finally:
            for hook in hooks:
                hook.remove()
        return Call(out, seen)

    def prefill(self, tokens: Sequence[int], length: int) -> tuple[int, Drafts]:
        """See Driver."""
        chunk = np.array([*tokens, *([0] * (self.geometry.chunk - len(tokens)))], np.int32)
        out = self._run(PREFILL, {CHUNK: chunk, VALID: np.array([len(tokens)])}, length)
        return int(out[NEXT_ROOT][0]), out[NEXT_DRAFTS].tolist()

    def step(self, root: int, drafts: Drafts, length: int) -> StepOut:
        """See Driver."""
        out = self._run(STEP, {ROOT: np.array([root]), DRAFTS: np.array(drafts)}, length)
        return StepOut(out[TOKENS][: int(out[COUNT][0])].tolist(), out[NEXT_DRAFTS].tolist())

    def plain(self, root: int, length: int) -> int:
        """See Driver."""
        return int(self._run("step_plain", {ROOT: np.array([root])}, length)[TOKENS][0])

    def rows(self, start: int, end: int) -> Array:
        """See Driver."""
        return self.inner.rows(start, end)

    def _write(self, at: int, rows: Array) -> None:
        """``[2 * layers, n, width]`` into the cache ``[layers, 2, 1, kv_heads, capacity,
        head_dim]``.
        """
        g = self.geometry
        heads = rows.reshape(g.layers, 2, -1, g.kv_heads, g.head_dim).swapaxes(2, 3)
        self.inner.cache.rows[:, :, 0, :, at : at + rows.shape[1]] = torch.from_numpy(
            heads.astype(np.float32)
        )

    def _run(self, function: str, integers: Mapping[str, Array], length: int) -> dict[str, Array]:
        if function == PREFILL:
            count = int(integers[VALID][0])
            root, drafts = self.inner.prefill(integers[CHUNK][:count].tolist(), length)
            out = {NEXT_ROOT: np.array([root]), NEXT_DRAFTS: np.array(drafts)}
        elif function == STEP:
            step = self.inner.step(int(integers[ROOT][0]), integers[DRAFTS].tolist(), length)
            count = len(step.tokens)
            tokens = np.zeros(
                self.geometry.tree.emitted, np.int32
            )  # of which those behind the count are anything
            tokens[:count] = step.tokens
            out = {TOKENS: tokens, COUNT: np.array([count]), NEXT_DRAFTS: np.array(step.drafts)}
        else:
            count = 1
            out = {TOKENS: np.array([self.inner.plain(int(integers[ROOT][0]), length)])}
        out[ROWS] = self.inner.rows(length, length + count)
        self.spoil(function, out)
        self._write(length, out[ROWS])
        return out


def _to_half(_: nn.Module, __: object, output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(_to_half(_, __, item) for item in output)
    return output.half().float() if isinstance(output, Tensor) else output


def _in_float64(self: nn.Linear, x: Tensor) -> Tensor:
    bias = self.bias.double() if self.bias is not None else None
    return nn.functional.linear(x.double(), self.weight.double(), bias).float()


def _seeing(seen: list[Product], name: str) -> tuple[Callable[..., None], Callable[..., None]]:
    waiting: list[Array] = []

    def before(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        waiting.append(inputs[0].reshape(-1, inputs[0].shape[-1]).numpy().copy())

    def after(_: nn.Module, __: object, output: Tensor) -> None:
        outputs = output.reshape(-1, output.shape[-1]).numpy().copy()
        seen.append(Product(f"{name}.weight", waiting.pop(), outputs))

    return before, after
