"""Bundles of a tiny model for Core AI, exported once a test run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from ssdevice.bundle.folder import Bundle
from ssdevice.config import Mode, Schedule
from ssdevice.export.plan import ExportOptions, Quant
from ssdevice.export.stages import export_bundle
from ssdevice.tree import Tree
from tests.export.models import write_adapter, write_base, write_lora
from tests.once import made_once

ABSENT = "needs coreai-core and coreai-torch"
"""The reason of a skip without the packages, which are pre-releases."""
TREE = Tree.of([[0], [1], [1, 0]])


@dataclass(frozen=True)
class Cell:
    """One combination that a bundle is exported with."""

    quant: Quant = Quant.FP32
    mode: Mode = Mode.SHARED
    schedule: Schedule = Schedule.FUSED

    def __str__(self) -> str:
        return f"{self.quant}-{self.mode}-{self.schedule}"


@cache
def base() -> Path:
    """A llama of two layers, whose MLP has a number of rows that no group of weights divides."""
    sizes = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2}
    return made_once("coreai/base", lambda out: write_base(out, **sizes, initializer_range=0.3))


def options(cell: Cell, out: Path) -> ExportOptions:
    """An export of the tiny model with two streams over its upper layer, whose host can choose
    tokens.
    """
    follow = 3 if cell.mode is Mode.LOSSLESS else 0
    make = partial(
        write_adapter, base=base(), mode=cell.mode, gamma=2, msa_layers=1, follow_rank=follow
    )
    return ExportOptions(
        model=str(base()),
        target="coreai",
        quant=cell.quant,
        out=out,
        adapters=(("app", made_once(f"coreai/{cell.mode}", make)),),
        tree=TREE,
        schedule=cell.schedule,
        context=24,
        chunk=5,
        choose=True,
    )


def bundle(cell: Cell) -> Bundle:
    """The bundle of a combination, which passed its parity gate."""
    return Bundle.open(
        made_once(f"coreai/{cell}", lambda out: export_bundle(options(cell, out), lambda *_: None))
    )


def apps() -> Bundle:
    """A bundle of two apps, each with streams and a LoRA of its own."""
    adapters = []
    for seed, name in enumerate(("one", "other"), start=2):

        def write(out: Path, seed: int = seed) -> None:
            write_lora(write_adapter(out, base(), gamma=2, msa_layers=1), base(), rank=2, seed=seed)

        adapters.append((name, made_once(f"coreai/{name}", write)))

    def export(out: Path) -> None:
        export_bundle(
            replace(options(Cell(Quant.INT8), out), adapters=tuple(adapters)), lambda *_: None
        )

    return Bundle.open(made_once("coreai/apps", export))
