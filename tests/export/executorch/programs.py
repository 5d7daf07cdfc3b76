"""Tiny models lowered to ExecuTorch once a test run: lowering costs seconds a program."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from ssdevice.bundle.folder import Bundle
from ssdevice.config import Mode, Schedule
from ssdevice.export.calibration.calibrate import smoothed_job
from ssdevice.export.executorch.exporter import ExecutorchExporter
from ssdevice.export.executorch.target import ExecutorchOptions
from ssdevice.export.exporter import ExportJob
from ssdevice.export.plan import ExportOptions, Quant, make_plan
from ssdevice.export.stages import export_bundle
from ssdevice.model.loading import load
from ssdevice.tree import Tree
from tests.export.models import write_adapter, write_base, write_lora
from tests.once import made_once

TREE = Tree.of([[0], [1], [1, 0]])
CONTEXT = 24
CHUNK = 5
QUICK = (Quant.FP32, Mode.SHARED, Schedule.DEFERRED)


@cache
def base() -> Path:
    """A llama of two layers."""
    sizes = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    return made_once("executorch/base", lambda out: write_base(out, **sizes, initializer_range=0.3))


@cache
def adapter(mode: Mode) -> Path:
    """Two streams over its upper layer; in lossless mode drafts follow each other."""
    follow = 3 if mode is Mode.LOSSLESS else 0
    make = partial(write_adapter, base=base(), mode=mode, gamma=2, msa_layers=1, follow_rank=follow)
    return made_once(f"executorch/{mode}", make)


def options(quant: Quant, mode: Mode, schedule: Schedule, out: Path) -> ExportOptions:
    """An export of the tiny model."""
    return ExportOptions(
        model=str(base()),
        target="executorch",
        quant=quant,
        out=out,
        adapters=(("app", adapter(mode)),),
        tree=TREE,
        schedule=schedule,
        context=CONTEXT,
        chunk=CHUNK,
    )


def bundle(quant: Quant = QUICK[0], mode: Mode = QUICK[1], schedule: Schedule = QUICK[2]) -> Bundle:
    """The bundle of a combination, exported with its parity gate; it gives its logits.

    In all but the first, quick one the host can choose tokens.
    """
    return _bundle(quant, mode, schedule)


def choosing() -> Bundle:
    """A bundle whose host can choose tokens."""
    return bundle(mode=Mode.LOSSLESS)


@cache
def _bundle(quant: Quant, mode: Mode, schedule: Schedule) -> Bundle:
    def export(out: Path) -> None:
        asked = replace(
            options(quant, mode, schedule, out), target_options=(ExecutorchOptions(logits=True),)
        )
        asked = replace(asked, choose=(quant, mode, schedule) != QUICK)
        export_bundle(asked, lambda *_: None)

    return Bundle.open(made_once(f"executorch/{quant}-{mode}-{schedule}", export))


def job(quant: Quant, mode: Mode, schedule: Schedule, out: Path) -> ExportJob:
    """The same as an ExportJob, for calling the exporter without the stages."""
    target = ExecutorchExporter()
    plan = make_plan(options(quant, mode, schedule, out), target)
    loaded = load(plan.folder, plan.adapter, CONTEXT, plan.geometry.gamma)
    return smoothed_job(target.prepare(ExportJob(plan, loaded, lambda *_: None)), target)


@cache
def draft_layers(quant: Quant = Quant.INT8) -> Bundle:
    """A bundle whose drafts, of a draft vocabulary, come from a layer of its own; its host can
    choose tokens.
    """
    own = {"msa_layers": 0, "adapter_rank": 0, "draft_layers": 1, "draft_vocabulary": 40}
    made = made_once(
        "executorch/own", partial(write_adapter, base=base(), mode=Mode.LOSSLESS, gamma=2, **own)
    )

    def export(out: Path) -> None:
        asked = replace(
            options(quant, Mode.LOSSLESS, Schedule.DEFERRED, out),
            adapters=(("app", made),),
            choose=True,
        )
        export_bundle(
            replace(asked, target_options=(ExecutorchOptions(logits=True),)), lambda *_: None
        )

    return Bundle.open(made_once(f"executorch/own-{quant}", export))


@cache
def two_apps(mode: Mode) -> tuple[tuple[str, Path], ...]:
    """Two apps, in shared mode with LoRAs of rank 4 and 2."""
    made = []
    for name, rank in (("one", 4), ("two", 2)):

        def write(out: Path, rank: int = rank) -> None:
            write_adapter(out, base(), mode, gamma=2, msa_layers=1)
            if mode is Mode.SHARED:
                write_lora(out, base(), rank=rank, seed=rank)

        made.append((name, made_once(f"executorch/{mode}-{name}", write)))
    return tuple(made)


@cache
def slots(
    mode: Mode = Mode.SHARED, quant: Quant = Quant.INT8, schedule: Schedule = Schedule.DEFERRED
) -> Bundle:
    """A bundle of the apps ``one`` and ``two`` over one base, whose host can choose tokens.

    Its steps do not give their logits.
    """

    def export(out: Path) -> None:
        asked = replace(options(quant, mode, schedule, out), adapters=two_apps(mode), choose=True)
        export_bundle(asked, lambda *_: None)

    return Bundle.open(made_once(f"executorch/slots-{mode}-{quant}-{schedule}", export))
