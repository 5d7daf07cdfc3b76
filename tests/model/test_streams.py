"""The streams against their equations, which ``Literal`` writes out by row, without a cache."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from ssdevice.config import Mode, Schedule, StreamConfig, StreamMLP
from ssdevice.model.loading import build
from ssdevice.model.step import PrefillModule, StepModule, StreamModel
from ssdevice.model.streams import LowRank
from ssdevice.tree import Tree
from tests.model.literal import Literal
from tests.model.tiny import LAYERS, VOCAB, tiny_model
from tests.model.torch_driver import TorchDriver, int32

GAMMA = 3
K = 2
TREE = Tree.of([(0,), (1,), (0, 0), (1, 0), (1, 1), (1, 1, 0)])
CONTEXT = 32
BASE = tiny_model("mistral")
PROMPT = torch.randint(0, VOCAB, (11,), generator=torch.Generator().manual_seed(8)).tolist()
CONFIGS = {
    "shared": StreamConfig(gamma=GAMMA, msa_layers=2),
    "shared, one layer, f of rank 2": StreamConfig(gamma=GAMMA, msa_layers=1, init_rank=2),
    "lossless, beside the MLP": StreamConfig(
        mode=Mode.LOSSLESS, gamma=GAMMA, msa_layers=2, adapter_rank=3
    ),
    "lossless, for the MLP": StreamConfig(
        mode=Mode.LOSSLESS,
        gamma=GAMMA,
        msa_layers=2,
        adapter_rank=3,
        init_rank=2,
        stream_mlp=StreamMLP.ADAPTER,
    ),
    "lossless, only adapters for the MLP": StreamConfig(
        mode=Mode.LOSSLESS,
        gamma=GAMMA,
        msa_layers=2,
        adapter_rank=3,
        stream_mlp=StreamMLP.ADAPTER_ONLY,
    ),
    "lossless, seeing the chosen token": StreamConfig(
        mode=Mode.LOSSLESS, gamma=GAMMA, msa_layers=2, adapter_rank=3, init_rank=2, token_rank=2
    ),
    "shared, drafts that follow each other": StreamConfig(gamma=GAMMA, msa_layers=2, follow_rank=2),
    "lossless, seeing the chosen token, drafts that follow each other": StreamConfig(
        mode=Mode.LOSSLESS, gamma=GAMMA, msa_layers=2, adapter_rank=3, token_rank=2, follow_rank=3
    ),
    "heads": StreamConfig(mode=Mode.LOSSLESS, gamma=GAMMA, msa_layers=0, adapter_rank=3),
    "following heads": StreamConfig(
        mode=Mode.LOSSLESS, gamma=GAMMA, msa_layers=0, adapter_rank=3, follow_rank=2
    ),
    "draft layers": StreamConfig(
        mode=Mode.LOSSLESS, gamma=GAMMA, msa_layers=0, adapter_rank=0, draft_layers=1
    ),
    "two draft layers": StreamConfig(
        mode=Mode.LOSSLESS, gamma=GAMMA, msa_layers=0, adapter_rank=0, draft_layers=2
    ),
}


def make(config: StreamConfig) -> StreamModel:
    model = build(copy.deepcopy(BASE), config, CONTEXT).eval()
    assert model.streams is not None
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for value in model.streams.parameters():
            value.copy_(0.5 * torch.randn(value.shape, generator=generator))
    return model


def literal_of(config: StreamConfig, model: StreamModel) -> Literal:
    assert model.streams is not None
    return Literal(BASE.config, BASE.state_dict(), config, model.streams.state_dict())


def best_two(logits: Tensor) -> list[list[int]]:
    """The ids of the K largest logits of each row."""
    return [sorted(range(VOCAB), key=lambda token: -float(row[token]))[:K] for row in logits]


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_drafts_of_prefill_and_both_schedules_are_those_of_the_equations(name: str) -> None:
    model = make(CONFIGS[name])
    literal = literal_of(CONFIGS[name], model)
    stream_logits: list[Tensor] = []
    draft_logits = model.draft_logits

    def noted(finished: Tensor) -> Tensor:
        stream_logits.append(draft_logits(finished)[0])
        return stream_logits[-1][None]

    model.draft_logits = noted  # type: ignore[method-assign]

    def last_logits() -> Tensor:
        return torch.cat(stream_logits)[-GAMMA:]

    main, expected = literal.stream_logits(PROMPT)
    root = int(main.argmax())
    given = [[4, 8], [15, 16], [23, 42]]
    # Node 5 is (1, 1): make its path true, so that it is the end node.
    first = int(literal.stream_logits([*PROMPT, root])[0].argmax())
    second = int(literal.stream_logits([*PROMPT, root, first])[0].argmax())
    given[0][1] = first
    given[1][1] = second
    after, expected_next = literal.stream_logits([*PROMPT, root, first, second])

    for schedule in [Schedule.DEFERRED] if CONFIGS[name].waits else Schedule:
        driver = TorchDriver(model, TREE, K, schedule, CONTEXT, chunk=4)
        for at in range(0, len(PROMPT), 4):
            prefilled = driver.prefill(PROMPT[at : at + 4], at)
        assert prefilled == (root, best_two(expected))
        torch.testing.assert_close(last_logits(), expected.float(), rtol=1e-4, atol=1e-4)
        out = driver.step(root, given, len(PROMPT))
        assert (out.count, out.tokens[:3]) == (3, [first, second, int(after.argmax())])
        torch.testing.assert_close(last_logits(), expected_next.float(), rtol=1e-4, atol=1e-4)
        assert out.drafts == best_two(expected_next)


@torch.no_grad()
def test_fused_streams_of_every_node_are_those_of_the_equations() -> None:
    model = make(CONFIGS["lossless, beside the MLP"])
    literal = literal_of(CONFIGS["lossless, beside the MLP"], model)
    driver = TorchDriver(model, TREE, K, Schedule.FUSED, CONTEXT, chunk=len(PROMPT))
    driver.prefill(PROMPT, 0)
    seen: list[Tensor] = []
    handle = model.backbone.layers[-1].register_forward_hook(
        lambda module, args, out: seen.append(out)
    )
    given = [[4, 8], [15, 16], [23, 42]]
    driver.step(3, given, len(PROMPT))
    handle.remove()
    streams = model.backbone.head(seen[-1])[0, TREE.size :].reshape(TREE.size, GAMMA, VOCAB)
    for node, path in enumerate(TREE.paths):
        tokens = [*PROMPT, 3, *(given[depth][rank] for depth, rank in enumerate(path))]
        torch.testing.assert_close(
            streams[node], literal.stream_logits(tokens)[1].float(), rtol=1e-4, atol=1e-4
        )


@torch.no_grad()
def test_a_shallower_tree_drops_the_deepest_streams_only() -> None:
    config = CONFIGS["shared"]
    torch.manual_seed(1)
    full = build(copy.deepcopy(BASE), config, CONTEXT).eval()
    short = build(copy.deepcopy(BASE), config, CONTEXT, gamma=2).eval()
    assert full.streams is not None and short.streams is not None
    short.streams.load_state_dict(full.streams.state_dict())
    results = []
    for model in (full, short):
        empty = [(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16))] * LAYERS
        out = PrefillModule(model, len(PROMPT), K)(
            int32(*PROMPT), int32(len(PROMPT)), int32(0), empty
        )
        results.append(out.drafts)
    assert torch.equal(results[0][:2], results[1])


@torch.no_grad()
def test_streams_start_as_no_change_of_the_base() -> None:
    lossless = build(copy.deepcopy(BASE), CONFIGS["lossless, beside the MLP"], CONTEXT).eval()
    plain = build(copy.deepcopy(BASE), CONFIGS["shared"], CONTEXT).eval()
    assert lossless.streams is not None and plain.streams is not None
    lossless.streams.identifiers.copy_(plain.streams.identifiers)
    drafts = []
    for model in (lossless, plain):
        step = StepModule(model, TREE, K, Schedule.FUSED)
        empty = [(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16))] * LAYERS
        drafts.append(
            step(
                int32(5),
                torch.tensor([[4, 8], [15, 16], [23, 42]], dtype=torch.int32),
                int32(0),
                empty,
            )
        )
    assert torch.equal(drafts[0].drafts, drafts[1].drafts)
    assert torch.equal(LowRank(4, 6, 2)(torch.randn(3, 4)), torch.zeros(3, 6))
