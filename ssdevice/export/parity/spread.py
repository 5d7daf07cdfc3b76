"""How far two right results of a model may differ, measured on the model itself.

The reference runs twice: unchanged, and with random changes of every product that are slightly
larger than the artifact's rounding. Depth, outlier channels and rounding to levels amplify such
changes. So the two runs differ, layer by layer, as much as a correct artifact may differ from
either. An artifact that differs by more than a factor of that is wrong. Where a few rows are far
more sensitive than all others, two draws of the changes may differ by a factor of four themselves
(SmolLM2, float32), so what looks wrong is compared with more of them.
"""

from dataclasses import dataclass, field

import numpy as np

from ssdevice.export.parity.difference import Array

FACTOR = 2.0
"""Allowed ratio of an artifact's differences to the spread.

Both sample the same distribution, over dozens of rows.
"""
TIE_FACTOR = 6.0
"""Allowed ratio of a near-tie's margin to the change of a logit (rms): three times the change of a
difference.
"""
FLOOR = 10.0
"""Differences of this many jitters are never a fault."""
DRAWS = 5
"""An artifact is compared with at most so many twins, one after another until it is found right."""


@dataclass
class Spread:
    """``sums [3, 2 * layers]``: of squares by keys and values of each layer, of the artifact's
    differences, the twin's and the rows themselves.

    ``ties``: ids that differ, in words, and how far the reference's logits for them are apart.
    ``changes``: of the twin's logits (rms), for each call in the row that changes most.
    """

    sums: Array = field(default_factory=lambda: np.zeros((3, 1)))
    ties: list[tuple[str, float]] = field(default_factory=list)
    changes: list[float] = field(default_factory=list)
    scale: float = 0.0

    def rows(self, mine: Array, twin: Array, theirs: Array) -> None:
        """Record committed rows ``[2 * layers, n, width]`` of all sides."""
        parts = mine - theirs, twin - theirs, theirs
        self.sums = self.sums + [
            np.square(part.astype(np.float64)).sum(axis=(1, 2)) for part in parts
        ]

    def logits(self, twin: Array, theirs: Array) -> None:
        """Record logits ``[rows, V]`` of the same rows; ids outside a draft vocabulary are -inf and
        do not count.
        """
        if len(theirs):
            among = np.isfinite(theirs[0])
            twin, theirs = twin[:, among], theirs[:, among]
            self.changes.append(float(np.sqrt(np.square(twin - theirs).mean(axis=-1)).max()))
            self.scale = max(self.scale, float(np.abs(theirs).max()))

    def tie(self, where: str, name: str, mine: int, theirs: int, margin: float) -> None:
        """Record two ids that differ."""
        self.ties.append((f"{where}: {name} is {mine}, the reference says {theirs}", margin))

    def facts(self) -> dict[str, float]:
        """The largest differences of rows, of ids and of logits, for the manifest."""
        mine, twin = self.relative()
        return {
            "rows": float(mine.max(initial=0.0)),
            "rows_spread": float(twin.max(initial=0.0)),
            "near_ties": float(len(self.ties)),
            "near_tie_margin": max((margin for _, margin in self.ties), default=0.0),
            "logits_spread": max(self.changes, default=0.0),
        }

    def relative(self) -> tuple[Array, Array]:
        """By keys and values of each layer: the artifact's differences and the twin's, relative to
        the rows (rms).
        """
        mine, twin, _ = np.sqrt(self.sums / np.maximum(self.sums[2], 1e-12))
        return mine, twin

    def widen(self, other: "Spread") -> None:
        """Take the differences of another draw's twin where they are larger, and its changes of
        logits.
        """
        if self.sums.shape == other.sums.shape:  # not so if the artifact's rows cannot be read
            self.sums[1] = np.maximum(self.sums[1], np.square(other.relative()[1]) * self.sums[2])
        self.changes += other.changes

    def fault(self, jitter: float) -> str | None:
        """What is wrong with the first layer, or else the first id, that is beyond the spread;
        None: nothing is.
        """
        mine, twin = self.relative()
        allowed = FACTOR * twin + FLOOR * jitter
        beyond = np.flatnonzero(mine > allowed)
        if len(beyond):
            at = int(beyond[0])
            part = "values" if at % 2 else "keys"
            return (
                f"committed rows, {part} of layer {at // 2}: they differ by {mine[at]:.2g} of "
                f"their size; two right results of this model differ by {twin[at]:.2g} there, "
                f"allowed is {allowed[at]:.2g}. What layer {at // 2} reads or its projections are "
                "wrong; the bundle was not published"
            )
        near = TIE_FACTOR * max(self.changes, default=0.0) + FLOOR * jitter * self.scale
        for differ, margin in self.ties:
            if margin > near:
                return (
                    f"{differ} and prefers it by {margin:.3g}; a near-tie of this model is at most "
                    f"{near:.3g}. All committed rows agree, so the fault is in the streams, the "
                    "head or the choice among candidates; the bundle was not published"
                )
        return None
