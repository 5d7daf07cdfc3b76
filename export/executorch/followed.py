"""The gate's check of every product, for programs whose delegates show none.

What is followed is each traced program, as it is lowered. Its reference is the model that was traced, in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch.export import ExportedProgram

from ssdevice.contract import FunctionSpec
from ssdevice.export.parity.follow import follow
from ssdevice.export.parity.products import Bounds
from ssdevice.export.parity.traced import TracedShown
from ssdevice.export.plan import ExportJob, TargetResult
from ssdevice.model.step import StreamModel

Programs = Mapping[str, ExportedProgram]


@dataclass(frozen=True)
class FollowedResult(TargetResult):
    """``followed``: what the gate found in the traced programs; see ``parity.follow``."""

    followed: Mapping[str, float] = field(default_factory=dict)


def follow_traced(
    job: ExportJob,
    model: StreamModel,
    specs: Mapping[str, FunctionSpec],
    programs: Programs,
    bounds: Bounds,
    report: Callable[[str], None],
) -> dict[str, float]:
    """Follow the programs of the functions of ``specs``, traced from ``model``. Raises ParityError.

    ``report`` is called with what is going on.
    """
    loaded = replace(job.loaded, model=model)
    reference = replace(job, loaded=loaded, report=lambda _, __, ___, detail: report(f"check {detail}"))
    return follow(reference, TracedShown(programs, specs, job.plan.geometry), bounds)
