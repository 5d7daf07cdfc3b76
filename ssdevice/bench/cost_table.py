"""What steps cost on a device, as a small file: a phone writes it, and trees are chosen with it elsewhere.

``docs/performance.md`` describes the JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ssdevice.bundle.staging import write_json
from ssdevice.config import Schedule, load_strict, read_json, to_json
from ssdevice.errors import ConfigError, InputError
from ssdevice.rules import ABOVE_0, Ruled, within
from ssdevice.tree import MAX_NODES


@dataclass(frozen=True)
class StepCost(Ruled):
    """Mean milliseconds of a step of ``nodes`` tree nodes, streams included, in a schedule."""

    nodes: int = field(metadata=within(2, MAX_NODES))
    schedule: Schedule
    ms: float = field(metadata=ABOVE_0)


@dataclass(frozen=True)
class CostTable(Ruled):
    """Costs on one device with one setting.

    ``model``: sha256 of the base's weights; ``gamma``, ``msa_layers``: of the app. ``threads``: 0 for the engine's
    default. ``plain_ms``: a plain step, None if the bundles have none.
    Raises ConfigError for a time that is not above 0, or a size that appears twice in a schedule.
    """

    device: str
    instructions: tuple[str, ...]
    target: str
    precision: str
    threads: int
    kernels: bool
    model: str
    gamma: int
    msa_layers: int
    steps: tuple[StepCost, ...]
    plain_ms: float | None = field(metadata=ABOVE_0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.steps:
            raise ConfigError("steps: none, so there is no tree to choose")
        if len({(step.nodes, step.schedule) for step in self.steps}) < len(self.steps):
            raise ConfigError("steps: a size appears twice in one schedule")

    @classmethod
    def read(cls, file: Path) -> CostTable:
        """The table in a file. Raises ConfigError, which names the file and the field."""
        return load_strict(cls, read_json(file), str(file))

    def write(self, file: Path) -> None:
        """Write the table as JSON."""
        write_json(file, to_json(self))

    def check(self, where: str, model: str, gamma: int, msa_layers: int) -> None:
        """Raise InputError if the table is of another model, or of streams of another number or depth."""
        check_same(
            where,
            "the bundle",
            ("base model", self.model, model),
            ("γ", self.gamma, gamma),
            ("number of MSA layers", self.msa_layers, msa_layers),
        )


def check_same(what: str, reference: str, *facts: tuple[str, object, object]) -> None:
    """Raise InputError for the first of ``facts`` in which ``what`` differs from ``reference``.

    ``facts``: a name, and its value in each of the two.
    """
    for name, mine, expected in facts:
        if mine != expected:
            raise InputError(f"{what}: its {name} is {mine}, that of {reference} is {expected}")
