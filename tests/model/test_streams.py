"""The streams against their equations (2402.11131 eq. 1 to 4), written out row by row and without a cache.

``Literal`` recomputes a decoder of Mistral's kind from the token sequence for every row, one attention sum at a time,
with nothing of ssdevice in it but the weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ssdevice.config import Mode, Schedule, StreamConfig, StreamMLP
from ssdevice.model.loading import build
from ssdevice.model.step import PrefillModule, StepModule, StreamModel
from ssdevice.model.streams import LowRank
from ssdevice.tree import Tree
from tests.model.tiny import LAYERS, VOCAB, WINDOW, tiny_model
from tests.model.torch_driver import TorchDriver, int32

GAMMA, K = 3, 2
TREE = Tree.of([(0,), (1,), (0, 0), (1, 0), (1, 1), (1, 1, 0)])
CONTEXT = 32
BASE = tiny_model("mistral")
PROMPT = torch.randint(0, VOCAB, (11,), generator=torch.Generator().manual_seed(8)).tolist()
CONFIGS = {
    "shared": StreamConfig(gamma=GAMMA, msa_layers=2),
    "shared, one layer, f of rank 2": StreamConfig(gamma=GAMMA, msa_layers=1, init_rank=2),
    "lossless, beside the MLP": StreamConfig(mode=Mode.LOSSLESS, gamma=GAMMA, msa_layers=2, adapter_rank=3),
    "lossless, for the MLP": StreamConfig(
        mode=Mode.LOSSLESS, gamma=GAMMA, msa_layers=2, adapter_rank=3, init_rank=2, stream_mlp=StreamMLP.ADAPTER
    ),
    "lossless, seeing the chosen token": StreamConfig(
        mode=Mode.LOSSLESS, gamma=GAMMA, msa_layers=2, adapter_rank=3, init_rank=2, token_rank=2
    ),
    "shared, drafts that follow each other": StreamConfig(gamma=GAMMA, msa_layers=2, follow_rank=2),
    "lossless, seeing the chosen token, drafts that follow each other": StreamConfig(
        mode=Mode.LOSSLESS, gamma=GAMMA, msa_layers=2, adapter_rank=3, token_rank=2, follow_rank=3
    ),
    "heads": StreamConfig(mode=Mode.LOSSLESS, gamma=GAMMA, msa_layers=0, adapter_rank=3),
    "Hydra's heads": StreamConfig(mode=Mode.LOSSLESS, gamma=GAMMA, msa_layers=0, adapter_rank=3, follow_rank=2),
}


class Literal:
    """Logits of main rows and of streams, straight from the equations; slow on purpose."""

    def __init__(self, config: StreamConfig, streams: torch.nn.Module) -> None:
        self.config = config
        self.hf = BASE.config
        self.weights = {name: value.double() for name, value in BASE.state_dict().items()}
        self.streams = {name: value.double() for name, value in streams.state_dict().items()}

    def linear(self, layer: int, name: str, x: Tensor, stream: bool) -> Tensor:
        """W x, and on stream rows in lossless mode W x + B A x."""
        y = self.weights[f"model.layers.{layer}.{name}.weight"] @ x
        key = f"adapters.{layer}-{name.replace('.', '-')}"
        if stream and f"{key}.down.weight" in self.streams:
            y = y + self.streams[f"{key}.up.weight"] @ (self.streams[f"{key}.down.weight"] @ x)
        return y

    def norm(self, name: str, x: Tensor) -> Tensor:
        return self.weights[f"model.{name}.weight"] * x / (x.pow(2).mean() + self.hf.rms_norm_eps).sqrt()

    def rotate(self, heads: Tensor, position: int) -> Tensor:
        """Each pair (i, i + dim/2) of a head turned by position * theta_i."""
        dim = self.hf.head_dim
        out = heads.clone()
        for i in range(dim // 2):
            angle = position * self.hf.rope_parameters["rope_theta"] ** (-2 * i / dim)
            a, b = heads[:, i], heads[:, i + dim // 2]
            out[:, i] = a * math.cos(angle) - b * math.sin(angle)
            out[:, i + dim // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def layer(
        self, layer: int, h: Sequence[Tensor], positions: Sequence[int], sees: Sequence[set[int]], main: int
    ) -> list[Tensor]:
        """One decoder layer on rows ``h``, of which the first ``main`` are main rows; row i sees rows ``sees[i]``."""
        heads, groups, dim = (
            self.hf.num_attention_heads,
            self.hf.num_attention_heads // self.hf.num_key_value_heads,
            self.hf.head_dim,
        )
        q, k, v = [], [], []
        for i, row in enumerate(h):
            x = self.norm(f"layers.{layer}.input_layernorm", row)
            stream = i >= main
            q.append(self.rotate(self.linear(layer, "self_attn.q_proj", x, stream).view(-1, dim), positions[i]))
            k.append(self.rotate(self.linear(layer, "self_attn.k_proj", x, stream).view(-1, dim), positions[i]))
            v.append(self.linear(layer, "self_attn.v_proj", x, stream).view(-1, dim))
        out = []
        for i, row in enumerate(h):
            stream = i >= main
            seen = sorted(j for j in sees[i] if positions[i] - positions[j] < WINDOW)
            mixed = []
            for head in range(heads):
                scores = torch.stack([q[i][head] @ k[j][head // groups] / math.sqrt(dim) for j in seen])
                weights = scores.softmax(0)
                mixed.append(sum(w * v[j][head // groups] for w, j in zip(weights, seen, strict=True)))
            row = row + self.linear(layer, "self_attn.o_proj", torch.cat(mixed), stream)
            out.append(row + self.mlp(layer, self.norm(f"layers.{layer}.post_attention_layernorm", row), stream))
        return out

    def mlp(self, layer: int, x: Tensor, stream: bool) -> Tensor:
        silu = torch.nn.functional.silu
        key = f"adapters.{layer}-mlp"
        if stream and f"{key}.down.weight" in self.streams:
            return self.streams[f"{key}.up.weight"] @ silu(self.streams[f"{key}.down.weight"] @ x)
        gate, up = (self.linear(layer, f"mlp.{name}_proj", x, stream) for name in ("gate", "up"))
        return self.linear(layer, "mlp.down_proj", silu(gate) * up, stream)

    def stream_logits(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Main logits ``[V]`` and stream logits ``[γ, V]`` of the last of ``tokens``."""
        t = len(tokens) - 1
        first = LAYERS - self.config.msa_layers
        h = [self.weights["model.embed_tokens.weight"][token] for token in tokens]
        positions = list(range(t + 1))
        sees = [set(range(i + 1)) for i in range(t + 1)]
        for layer in range(first):
            h = self.layer(layer, h, positions, sees, t + 1)
        # S_tj at layer N - N_s = f(M_t) + P_j (+ g of the chosen token), at position t + j (eq. 3 and 4).
        final = h
        for layer in range(first, LAYERS):
            final = self.layer(layer, final, positions, sees, t + 1)
        embedding = self.weights["model.embed_tokens.weight"][int(self.head(final[t]).argmax())]
        for j in range(1, GAMMA + 1):
            start = h[t]
            if self.config.init_rank:
                start = start + self.streams["transform.up.weight"] @ (self.streams["transform.down.weight"] @ h[t])
            if self.config.token_rank:
                both = torch.cat([h[t], embedding])
                ahead = self.streams["token.up.weight"] @ (self.streams["token.down.weight"] @ both)
                start = start + ahead.view(GAMMA, -1)[j - 1]
            if not self.config.msa_layers:
                inner = torch.nn.functional.silu(self.streams[f"heads.{j - 1}.down.weight"] @ h[t])
                start = start + self.streams[f"heads.{j - 1}.up.weight"] @ inner
            h = [*h, start + self.streams["identifiers"][j - 1]]
            positions.append(t + j)
            # Stream j sees M_1 .. M_t and S_t1 .. S_tj; no main row sees a stream (eq. 1 and 2).
            sees.append(set(range(t + 1)) | {t + i for i in range(1, j + 1)})
        for layer in range(first, LAYERS):
            h = self.layer(layer, h, positions, sees, t + 1)
        logits = [self.head(h[t])]
        for row in h[t + 1 :]:
            logits.append(self.head(row, self.weights["model.embed_tokens.weight"][int(logits[-1].argmax())]))
        return logits[0], torch.stack(logits[1:])

    def head(self, row: Tensor, before: Tensor | None = None) -> Tensor:
        """Logits of a final state; ``before`` embeds the token before the one that a stream guesses."""
        x = self.norm("norm", row)
        if before is not None and self.config.follow_rank:
            inner = torch.nn.functional.silu(self.streams["follow.down.weight"] @ torch.cat([x, before]))
            x = x + self.streams["follow.up.weight"] @ inner
        return self.weights["lm_head.weight"] @ x


def make(config: StreamConfig) -> StreamModel:
    model = build(copy.deepcopy(BASE), config, CONTEXT).eval()
    assert model.streams is not None
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for value in model.streams.parameters():
            value.copy_(0.5 * torch.randn(value.shape, generator=generator))
    return model


def best_two(logits: Tensor) -> list[list[int]]:
    """The ids of the K largest logits of each row."""
    return [sorted(range(VOCAB), key=lambda token: -float(row[token]))[:K] for row in logits]


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_drafts_of_prefill_and_both_schedules_are_those_of_the_equations(name: str) -> None:
    model = make(CONFIGS[name])
    assert model.streams is not None
    literal = Literal(CONFIGS[name], model.streams)
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
    given[0][1], given[1][1] = first, second
    after, expected_next = literal.stream_logits([*PROMPT, root, first, second])

    for schedule in [Schedule.DEFERRED] if CONFIGS[name].token_rank else Schedule:
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
    assert model.streams is not None
    literal = Literal(CONFIGS["lossless, beside the MLP"], model.streams)
    driver = TorchDriver(model, TREE, K, Schedule.FUSED, CONTEXT, chunk=len(PROMPT))
    driver.prefill(PROMPT, 0)
    seen: list[Tensor] = []
    handle = model.backbone.layers[-1].register_forward_hook(lambda module, args, out: seen.append(out))
    given = [[4, 8], [15, 16], [23, 42]]
    driver.step(3, given, len(PROMPT))
    handle.remove()
    streams = model.backbone.head(seen[-1])[0, TREE.size :].reshape(TREE.size, GAMMA, VOCAB)
    for node, path in enumerate(TREE.paths):
        tokens = [*PROMPT, 3, *(given[depth][rank] for depth, rank in enumerate(path))]
        torch.testing.assert_close(streams[node], literal.stream_logits(tokens)[1].float(), rtol=1e-4, atol=1e-4)


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
        out = PrefillModule(model, len(PROMPT), K)(int32(*PROMPT), int32(len(PROMPT)), int32(0), empty)
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
        drafts.append(step(int32(5), torch.tensor([[4, 8], [15, 16], [23, 42]], dtype=torch.int32), int32(0), empty))
    assert torch.equal(drafts[0].drafts, drafts[1].drafts)
    assert torch.equal(LowRank(4, 6, 2)(torch.randn(3, 4)), torch.zeros(3, 6))
