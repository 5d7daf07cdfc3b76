"""The resident memory that a process will have, as a sum of terms that a target predicts from a bundle's files."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Resident:
    """Bytes of a process that has answered as one app. ``kernels``: whether it uses those of ``ssdevice kernels``.

    ``runtime``: Python and its packages. ``tokenizer``: vocabulary and merges. ``graphs``: nodes and what the engine
    keeps for each. ``weights``: as the engine packed them, and the app's adapter. ``mapped``: pages of the weight file
    that calls read. ``cache``: the KV rows of the conversation. ``work``: intermediate values and outputs.
    ``opening``: what the process has at its most while it opens its last graph.
    """

    kernels: bool
    runtime: int
    tokenizer: int
    graphs: int
    weights: int
    mapped: int
    cache: int
    work: int
    opening: int

    @property
    def terms(self) -> dict[str, int]:
        """The parts of ``total``."""
        return {name: value for name, value in asdict(self).items() if name not in ("kernels", "opening")}

    @property
    def total(self) -> int:
        """Resident bytes after an answer."""
        return sum(self.terms.values())

    @property
    def peak(self) -> int:
        """Resident bytes at their most."""
        return max(self.total, self.opening)
