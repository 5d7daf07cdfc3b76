"""Every family's step, prefill and plain step pass torch.export with static shapes, and compute the
same.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ssdevice.config import Mode, Schedule, StreamConfig
from ssdevice.model.attention import KeyValue
from ssdevice.model.loading import build
from ssdevice.model.step import PrefillModule, StepModule, StreamModel
from ssdevice.tree import Tree
from tests.model.tiny import MODELS, VOCAB, tiny_model
from tests.model.torch_driver import int32

GAMMA = 2
K = 2
PAST = 24
CHUNK = 4
TREE = Tree.of([(0,), (1,), (1, 0)])
ALWAYS = ("gemma3_text",)
"""Windows, norms of several kinds, a scaled embedding; the rest run with the slow tests."""

Arguments = tuple[Tensor, Tensor, Tensor, list[KeyValue]]


def past(model: StreamModel) -> list[KeyValue]:
    backbone = model.backbone
    shape = (1, backbone.kv_heads, PAST, backbone.head_dim)
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
        for _ in range(backbone.num_layers)
    ]


@pytest.mark.wide
@pytest.mark.parametrize(
    "name",
    [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
)
def test_modules_export_with_static_shapes(name: str) -> None:
    config = StreamConfig(mode=Mode.LOSSLESS, gamma=GAMMA, msa_layers=1, adapter_rank=2)
    model = build(tiny_model(name), config, PAST).eval()
    rows = past(model)
    drafts = torch.tensor([[4, 8], [15, 16]], dtype=torch.int32)
    none = torch.zeros(0, 1, dtype=torch.int32)
    plain = StepModule(StreamModel(model.backbone, None, 0), Tree.root_only(), 1, Schedule.DEFERRED)
    modules: dict[str, tuple[nn.Module, Arguments]] = {
        "fused": (StepModule(model, TREE, K, Schedule.FUSED), (int32(3), drafts, int32(9), rows)),
        "deferred": (
            StepModule(model, TREE, K, Schedule.DEFERRED),
            (int32(3), drafts, int32(9), rows),
        ),
        "prefill": (PrefillModule(model, CHUNK, K), (int32(5, 6, 7, 0), int32(3), int32(9), rows)),
        "plain": (plain, (int32(3), none, int32(9), rows)),
    }
    for what, (module, arguments) in modules.items():
        with torch.no_grad():
            program = torch.export.export(Flat(module), arguments)
            exported = program.module()
            # Other integers than those it was exported with: nothing may be baked in.
            first, second, length, rows = arguments
            changed = (
                (first + 1) % VOCAB,
                second if what == "prefill" else (second + 3) % VOCAB,
                length + 6,
                rows,
            )
            for given in (arguments, changed):
                for mine, theirs in zip(Flat(module)(*given), exported(*given), strict=True):
                    torch.testing.assert_close(
                        mine, theirs, rtol=0, atol=1e-5, msg=lambda text, w=what: f"{w}: {text}"
                    )
        targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
        assert not {"aten._assert_async.msg", "aten.item.default", "aten.nonzero.default"} & targets


class Flat(nn.Module):
    """A module of the step with its dataclass result as a flat tuple of tensors."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(
        self, first: Tensor, second: Tensor, length: Tensor, past: list[KeyValue]
    ) -> tuple[Tensor, ...]:
        """Tokens or root, count where there is one, drafts where there are any, then rows."""
        out = self.module(first, second, length, past)
        heads = [
            getattr(out, name)
            for name in ("tokens", "count", "root", "drafts")
            if hasattr(out, name)
        ]
        return (*[head for head in heads if head.numel()], *[row for kv in out.rows for row in kv])
