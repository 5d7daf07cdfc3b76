"""Where streams start: the least squares of the rows they stand for, and attention that leaves out
other nodes.
"""

from __future__ import annotations

import pytest
import torch

from ssdevice.config import Mode
from ssdevice.model.attention import Attending, attend
from ssdevice.text.tokenizer import Sample
from ssdevice.train.batches import collate, pieces
from ssdevice.train.loss import LossWeights, StreamingLoss, attend_by_node, completion_rows
from ssdevice.train.start import Moments
from tests.train.test_loss import GAMMA, tiny_model


def samples(count: int, seed: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Sample(tuple(torch.randint(0, 61, (40,), generator=generator).tolist()), 4)
        for _ in range(count)
    ]


@pytest.mark.parametrize(("rank", "init_rank"), [(3, 0), (200, 0), (200, 5)])
def test_streams_start_where_least_squares_puts_them(rank: int, init_rank: int) -> None:
    """At full rank this is torch.linalg.lstsq's solution; at a smaller one it explains less, and
    the mean stays.
    """
    model = tiny_model(Mode.LOSSLESS, token_rank=rank, init_rank=init_rank)
    assert model.streams is not None
    loss = StreamingLoss(model, LossWeights(0.0, 1.0))
    f = torch.eye(32)
    if model.streams.f is not None:
        torch.nn.init.normal_(model.streams.f.up.weight, std=0.3)
        f = (model.streams.f.up.weight @ model.streams.f.down.weight).detach()
    moments = Moments(model)
    x = []
    y = []
    for group in pieces(samples(60, 1), 400):
        batch = collate(group, 0)
        with torch.no_grad():
            middle, _, _ = loss.run_main(batch.tokens)
        moments.add(batch, middle)
        for row, at in ((r, a) for r in range(len(group)) for a in range(3, 40 - GAMMA)):
            chosen = model.backbone.embed(
                batch.tokens[row : row + 1, at + 1 : at + 2], torch.tensor([[at + 1]])
            )[0, 0]
            x.append(torch.cat([middle[row, at], chosen, torch.ones(1)]))
            y.append(
                torch.cat([middle[row, at + j] - f @ middle[row, at] for j in range(1, GAMMA + 1)])
            )
    inputs = torch.stack(x).double()
    wanted = torch.stack(y).double()
    assert moments.nodes == len(x)
    explained = moments.fit()

    width = middle.shape[-1]
    here = inputs[:, :width].float()
    with torch.no_grad():
        start = model.streams.start(here[None], GAMMA, inputs[:, width : 2 * width].float()[None])
    got = (start.view(len(x), GAMMA, width) - (here @ f.T)[:, None]).flatten(1).double()
    best = inputs @ torch.linalg.lstsq(inputs, wanted, driver="gelsd").solution
    torch.testing.assert_close(got.mean(0), wanted.mean(0), rtol=1e-3, atol=1e-4)
    spread = (wanted - wanted.mean(0)).square().mean(0)
    measured = 1 - float(((wanted - got.detach()).square().mean(0) / spread).mean())
    possible = 1 - float(((wanted - best).square().mean(0) / spread).mean())
    assert measured == pytest.approx(explained, abs=2e-3)
    assert (
        measured == pytest.approx(possible, abs=2e-3)
        if rank == 200
        else 0 < measured < possible - 0.05
    )


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_attention_by_node_is_attention(softcap: float | None) -> None:
    torch.manual_seed(2)
    past = 7
    nodes = 5
    kv_heads = 2
    groups = 3
    dim = 8
    rows = nodes * GAMMA
    keys = [torch.randn(2, kv_heads, n, dim) for n in (past, rows)]
    values = [torch.randn(2, kv_heads, n, dim) for n in (past, rows)]
    own = torch.eye(nodes).repeat_interleave(GAMMA, 0).repeat_interleave(GAMMA, 1).bool()
    own &= torch.ones(GAMMA, GAMMA).tril().bool().repeat(nodes, nodes)
    visible = torch.cat([torch.rand(2, 1, rows, past) < 0.6, own.expand(2, 1, rows, rows)], dim=-1)
    mask = torch.where(visible, 0.0, -1e9)
    query = torch.randn(2, kv_heads * groups, rows, dim)
    asked = Attending(query, keys, values, mask, torch.zeros(1, rows), dim**-0.5, softcap)
    torch.testing.assert_close(attend_by_node(asked, GAMMA), attend(asked))


def test_pieces_hold_all_samples_within_the_limit() -> None:
    some = [Sample(tuple(range(2 + n)), 2) for n in (9, 1, 30, 4, 9, 9, 3)]
    groups = pieces(some, 20)
    assert sorted(len(s.ids) for g in groups for s in g) == sorted(len(s.ids) for s in some)
    for group in groups:
        batch = collate(group, 0)
        assert completion_rows(batch.prompts, batch.lengths).numel() <= 20 or len(group) == 1
