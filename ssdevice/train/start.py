"""Where streams start before they are trained: the best linear guess of the rows they stand for.

Stream j of node t stands for the main row of position t + j, which the layers below N - N_s have
not computed. With ``token_rank`` it starts from f(M_t) + P_j + g_j(M_t, E), where E is the
embedding of the token after t. Here g and P become the reduced-rank least squares (Izenman, 1975)
of M_{t+j} - f(M_t) over the training rows.
"""

from math import ceil

import torch
from torch import Tensor

from ssdevice.model.step import StreamModel
from ssdevice.train.batches import Batch
from ssdevice.train.loss import completion_rows

NODES_PER_INPUT = 32
"""Nodes to fit per input of g: SmolLM2's fit guessed held rows as well from 28 as from 115."""
RIDGE = 1e-3
"""Share of each input's own variance that is added to it."""
INNER = 5.0
"""Size to which ``scale_follow`` brings states and embeddings, as in docs/training.md."""


class Moments:
    """Sums over nodes of products of inputs x and targets y.

    x = [M_t; E; 1] and y = [M_{t+1} - f(M_t); ..; M_{t+γ} - f(M_t)].
    """

    def __init__(self, model: StreamModel) -> None:
        self.model = model
        width = int(model.backbone.config.hidden_size)
        self.xx = torch.zeros(2 * width + 1, 2 * width + 1, dtype=torch.float64)
        self.xy = torch.zeros(2 * width + 1, model.gamma * width, dtype=torch.float64)
        self.yy = torch.zeros(model.gamma * width, dtype=torch.float64)
        self.wanted = NODES_PER_INPUT * 2 * width

    @property
    def nodes(self) -> int:
        """How many nodes were added: the sum of the ones in x."""
        return int(self.xx[-1, -1])

    @torch.no_grad()
    def add(self, batch: Batch, middle: Tensor) -> None:
        """Add the nodes of a batch whose γ next rows exist.

        ``middle [B, S, D]``: the batch's main rows at layer N - N_s.
        """
        gamma = self.model.gamma
        nodes = completion_rows(batch.prompts, batch.lengths)
        whole = (nodes >= 0) & (nodes + gamma < batch.lengths[:, None])
        row, place = torch.nonzero(whole, as_tuple=True)
        at = nodes[row, place]
        chosen = self.model.chosen(batch.tokens[row, at + 1][None], at[None] + 1)
        assert chosen is not None and self.model.streams is not None
        here = middle[row, at].float()
        x = torch.cat([here, chosen[0].float(), here.new_ones(len(at), 1)], dim=1)
        start = self.model.streams.moved(here)
        y = torch.cat([middle[row, at + j].float() - start for j in range(1, gamma + 1)], dim=1)
        self.xx += (x.T @ x).cpu()
        self.xy += (x.T @ y).cpu()
        self.yy += y.square().sum(0).cpu()

    @torch.no_grad()
    def fit(self) -> float:
        """Set g and P of the model's streams.

        Returns the share of the targets' variance that g explains. Every channel and stream counts
        by its own size, because a few channels of real models are far larger than the rest.
        """
        streams = self.model.streams
        assert streams is not None and streams.token is not None
        mean = self.xx[-1] / self.nodes
        goal = self.xy[-1] / self.nodes
        cov = self.xx[:-1, :-1] / self.nodes - torch.outer(mean[:-1], mean[:-1])
        size = (self.yy / self.nodes - goal.square()).clamp(min=1e-12).sqrt()
        cross = (self.xy[:-1] / self.nodes - torch.outer(mean[:-1], goal)) / size
        cov += torch.diag(RIDGE * cov.diagonal().clamp(min=1e-9))
        # y = x A B with x whitened: B spans the directions of largest explained variance.
        root = torch.linalg.cholesky(cov)
        whitened = torch.linalg.solve_triangular(root, cross, upper=False)
        explained, directions = torch.linalg.eigh(whitened @ whitened.T)
        rank = min(streams.config.token_rank, len(explained))
        explained = explained[-rank:]
        directions = directions[:, -rank:]
        down = torch.linalg.solve_triangular(root.T, directions, upper=True)
        up = (directions.T @ whitened) * size
        scale = (up.norm() / down.norm()).sqrt()  # both factors are trained at one rate
        streams.token.down.weight[:rank] = (down * scale).T
        streams.token.up.weight[:, :rank] = (up / scale).T
        streams.identifiers.copy_((goal - mean[:-1] @ down @ up).view_as(streams.identifiers))
        return float(explained.sum() / len(size))


@torch.no_grad()
def scale_follow(model: StreamModel) -> None:
    """Scale the first factor of an untrained ``follow``, so that states and embeddings count alike.

    Their sizes differ from model to model.
    """
    backbone = model.backbone
    streams = model.streams
    assert streams is not None and streams.follow is not None
    weight = streams.follow.down.weight
    finished = backbone.finish(torch.randn(256, backbone.config.hidden_size, device=weight.device))
    apart = ceil(streams.vocab / 256)
    tokens = torch.arange(0, streams.vocab, apart, device=weight.device)[None]
    embedded = backbone.embed(tokens, torch.zeros_like(tokens))
    width = finished.shape[-1]
    weight[:, :width].mul_(INNER / finished.float().square().mean().sqrt())
    weight[:, width:].mul_(INNER / embedded.float().square().mean().sqrt())
