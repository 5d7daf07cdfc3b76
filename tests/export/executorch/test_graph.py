"""Rewrites of exported programs compute what the programs computed."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from ssdevice.config import Schedule, StreamConfig
from ssdevice.contract import PLAIN, PREFILL, STEP, CacheForm, Geometry, functions
from ssdevice.export.executorch.graph import Products, tidy
from ssdevice.export.executorch.state import column_attention
from ssdevice.export.forms import function_module
from ssdevice.export.parity.reference import int32
from ssdevice.export.state_form import InternalCacheForm, state_shape
from ssdevice.model.loading import build
from ssdevice.model.operators import Operators, under
from ssdevice.model.step import StreamModel
from ssdevice.tree import Tree
from tests.model.tiny import VOCAB, tiny_model

TREE = Tree.of([(0,), (1,), (1, 0)])


def operators(program: torch.export.ExportedProgram) -> Counter[str]:
    return Counter(str(node.target) for node in program.graph.nodes if node.op == "call_function")


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LayerNorm(6, eps=1e-3)
        self.bare = nn.LayerNorm(6, elementwise_affine=False)
        nn.init.normal_(self.layer.weight)
        nn.init.normal_(self.layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.layer(y) + self.bare(y) + y.mean([-1], keepdim=True)


@pytest.mark.parametrize("shape", [(1, 5, 6), (1, 2, 3, 6)])
def test_norms_become_products(shape: tuple[int, ...]) -> None:
    module = Norms()
    x = torch.randn(shape)
    with Products():
        program = tidy(torch.export.export(module, (x,), strict=False))
    found = operators(program)
    assert not any("mean" in name or "layer_norm" in name for name in found)
    assert found["aten.full.default"] == 1
    other = torch.randn(shape)
    torch.testing.assert_close(program.module()(other), module(other), rtol=0, atol=1e-5)


class Views(nn.Module):
    def forward(self, x: Tensor, i: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.unsqueeze(0).reshape(2, 3)[None].flatten(0, 1)
        only = x.reshape(1, 6).index_select(0, i)
        return y + 1, only[0] * 2, x.unsqueeze(1)[:, 0] + x.unsqueeze(1)[:, 0]


def test_views_of_views_are_one_and_rows_that_stand_alone_are_no_copy() -> None:
    module = Views()
    x = torch.arange(6.0).reshape(2, 3)
    program = tidy(
        torch.export.export(module, (x, torch.zeros(1, dtype=torch.int32)), strict=False)
    )
    found = operators(program)
    assert not any(
        "unsqueeze" in name or "index_select" in name or "select.int" in name for name in found
    )
    for mine, theirs in zip(program.module()(x, int32(0)), module(x, int32(0)), strict=True):
        assert torch.equal(mine, theirs)


def small(name: str = "llama") -> tuple[StreamModel, Geometry]:
    model = build(tiny_model(name), StreamConfig(gamma=2, msa_layers=1), 40, 2).eval()
    backbone = model.backbone
    return model, Geometry(3, backbone.kv_heads, backbone.head_dim, VOCAB, 2, 2, TREE, 40, 8)


def state_names(geometry: Geometry) -> list[str]:
    return [f"{state}.{layer}" for state in ("keys", "values") for layer in range(geometry.layers)]


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("name", [STEP, PREFILL, PLAIN])
def test_both_storages_hold_the_rows_the_step_commits(name: str, stacked: bool) -> None:
    model, geometry = small()
    module = function_module(name, model, geometry, Schedule.DEFERRED)
    form = InternalCacheForm(name, module, geometry, stacked=stacked)
    spec = functions(geometry, CacheForm.INTERNAL, "float32")[name]
    names = ["keys", "values"] if stacked else state_names(geometry)
    assert [key for key, _ in form.named_buffers() if key in names] == names
    noise = torch.randn(2, *state_shape(geometry), generator=torch.Generator().manual_seed(0))
    given = []
    for tensor in spec.inputs:
        shape = [int(size) for size in tensor.shape]
        given.append(torch.ones(shape, dtype=torch.int32))
    given[-1] = int32(9)
    with torch.no_grad():
        for state, value in zip((form.keys, form.values), noise, strict=True):
            for layer in range(geometry.layers):
                state[layer].copy_(value[layer])
        past = [(k[None].clone(), v[None].clone()) for k, v in zip(*noise, strict=True)]
        if name == PLAIN:
            given.insert(1, torch.zeros(0, 1, dtype=torch.int32))
        expected = module(*given, past)
        if name == PLAIN:
            del given[1]
        out = form(*given)
    assert [tuple(tensor.shape) for tensor in out] == [
        tuple(tensor.shape) for tensor in spec.outputs
    ]
    assert torch.equal(out[0], expected.token if name == PREFILL else expected.tokens)
    for layer, (keys, values) in enumerate(expected.rows):
        for state, rows, before in ((form.keys, keys, noise[0]), (form.values, values, noise[1])):
            end = 9 + rows.shape[2]
            assert torch.equal(state[layer][:, 9:end], rows[0])
            assert torch.equal(state[layer][:, :9], before[layer][:, :9])
            assert torch.equal(state[layer][:, end:], before[layer][:, end:])


@pytest.mark.parametrize(
    "name",
    ["llama", *(pytest.param(name, marks=pytest.mark.wide) for name in ("gemma2", "cohere"))],
)
def test_a_tidied_step_computes_the_same_and_keeps_its_writes(name: str) -> None:
    model, geometry = small(name)
    form, columns = (
        InternalCacheForm(
            STEP, function_module(STEP, asked, geometry, Schedule.DEFERRED), geometry, stacked=False
        ).eval()
        for asked in (
            model,
            under(model, Operators(attention=partial(column_attention, placed=False))),
        )
    )
    given = (int32(5), torch.tensor([[4, 8], [15, 16]], dtype=torch.int32), int32(7))
    with torch.no_grad():
        for value in form.buffers():
            if value.dtype is torch.float32 and value.shape == state_shape(geometry)[1:]:
                value.normal_()
        columns.load_state_dict(form.state_dict())
        with Products():
            program = tidy(torch.export.export(columns, given, strict=False))
        expected = form(*given)
        after = form.state_dict()
        ran = program.module()
        out = ran(*given)
    for mine, theirs in zip(out, expected, strict=True):
        assert torch.equal(mine, theirs)
    states = dict(ran.named_buffers())
    for key in state_names(geometry):
        torch.testing.assert_close(states[key], after[key], rtol=0, atol=2e-5)
    assert operators(program)["aten.index_put_.default"] == 2 * geometry.layers
