"""``research/bidirectional.py``: equation 3 of the second paper, in training and in decoding; and
``peeking.py``.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from research import bidirectional, peeking
from research.bidirectional import Decoder, SeeingLoss, SeeingStep
from ssdevice.config import Mode, Schedule, StreamConfig
from ssdevice.model.loading import build
from ssdevice.model.step import StreamModel
from ssdevice.model.streams import Streams
from ssdevice.text.tokenizer import Sample
from ssdevice.train.batches import collate
from ssdevice.train.evaluation import stream_ranks
from ssdevice.train.loss import LossWeights
from ssdevice.tree import MISS, Tree
from tests.model.literal import Literal
from tests.model.tiny import VOCAB, WINDOW, tiny_model
from tests.runtime import tiny_bundle as tiny

GAMMA = 3
CONTEXT = 64
BASE = tiny_model("mistral")  # with a window of three
TREE = Tree.of([(0,), (1,), (0, 0), (1, 0), (1, 1), (1, 1, 0)])
PROMPT = torch.randint(0, VOCAB, (7,), generator=torch.Generator().manual_seed(8)).tolist()
CONFIGS = [
    StreamConfig(gamma=GAMMA, msa_layers=2),
    StreamConfig(gamma=GAMMA, msa_layers=1, init_rank=2),
    StreamConfig(mode=Mode.LOSSLESS, gamma=GAMMA, msa_layers=2, adapter_rank=3),
]


def make(config: StreamConfig) -> StreamModel:
    model = build(copy.deepcopy(BASE), config, CONTEXT).eval()
    assert model.streams is not None
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for value in model.streams.parameters():
            value.copy_(0.5 * torch.randn(value.shape, generator=generator))
    return model


def literal_logits(model: StreamModel, tokens: Sequence[int], prompt: int) -> tuple[Tensor, Tensor]:
    """Logits of main rows ``[S, V]`` and of the streams of rows ``prompt - 1`` on, ``[n, γ, V]``,
    row by row.
    """
    assert model.streams is not None
    config = model.streams.config
    literal = Literal(BASE.config, BASE.state_dict(), config, model.streams.state_dict())
    length = len(tokens)
    first = BASE.config.num_hidden_layers - config.msa_layers
    h = [literal.weights["model.embed_tokens.weight"][token] for token in tokens]
    positions = list(range(length))
    sees = [set(range(i + 1)) for i in range(length)]
    for layer in range(first):
        h = literal.layer(layer, h, positions, sees, length)
    for t in range(prompt - 1, length):
        start = h[t]
        if config.init_rank:
            start = literal.streams["f.up.weight"] @ (literal.streams["f.down.weight"] @ start)
        mine = [len(h) + j for j in range(GAMMA)]
        for j in range(GAMMA):
            h.append(start + literal.streams["identifiers"][j])
            positions.append(t + j + 1)
            sees.append(set(range(t + 1)) | {*mine[: j + 1]})  # equation 2
        sees[t] |= {*mine}  # equation 3
    for layer in range(first, BASE.config.num_hidden_layers):
        h = literal.layer(layer, h, positions, sees, length)
    logits = torch.stack([literal.head(row) for row in h]).float()
    return logits[:length], logits[length:].reshape(-1, GAMMA, VOCAB)


@pytest.mark.parametrize("config", CONFIGS)
def test_losses_are_those_of_the_equations(config: StreamConfig) -> None:
    """A batch with padding; each sum over the tokens of its completions."""
    model = make(config)
    draw = torch.Generator().manual_seed(3)
    samples = [
        Sample(tuple(torch.randint(0, VOCAB, (size,), generator=draw).tolist()), prompt)
        for size, prompt in ((13, 7), (9, 4), (5, 3))
    ]
    expected = torch.zeros(GAMMA + 1)
    for sample in samples:
        main, streams = literal_logits(model, sample.ids, sample.prompt)
        for t in range(sample.prompt - 1, len(sample.ids) - 1):
            rows = [main[t], *streams[t - sample.prompt + 1]]
            for ahead, row in enumerate(rows):
                if t + 1 + ahead < len(sample.ids):
                    expected[ahead] -= torch.log_softmax(row, -1)[sample.ids[t + 1 + ahead]]
    loss = SeeingLoss(model, LossWeights(1.0, 0.1, summed=True))
    batch = collate(samples, 0)
    total, means = loss(*batch)
    torch.testing.assert_close(means * loss.counts(*batch), expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(total, expected[0] + 0.1 * expected[1:].sum(), rtol=1e-4, atol=1e-3)
    total.backward()
    means_only = SeeingLoss(model, LossWeights(1.0, 0.1))(*batch)[0]
    torch.testing.assert_close(means_only, means[0] + 0.1 * means[1:].sum())


@pytest.mark.parametrize("config", CONFIGS)
@torch.no_grad()
def test_every_node_of_a_step_is_as_in_the_equations(config: StreamConfig) -> None:
    model = make(config)
    decoder = Decoder(model, TREE, CONTEXT)
    main, streams = literal_logits(model, PROMPT, len(PROMPT))
    out = decoder.start(PROMPT)
    assert int(out.tokens[0]) == int(main[-1].argmax())
    assert out.drafts.tolist() == streams[-1].topk(TREE.width).indices.tolist()
    root = int(out.tokens[0])
    given = torch.tensor([[4, 8], [15, 16], [23, 42]], dtype=torch.int32)
    found = decoder.advance(decoder.step, root, given)
    for node, path in enumerate(TREE.paths):
        tokens = [*PROMPT, root, *(int(given[depth][rank]) for depth, rank in enumerate(path))]
        main, streams = literal_logits(model, tokens, len(PROMPT))
        torch.testing.assert_close(found.logits[node], main[-1], rtol=1e-4, atol=1e-4)
        if not node:  # nothing was accepted
            assert int(found.count) == 1
            assert found.drafts.tolist() == streams[-1].topk(TREE.width).indices.tolist()


@torch.no_grad()
def test_streams_of_other_nodes_change_nothing_and_its_own_do() -> None:
    model = make(CONFIGS[0])
    step = SeeingStep(model, TREE, TREE.width, Schedule.FUSED)
    given = torch.tensor([[4, 8], [15, 16], [23, 42]], dtype=torch.int32)
    start = Streams.start

    def logits(moved: Sequence[int]) -> Tensor:
        """Main logits with the streams of some nodes somewhere else."""

        def begin(self: Streams, h: Tensor, gamma: int, chosen: Tensor | None = None) -> Tensor:
            found = start(self, h, gamma, chosen)
            for node in moved:
                found[:, node * gamma : (node + 1) * gamma] += 1.0
            return found

        decoder = Decoder(model, TREE, CONTEXT)
        root = int(decoder.start(PROMPT).tokens[0])
        with mock.patch.object(Streams, "start", begin):
            return decoder.advance(step, root, given).logits

    before = logits([])
    for node in range(TREE.size):
        # The rows that a node sees, its ancestors', have streams of their own.
        after = logits([other for other in range(TREE.size) if other not in TREE.path_table[node]])
        assert torch.equal(after[node], before[node])
        mine = logits([node])
        path = TREE.path_table
        below = [
            i
            for i in range(TREE.size)
            if node in path[i] and TREE.depths[i] - TREE.depths[node] < WINDOW
        ]
        for i in range(TREE.size):
            assert torch.equal(mine[i], before[i]) == (i not in below)


@torch.no_grad()
def test_plain_steps_and_speculative_ones_give_the_same_tokens() -> None:
    """With oracle drafts: the plain continuation along one path of the tree, wrong tokens around
    it.
    """
    counts = set[int]()
    for config in CONFIGS:
        model = make(config)
        plain = Decoder(model, TREE, CONTEXT).answer(PROMPT, (), 24, drafting=False)[0]
        for path in TREE.paths:
            decoder = Decoder(model, TREE, CONTEXT)
            found = [int(decoder.start(PROMPT).tokens[0])]
            while len(found) + TREE.emitted <= len(plain):
                at = len(found)
                drafts = torch.tensor(
                    [[(plain[at + d] + 1 + r) % VOCAB for r in range(2)] for d in range(GAMMA)]
                )
                for depth, rank in enumerate(path):
                    drafts[depth, rank] = plain[at + depth]
                out = decoder.advance(decoder.step, found[-1], drafts.int())
                counts.add(int(out.count))
                assert int(out.count) == len(path) + 1
                found += out.tokens[: int(out.count)].tolist()
            assert found == plain[: len(found)]
        assert Decoder(model, TREE, CONTEXT).answer(PROMPT, (), 24, drafting=True)[0] == plain
        stop = (plain[5],)
        assert (
            Decoder(model, TREE, CONTEXT).answer(PROMPT, stop, 24, True)[0]
            == plain[: plain.index(plain[5]) + 1]
        )
    assert counts == {*range(1, TREE.emitted + 1)}


@torch.no_grad()
def test_ranks_are_those_of_steps() -> None:
    model = make(CONFIGS[0])
    (sample,) = bidirectional.spoken(model, (), [PROMPT], 9)
    with bidirectional.seeing():
        (ranks,) = stream_ranks(model, [sample])
    (blind,) = stream_ranks(model, [sample])
    assert ranks != blind
    decoder = Decoder(model, Tree.full(VOCAB - 1, 1), CONTEXT)
    out = decoder.start(PROMPT)
    for at, token in enumerate(sample.ids[len(PROMPT) :]):
        ahead = sample.ids[len(PROMPT) + at + 1 :][:GAMMA]
        drafts = [
            row.index(t) if t in row else VOCAB - 1
            for row, t in zip(out.drafts.tolist(), ahead, strict=False)
        ]
        assert ranks[at][: len(ahead)] == drafts and set(ranks[at][len(ahead) :]) <= {MISS}
        out = decoder.advance(decoder.plain, token, out.drafts)


@torch.no_grad()
@pytest.mark.parametrize("name", peeking.ARMS)
def test_what_a_row_knows_of_the_tokens_after_it(name: str) -> None:
    """Which tokens change what row t chooses: with the changed mask the one to choose, too."""
    model = build(tiny_model("llama"), StreamConfig(gamma=GAMMA, msa_layers=1), CONTEXT).eval()
    with peeking.peeking(peeking.ARMS[name]):
        loss = bidirectional.answers.StreamingLoss(model, LossWeights(1.0, 0.0))
    tokens = torch.randint(0, VOCAB, (1, 14), generator=torch.Generator().manual_seed(2))
    t = 5
    # type: ignore[operator]
    before = loss.states(tokens)[0, t]
    known = []
    for at in range(14):
        other = tokens.clone()
        other[0, at] = (other[0, at] + 1) % VOCAB
        if not torch.equal(loss.states(other)[0, t], before):  # type: ignore[operator]
            known.append(at - t)
    past = [*range(-t, 1)]
    seen = [*range(2, GAMMA + 2)]
    if name == "the rows of these tokens":
        assert {*past, 1, *seen} < {*known}
    else:
        assert known == [*past, *(seen if name == "these tokens alone" else [])]


def test_the_script_trains_both_arms_and_compares_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"prompt": text, "completion": text[::-1] * 2} for text in ("abcab", "bca", "hello", "abc")
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [
        "--model",
        str(tiny.base_folder()),
        "--data",
        str(data),
        "--dev",
        str(data),
        "--out",
        str(tmp_path),
    ]
    few = [
        "--steps",
        "2",
        "--batch-size",
        "2",
        "--max-length",
        "64",
        "--answer-tokens",
        "8",
        "--gamma",
        "2",
    ]
    bidirectional.main([*files, *few, "--msa-layers", "1", "--rank", "2"])
    shown = capsys.readouterr().out
    assert "| main rows only |" in shown and "| and their streams |" in shown
    assert "answers by plain steps that are those of speculative ones: 4 of 4" in shown
    bidirectional.main([*files, *few, "--msa-layers", "1", "--rank", "2"])
    assert capsys.readouterr().out == shown
    peeking.main([*files, *few, "--msa-layers", "1", "--rank", "2"])
    shown = capsys.readouterr().out
    assert all(f'"rows see": "{name}", "next token": ' in shown for name in peeking.ARMS)
