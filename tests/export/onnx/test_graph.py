"""What a traced graph becomes: few nodes, the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from ssdevice.contract import TensorSpec
from ssdevice.export.forms import rotary
from ssdevice.export.onnx.editor import tag
from ssdevice.export.onnx.functions import add_functions
from ssdevice.export.onnx.fused import add_norms
from ssdevice.export.onnx.quantization import quantize, schemes
from ssdevice.export.onnx.tracing import trace
from ssdevice.export.plan import Quant
from ssdevice.export.weights import by_name, stored

Turned = tuple[Tensor, Tensor, Tensor]


class Called(nn.Module):
    """A function as a module; ``parts``: modules that it uses."""

    def __init__(self, call: Callable[..., tuple[Tensor, ...]], *parts: nn.Module) -> None:
        super().__init__()
        self.call = call
        self.parts = nn.ModuleList(parts)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self.call(*self.parts, *tensors)


def check(module: Called, inputs: dict[str, Tensor], outputs: int = 1, **counts: int) -> None:
    """The graph computes what the module computes, with these many nodes of these kinds."""
    specs = [
        TensorSpec(name, tuple(given.shape), str(given.dtype)[6:]) for name, given in inputs.items()
    ]
    edit = trace(module, specs, [f"y{i}" for i in range(outputs)])
    add_norms(edit)
    tag(edit.model, by_name(module, stored(module, schemes(Quant.FP32))))
    quantize(edit, Quant.FP32, {})
    kinds = [node.op_type for node in edit.graph]
    assert {kind: kinds.count(kind) for kind in counts} == counts
    edit.graph.opset_imports["com.microsoft"] = 1
    add_functions(edit.model)
    edit.graph.sort()
    session = ort.InferenceSession(ir.serde.serialize_model(edit.model).SerializeToString())
    found = session.run(None, {name: given.numpy() for name, given in inputs.items()})
    with torch.no_grad():
        expected = module(*inputs.values())
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-5, atol=1e-5)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def test_views_that_cancel_leave_nothing() -> None:
    def there_and_back(x: Tensor) -> tuple[Tensor]:
        heads = x.reshape(1, -1, 3, 4).transpose(1, 2)
        return (torch.relu(heads.transpose(1, 2).reshape(-1, 12)),)

    check(Called(there_and_back), {"x": random(5, 12)}, Reshape=0, Transpose=0, Relu=1)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_rows_of_all_layers_are_gathered_once(kv_heads: int) -> None:
    """Keys as heads, the accepted path gathered per layer, heads as rows again, layers stacked."""

    def rows(path: Tensor, *layers: Tensor) -> tuple[Tensor]:
        heads = [
            layer.view(1, 5, kv_heads, -1).transpose(1, 2).index_select(2, path) for layer in layers
        ]
        return (torch.cat([one.transpose(1, 2).flatten(2) for one in heads]),)

    layers = {f"x{i}": random(1, 5, 8, seed=i) for i in range(3)}
    given = {"path": torch.tensor([0, 2, 4], dtype=torch.int32), **layers}
    check(Called(rows), given, Gather=1, Concat=1, Transpose=0, Reshape=0)


def test_residual_and_norm_become_one_node_and_both_results_stay() -> None:
    def residual(norm: nn.Module, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        total = a + b
        return torch.relu(total), norm(total) + total

    norm = nn.RMSNorm(32, eps=1e-6)
    norm.weight.data = random(32, seed=2)
    given = {"a": random(1, 4, 32), "b": random(1, 4, 32, seed=1)}
    check(Called(residual, norm), given, outputs=2, AddNorm=1, RMSNormalization=0, Add=1)


def test_an_mlp_of_two_products_that_are_multiplied_has_one_and_our_activation() -> None:
    def mlp(gate: nn.Module, up: nn.Module, x: Tensor) -> tuple[Tensor]:
        return (nn.functional.silu(gate(x)) * up(x),)

    parts = nn.Linear(16, 24, bias=False), nn.Linear(16, 24, bias=False)
    check(Called(mlp, *parts), {"x": random(1, 4, 16)}, MatMul=1, GatedSilu=1, Split=0, Mul=0)


def test_queries_and_keys_are_turned_by_one_operator_unless_something_is_between() -> None:
    angles = random(32, 4, seed=3)
    cos, sin = (
        nn.Embedding.from_pretrained(torch.cat([table, table], 1))
        for table in (angles.cos(), angles.sin())
    )
    linears = (
        nn.Linear(16, 32, bias=False),
        nn.Linear(16, 16, bias=False),
        nn.Linear(16, 16, bias=False),
    )

    def project(scale: float) -> Callable[..., Turned]:
        def call(
            q: nn.Module, k: nn.Module, v: nn.Module, cos: nn.Module, sin: nn.Module, *given: Tensor
        ) -> Turned:
            x, at = given
            queries, keys = (each(x).view(1, 4, -1, 8).transpose(1, 2) for each in (q, k))
            queries = queries if scale == 1 else queries * scale
            turned = [rotary(each, cos(at), sin(at), False) for each in (queries, keys)]
            return turned[0], turned[1], v(x)

        return call

    given = {"x": random(1, 4, 16), "at": torch.tensor([[3, 4, 5, 5]], dtype=torch.int32)}
    check(
        Called(project(1.0), *linears, cos, sin),
        given,
        outputs=3,
        MatMul=1,
        RotarySplit=1,
        RotaryEmbedding=0,
        Split=0,
        Gather=2,
        Slice=0,
    )
    check(
        Called(project(0.5), *linears, cos, sin),
        given,
        outputs=3,
        MatMul=1,
        RotarySplit=0,
        RotaryEmbedding=2,
        Split=1,
    )
