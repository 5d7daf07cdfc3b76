"""Every family's step, prefill and plain step become ONNX graphs that compute what the torch module
computes.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from ssdevice.config import Mode, Schedule, StreamConfig
from ssdevice.contract import PAST, PLAIN, PREFILL, STEP, CacheForm, Geometry, TensorSpec, functions
from ssdevice.errors import UnsupportedModelError
from ssdevice.export.forms import ExternalCacheForm, exportable, function_module, top_k
from ssdevice.export.onnx.editor import Editor, tag
from ssdevice.export.onnx.functions import add_functions
from ssdevice.export.onnx.fused import add_norms
from ssdevice.export.onnx.quantization import quantize, schemes
from ssdevice.export.onnx.tracing import trace
from ssdevice.export.plan import Quant
from ssdevice.export.weights import by_name, stored
from ssdevice.model.loading import build
from ssdevice.model.operators import argmax
from ssdevice.tree import Tree
from tests.model.tiny import MODELS, tiny_model

TREE = Tree.of([[0], [1], [0, 0]])
CONTEXT = 24
CHUNK = 5
LENGTH = 9
ROWS = 12
"""Committed tokens, and the rows that are passed: those behind the length hold anything."""
FLOAT = "float32"
ALWAYS = ("gemma3_text", "opt-before", "olmo")
"""Windows and norms of several kinds; biases and learned positions; an operator in place.

The rest are slow tests.
"""


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=pytest.mark.wide if name in ALWAYS else pytest.mark.slow)
        for name in MODELS
    ],
)
def test_every_function_of_every_family(family: str) -> None:
    model = build(
        tiny_model(family), StreamConfig(Mode.LOSSLESS, TREE.depth, 1, adapter_rank=4), CONTEXT
    ).eval()
    backbone = model.backbone
    vocab = int(backbone.config.vocab_size)
    geometry = Geometry(
        backbone.num_layers,
        backbone.kv_heads,
        backbone.head_dim,
        vocab,
        TREE.depth,
        TREE.width,
        TREE,
        CONTEXT,
        CHUNK,
    )
    draw = np.random.default_rng(0)
    for schedule in Schedule:
        for name in (STEP, PREFILL, PLAIN) if schedule is Schedule.DEFERRED else (STEP,):
            spec = functions(geometry, CacheForm.EXTERNAL, FLOAT)[name]
            given = {tensor.name: example(tensor, vocab, draw) for tensor in spec.inputs}
            module = function_module(name, exportable(model), geometry, schedule)
            form = ExternalCacheForm(name, module, backbone.kv_heads).eval()
            edit = trace(form, spec.inputs, [tensor.name for tensor in spec.outputs])
            add_norms(edit)
            tag(edit.model, by_name(form, stored(model, schemes(Quant.FP32))))
            quantize(edit, Quant.FP32, {})
            with torch.no_grad():
                expected = form(*(torch.from_numpy(given[tensor.name]) for tensor in spec.inputs))
            for tensor, mine, theirs in zip(spec.outputs, run(edit, given), expected, strict=True):
                np.testing.assert_allclose(
                    mine, theirs.numpy(), rtol=1e-4, atol=1e-4, err_msg=f"{name} {tensor.name}"
                )


def example(tensor: TensorSpec, vocab: int, draw: np.random.Generator) -> np.ndarray:
    shape = [ROWS if size == PAST else int(size) for size in tensor.shape]
    if tensor.dtype == FLOAT:
        return draw.standard_normal(shape).astype(np.float32)
    sizes = {"length": LENGTH, "valid": CHUNK - 1}
    return (
        np.full(shape, sizes[tensor.name], np.int32)
        if tensor.name in sizes
        else draw.integers(0, vocab, shape, np.int32)
    )


def run(edit: Editor, given: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    edit.graph.opset_imports["com.microsoft"] = 1
    add_functions(edit.model)
    return ort.InferenceSession(
        ir.serde.serialize_model(edit.model).SerializeToString(), options
    ).run(None, given)


class Clamped(nn.Module):
    def __init__(self, view: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.view = view

    def forward(self, x: Tensor) -> tuple[Tensor]:
        y = self.linear(x)
        seen = y.view(2, 2) if self.view else None
        y.clamp_(-0.1, 0.1)
        return (y if seen is None else seen,)


def test_an_operator_in_place_changes_what_comes_after_it() -> None:
    x = np.arange(4, dtype=np.float32)[None]
    module = Clamped(view=False).eval()
    edit = trace(module, [TensorSpec("x", (1, 4), FLOAT)], ["y"])
    tag(edit.model, by_name(module, stored(module, schemes(Quant.FP32))))
    quantize(edit, Quant.FP32, {})
    np.testing.assert_allclose(
        run(edit, {"x": x})[0], module(torch.from_numpy(x))[0].detach().numpy(), atol=1e-6
    )


@pytest.mark.parametrize("k", [1, 3])
def test_the_best_k_are_one_topk_with_the_lowest_ids_first_among_equals(k: int) -> None:
    class Best(nn.Module):
        def forward(self, scores: Tensor) -> tuple[Tensor, Tensor]:
            return top_k(scores, k), argmax(scores)

    scores = np.random.default_rng(0).integers(0, 20, (4, 500)).astype(np.float32)
    edit = trace(Best(), [TensorSpec("scores", scores.shape, FLOAT)], ["best", "first"])
    best, first = run(edit, {"scores": scores})
    ranked = np.argsort(-scores, axis=1, kind="stable")
    np.testing.assert_array_equal(best, ranked[:, :k])
    np.testing.assert_array_equal(first, ranked[:, 0])
    kinds = [node.op_type for node in edit.graph]
    assert "ArgMax" not in kinds and kinds.count("TopK") == (1 if k == 1 else 2)


def test_an_operator_in_place_behind_a_view_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="views"):
        trace(Clamped(view=True).eval(), [TensorSpec("x", (1, 4), FLOAT)], ["y"])


def test_an_operator_without_a_form_is_named() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.erfinv(x)

    with pytest.raises(UnsupportedModelError, match="erfinv"):
        trace(Odd(), [TensorSpec("x", (1, 4), FLOAT)], ["y"])
