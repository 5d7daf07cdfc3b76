"""Every weight of a function has a role, made from the model object."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ssdevice.adapters.slots import SlotKind
from ssdevice.config import Mode, Schedule, StreamConfig
from ssdevice.contract import PLAIN, STEP, Geometry
from ssdevice.export.forms import ExternalCacheForm, exportable, function_module
from ssdevice.export.variants import open_slots
from ssdevice.export.weights import FLOAT32, Part, Role, Schemes, by_name, stored
from ssdevice.model.loading import build
from ssdevice.model.step import StreamModel
from ssdevice.tree import Tree
from tests.model.tiny import LAYERS, VOCAB, tiny_model

CONFIG = StreamConfig(mode=Mode.LOSSLESS, gamma=2, msa_layers=1, adapter_rank=3, init_rank=2)


def form_of(model: StreamModel) -> nn.Module:
    heads = model.backbone.kv_heads
    dim = model.backbone.head_dim
    tree = Tree.chain(model.gamma)
    geometry = Geometry(LAYERS, heads, dim, VOCAB, model.gamma, 2, tree, 32, 8)
    name = STEP if model.gamma else PLAIN
    return ExternalCacheForm(name, function_module(name, model, geometry, Schedule.DEFERRED), heads)


def roles_of(form: nn.Module) -> dict[str, Role]:
    """The roles of a form's weights by their names in it."""
    table = by_name(form, stored(form, Schemes(FLOAT32)))
    return {name: one.role for name, one in table.items()}


@pytest.mark.parametrize("view", [lambda model: model, exportable])
def test_every_weight_has_its_role(
    view: Callable[[StreamModel], StreamModel],
) -> None:
    model = build(tiny_model("llama"), CONFIG, 32)
    model.backbone.lm_head.weight = nn.Parameter(model.backbone.lm_head.weight.detach().clone())
    form = form_of(view(model))
    roles = roles_of(form)
    layers = "module.model.backbone.layers"
    assert roles[f"{layers}.2.self_attn.q_proj.base.weight"] == Role(Part.QUERY)
    assert roles[f"{layers}.0.mlp.down_proj.weight"] == Role(Part.DOWN)
    assert roles["module.model.backbone.lm_head.weight"] == Role(Part.HEAD)
    assert roles["module.model.backbone.embed_tokens.weight"] == Role(Part.EMBEDDING)
    # A stream adapter is found in the layers and in the streams; its name in the adapter folder is
    # one.
    down = Role(Part.FACTOR, SlotKind.STREAM, "adapters.2-self_attn-q_proj")
    assert roles[f"{layers}.2.self_attn.q_proj.adapter.down.weight"] == down
    assert roles["module.model.streams.adapters.2-self_attn-q_proj.down.weight"] == down
    own = Role(Part.OWN_FACTOR, SlotKind.STREAM, "f", up=True)
    assert roles["module.model.streams.f.up.weight"] == own


def test_a_lora_beside_the_base_has_the_name_that_peft_gives_it() -> None:
    model = build(tiny_model("llama"), None, 32)
    open_slots(model.backbone.layers)
    roles = roles_of(form_of(model))
    name = "module.model.backbone.layers.1.mlp.up_proj.adapter.up.weight"
    assert roles[name] == Role(Part.FACTOR, SlotKind.LORA, "model.layers.1.mlp.up_proj", up=True)


def test_a_tied_head_counts_as_the_embedding() -> None:
    model = build(tiny_model("llama"), None, 32)
    assert model.backbone.lm_head.weight is model.backbone.embed_tokens.weight
    roles = roles_of(form_of(model))
    assert roles["module.model.backbone.lm_head.weight"].part is Part.EMBEDDING


def test_a_model_under_other_operators_has_the_weights_and_leaves_the_classes() -> None:
    hf = tiny_model("llama")
    model = build(hf, CONFIG, 32)
    attention = type(model.backbone.layers[0].self_attn)
    before = attention.forward, attention.forward.__globals__["apply_rotary_pos_emb"]
    view = exportable(model)
    assert [name for name, _ in view.named_parameters()] == [
        name for name, _ in model.named_parameters()
    ]
    assert all(a is b for a, b in zip(view.parameters(), model.parameters(), strict=True))
    assert all(a is b for a, b in zip(view.buffers(), model.buffers(), strict=True))
    assert (attention.forward, attention.forward.__globals__["apply_rotary_pos_emb"]) == before
    assert "forward" in vars(view.backbone.layers[0].self_attn)
    assert "forward" not in vars(model.backbone.layers[0].self_attn)
    tokens = torch.arange(4)[None]
    at = torch.arange(4, dtype=torch.int32)[None]
    masks = {None: torch.zeros(1, 1, 4, 4)}
    none: list[list] = [[], [], []]
    results = []
    for one in (model, view):
        backbone = one.backbone
        with torch.no_grad():
            h, _ = backbone.run(0, 3, backbone.embed(tokens, at), backbone.rope(at), masks, none)
        results.append(h)
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-6)
