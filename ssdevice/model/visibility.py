"""Which rows see which: boolean tables, and the additive masks made from them.

A window is how many positions a row sees, including its own; None means all.
"""

import torch
from torch import Tensor


def additive(visible: Tensor, value: float) -> Tensor:
    """A float32 mask to add to scores: 0 where ``visible`` is true, ``value`` elsewhere."""
    return torch.where(visible, 0.0, value).to(torch.float32)


def committed(positions: Tensor, length: Tensor, past_rows: int, window: int | None) -> Tensor:
    """``[R, P]`` bool: rows at ``positions [R]`` see those of P cache rows that are committed.

    Cache row j is committed if j < ``length``. It must also lie in the window.
    """
    row = torch.arange(past_rows, dtype=torch.int32, device=positions.device)
    seen = (row < length)[None].expand(positions.shape[0], -1)
    if window is None:
        return seen
    return seen & (positions[:, None] - row[None] < window)


def within(positions: Tensor, others: Tensor, window: int | None) -> Tensor:
    """``[R, n]`` bool: rows at ``positions [R]`` have those at ``others [n]`` in their window.

    The window bounds how far back a row sees; later rows are not excluded.
    """
    if window is None:
        rows = positions.shape[0]
        columns = others.shape[0]
        return torch.ones(rows, columns, dtype=torch.bool, device=positions.device)
    return positions[:, None] - others[None] < window


def causal(positions: Tensor, window: int | None) -> Tensor:
    """``[R, R]`` bool: rows at ``positions [R]`` see themselves and, in the window, rows before."""
    return (positions[:, None] >= positions[None]) & within(positions, positions, window)


def own_streams(nodes: int, gamma: int, device: torch.device | None = None) -> Tensor:
    """``[n * γ, n * γ]`` bool: stream j of a node sees streams 1..j of the same node.

    See 2402.11131 eq. 2.
    """
    not_later = torch.ones(gamma, gamma, dtype=torch.bool, device=device).tril()
    same_node = torch.eye(nodes, dtype=torch.bool, device=device)
    seen = same_node[:, None, :, None] & not_later[None, :, None, :]
    return seen.reshape(nodes * gamma, nodes * gamma)


def stream_positions(positions: Tensor, gamma: int) -> Tensor:
    """Positions of streams, ``[.., n] -> [.., n * γ]``: the node's plus j for stream j."""
    ahead = torch.arange(1, gamma + 1, dtype=positions.dtype, device=positions.device)
    return (positions[..., None] + ahead).flatten(-2)
