"""Which rows see which: boolean tables, and the additive masks made from them."""

import torch
from torch import Tensor


def additive(visible: Tensor, value: float) -> Tensor:
    """An additive mask, float32, of a bool table ``visible`` of any shape: 0 where True, ``value``
    elsewhere.
    """
    return torch.where(visible, 0.0, value).to(torch.float32)


def committed(positions: Tensor, length: Tensor, past_rows: int, window: int | None) -> Tensor:
    """``[R, P]`` bool: the row at ``positions [R]`` sees cache row j if j < length and j is in its
    window.
    """
    row = torch.arange(past_rows, dtype=torch.int32, device=positions.device)
    seen = (row < length)[None].expand(positions.shape[0], -1)
    return seen if window is None else seen & (positions[:, None] - row[None] < window)


def within(positions: Tensor, others: Tensor, window: int | None) -> Tensor:
    """``[R, n]`` bool: whether rows at ``others [n]`` are in the window of rows at ``positions
    [R]``, not causally.
    """
    if window is None:
        return torch.ones(
            positions.shape[0], others.shape[0], dtype=torch.bool, device=positions.device
        )
    return positions[:, None] - others[None] < window


def causal(positions: Tensor, window: int | None) -> Tensor:
    """``[R, R]`` bool: rows at ``positions [R]`` see themselves and the rows before them that are
    in their window.
    """
    return (positions[:, None] >= positions[None]) & within(positions, positions, window)


def own_streams(nodes: int, gamma: int, device: torch.device | None = None) -> Tensor:
    """``[n * γ, n * γ]`` bool: stream j of a node sees streams 1..j of the same node (2402.11131
    eq. 2).
    """
    block = torch.ones(gamma, gamma, dtype=torch.bool, device=device).tril()
    same = torch.eye(nodes, dtype=torch.bool, device=device)
    return (same[:, None, :, None] & block[None, :, None, :]).reshape(nodes * gamma, nodes * gamma)


def stream_positions(positions: Tensor, gamma: int) -> Tensor:
    """Positions of streams, the node's plus j for stream j: ``[.., n] -> [.., n * γ]``."""
    ahead = torch.arange(1, gamma + 1, dtype=positions.dtype, device=positions.device)
    return (positions[..., None] + ahead).flatten(-2)
