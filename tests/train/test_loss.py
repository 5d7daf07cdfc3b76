"""The loss is eq. 5, whatever the segments, and its memory is that of one segment."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from ssdevice.config import Mode, StreamConfig
from ssdevice.model.loading import build
from ssdevice.model.step import StreamModel, joined
from ssdevice.model.visibility import additive
from ssdevice.text.tokenizer import Sample
from ssdevice.train.batches import collate
from ssdevice.train.loss import IGNORE, LossWeights, StreamingLoss, completion_rows, targets
from ssdevice.train.optimization import MainRows

GAMMA = 3


OWN = {"msa_layers": 0, "adapter_rank": 0, "draft_layers": 1}
KINDS = {
    "shared": (Mode.SHARED, {}),
    "lossless": (Mode.LOSSLESS, {}),
    "draft layers": (Mode.LOSSLESS, OWN),
}


def tiny_model(mode: Mode = Mode.SHARED, **sizes: int) -> StreamModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        max_position_embeddings=256,
    )
    hf = LlamaForCausalLM(config).eval()
    model = build(
        hf,
        StreamConfig(mode=mode, gamma=GAMMA, **{"msa_layers": 2, "adapter_rank": 4, **sizes}),
        128,
    )
    assert model.streams is not None
    if model.own is not None:
        for linear in (model.own.fuse, model.own.embed):
            torch.nn.init.normal_(linear.weight, std=0.3)
    for term in (*model.streams.adapters.values(), model.streams.follow):
        if term is not None:
            torch.nn.init.normal_(term.up.weight, std=0.3)
    return model


def freeze_base(model: StreamModel) -> set[torch.nn.Parameter]:
    """Freeze the backbone but for own layers, whose parameters are returned."""
    model.backbone.requires_grad_(False)
    return set() if model.own is None else set(model.own.requires_grad_(True).parameters())


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 61, (2, 14), generator=generator)
    return tokens, torch.tensor([5, 3]), torch.tensor([14, 9])


def test_rows_begin_at_the_last_prompt_token_and_end_before_the_last_token() -> None:
    _, prompts, lengths = batch()
    rows = completion_rows(prompts, lengths)
    assert rows[0].tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert rows[1].tolist() == [2, 3, 4, 5, 6, 7, -1, -1, -1]


def test_targets_beyond_the_sequence_are_ignored() -> None:
    tokens, prompts, lengths = batch()
    nodes = completion_rows(prompts, lengths)
    ahead = targets(tokens, nodes, lengths, 3)
    assert ahead[1, 0] == tokens[1, 5]
    assert ahead[1, 4].item() == IGNORE and ahead[1, 7].item() == IGNORE


@pytest.mark.parametrize(("by_reach", "soft"), [(False, 0.0), (True, 0.0), (True, 0.3)])
@pytest.mark.parametrize("follow_rank", [0, 5])
@pytest.mark.parametrize("mode", list(Mode))
def test_loss_equals_the_sum_over_nodes_of_equation_5(
    mode: Mode, follow_rank: int, by_reach: bool, soft: float
) -> None:
    model = tiny_model(mode, follow_rank=follow_rank)
    tokens, prompts, lengths = batch()
    weights = LossWeights(1.0, 0.1, by_reach, soft)
    total, per_stream = StreamingLoss(model, weights, nodes=8)(tokens, prompts, lengths)
    with torch.no_grad():
        _, states, _ = StreamingLoss(model, weights).run_main(tokens)
        own = torch.softmax(model.draft_logits(model.backbone.finish(states)), -1)  # at every place

    losses: list[list[torch.Tensor]] = [[] for _ in range(GAMMA + 1)]
    weighted: list[list[torch.Tensor]] = [[] for _ in range(GAMMA + 1)]
    backbone = model.backbone
    for row in range(2):
        for t in range(int(prompts[row]) - 1, int(lengths[row]) - 1):
            ids = tokens[row : row + 1, : t + 1]
            at = torch.arange(t + 1, dtype=torch.int32)[None]
            causal = additive((at[0][:, None] >= at[0][None])[None, None], backbone.mask_value)
            nothing: list[list] = [[] for _ in range(3)]
            rope = backbone.rope(at)
            middle, _ = backbone.run(
                0, model.first_msa, backbone.embed(ids, at), rope, {None: causal}, nothing
            )
            final, kv = backbone.run(model.first_msa, 3, middle, rope, {None: causal}, nothing)
            losses[0].append(cross_entropy(backbone.head(final[:, -1]), tokens[row, t + 1][None]))
            weighted[0].append(losses[0][-1])
            reach = 1.0
            everything = {None: torch.zeros(1, 1, GAMMA, t + 1)}
            chosen = model.chosen(tokens[row : row + 1, t + 1 : t + 2], at[:, -1:] + 1)
            s = model.stream_pass(
                middle[:, -1:], chosen, at[:, -1:], everything, [[], *([pair] for pair in kv)]
            )
            for j in range(GAMMA):
                if t + 2 + j < int(lengths[row]):
                    before = backbone.embed(
                        tokens[row : row + 1, t + 1 + j], torch.tensor([t + 1 + j])
                    )
                    assert model.streams is not None
                    logits = model.draft_logits(
                        model.streams.after(backbone.finish(s[:, j]), before)
                    )
                    losses[j + 1].append(cross_entropy(logits, tokens[row, t + 2 + j][None]))
                    taught = -(own[row, t + 1 + j] * torch.log_softmax(logits[0], -1)).sum()
                    learned = (1 - soft) * losses[j + 1][-1] + soft * taught
                    weighted[j + 1].append(learned * (reach if by_reach else 1.0))
                    reach *= float(torch.softmax(logits[0], -1)[tokens[row, t + 2 + j]])
    expected = torch.stack([torch.stack(each).mean() for each in losses])
    torch.testing.assert_close(per_stream, expected, rtol=1e-4, atol=1e-5)
    means = [torch.stack(each).mean() for each in weighted]
    torch.testing.assert_close(total, means[0] + 0.1 * sum(means[1:]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("by_reach", "soft"), [(False, 0.0), (True, 0.3)])
@pytest.mark.parametrize("layers", [1, 2])
def test_loss_of_draft_layers_is_the_sum_over_nodes_of_drafts_after_right_tokens(
    layers: int, by_reach: bool, soft: float
) -> None:
    model = tiny_model(Mode.LOSSLESS, **{**OWN, "draft_layers": layers})
    tokens, prompts, lengths = batch()
    weights = LossWeights(0.0, 1.0, by_reach, soft)
    total, per_stream = StreamingLoss(model, weights, nodes=8)(tokens, prompts, lengths)
    backbone = model.backbone
    losses = [[] for _ in range(GAMMA)]
    weighted = [[] for _ in range(GAMMA)]
    with torch.no_grad():
        final = StreamingLoss(model, weights).run_main(tokens)[1]
        own = torch.softmax(backbone.head(final), -1)
        for row in range(2):
            for t in range(int(prompts[row]) - 1, int(lengths[row]) - 1):
                at = torch.arange(t + 1, dtype=torch.int32)[None]
                causal = {
                    None: additive((at[0][:, None] >= at[0][None])[None, None], backbone.mask_value)
                }
                past = [(torch.zeros(1, 2, 0, 8), torch.zeros(1, 2, 0, 8)) for _ in backbone.layers]
                h, read, _ = model.run_main_layers(
                    backbone.embed(tokens[row : row + 1, : t + 1], at), at, causal, past
                )
                states = model.states(read)
                _, rows = model.run_top_layers(h, states, at, causal, past)
                runs = [*past[:3], *rows]
                state = states[:, -1:]
                reach = 1.0
                for j in range(GAMMA):
                    if t + 2 + j >= int(lengths[row]):
                        break
                    ahead = at[:, -1:] + (j + 1)
                    state = model.draft_start(state, tokens[row, t + 1 + j][None, None], ahead, j)
                    everything = {None: torch.zeros(1, 1, 1, t + 2 + j)}
                    state, new = backbone.run(
                        3, 3 + layers, state, backbone.rope(ahead), everything, [[r] for r in runs]
                    )
                    runs[3:] = [joined(old, mine) for old, mine in zip(runs[3:], new, strict=True)]
                    logits = model.draft_logits(model.finish(state))[0]
                    losses[j].append(cross_entropy(logits, tokens[row, t + 2 + j][None]))
                    taught = -(own[row, t + 1 + j] * torch.log_softmax(logits[0], -1)).sum()
                    weighted[j].append(
                        (torch.lerp(losses[j][-1], taught, soft)) * (reach if by_reach else 1.0)
                    )
                    reach *= float(torch.softmax(logits[0], -1)[tokens[row, t + 2 + j]])
    torch.testing.assert_close(
        per_stream[1:], torch.stack([torch.stack(x).mean() for x in losses]), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        total, sum(torch.stack(x).mean() for x in weighted), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("kind", KINDS)
def test_segments_change_neither_loss_nor_gradients(kind: str) -> None:
    mode, sizes = KINDS[kind]
    weights = LossWeights(0.0 if mode is Mode.LOSSLESS else 1.0, 0.5)
    grads = []
    for nodes in (4, 128):
        model = tiny_model(mode, **sizes)
        total, _ = StreamingLoss(model, weights, nodes)(*batch())
        total.backward()
        assert model.streams is not None
        grads.append(
            {n: p.grad for n, p in model.streams.named_parameters()} | {"loss": total.detach()}
        )
    assert grads[0].keys() == grads[1].keys()
    for name, value in grads[0].items():
        torch.testing.assert_close(value, grads[1][name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("sizes", [{}, OWN])
def test_lossless_training_keeps_no_graph_of_main_rows(sizes: dict[str, int]) -> None:
    model = tiny_model(Mode.LOSSLESS, **sizes)
    own = freeze_base(model)
    total, _ = StreamingLoss(model, LossWeights(0.0, 1.0))(*batch())
    total.backward()
    assert all(
        p.grad is None
        for n, p in model.backbone.named_parameters()
        if "adapter" not in n and p not in own
    )
    assert all(p.grad is not None for p in own)
    assert model.streams is not None and model.streams.identifiers.grad is not None


@pytest.mark.parametrize("sizes", [{}, OWN])
def test_kept_main_rows_give_the_same_loss_and_gradients(sizes: dict[str, int]) -> None:
    tokens, prompts, lengths = batch()
    rows = zip(tokens.tolist(), lengths.tolist(), prompts.tolist(), strict=True)
    samples = [Sample(tuple(row[:length]), prompt) for row, length, prompt in rows]
    model = tiny_model(Mode.LOSSLESS, **sizes)
    freeze_base(model)
    assert model.streams is not None
    loss = StreamingLoss(model, LossWeights(0.0, 1.0))
    kept = MainRows(loss, 1 << 20)
    for group in (samples, samples, samples[1:], samples[::-1]):
        data = collate(group, 0)
        grads = []
        for known in (kept.of(group, data), None):
            model.zero_grad()
            loss(*data, None, known)[0].backward()
            grads.append({name: p.grad for name, p in model.streams.named_parameters()})
        for name, value in grads[1].items():
            torch.testing.assert_close(grads[0][name], value, rtol=1e-4, atol=1e-6, msg=name)
    assert len(kept.kept) == 2
    little = MainRows(loss, 10)
    assert little.of(samples, collate(samples, 0))[0].shape[0] == 2 and not little.kept


def test_peak_memory_of_streams_is_that_of_one_segment() -> None:
    def saved_bytes(nodes: int) -> int:
        model = tiny_model()
        model.backbone.requires_grad_(False)
        tokens = torch.randint(0, 61, (1, 100), generator=torch.Generator().manual_seed(1))
        total = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            StreamingLoss(model, LossWeights(0.0, 1.0), nodes)(
                tokens, torch.tensor([4]), torch.tensor([100])
            )
        return total

    assert saved_bytes(8) < saved_bytes(128) / 8
