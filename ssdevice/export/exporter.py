"""The interface of exporters: the job that each is given, what it wrote, and apps as functions of
one file.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Self

from ssdevice.bundle.manifest import NAME, AdapterKind, App
from ssdevice.config import Schedule
from ssdevice.contract import ONE_ROW, CacheForm
from ssdevice.errors import InputError
from ssdevice.export.plan import AppPlan, ExportPlan, Quant
from ssdevice.progress import Report
from ssdevice.rules import check_rule

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from ssdevice.export.weights import Schemes
    from ssdevice.model.loading import LoadedModel


FOLDED = (
    "stream rows have separate weights in the MSA layers: the stream adapters are folded into a "
    "copy"
)
"""The note in a bundle whose job was ``folded``."""


@dataclass(frozen=True)
class ExportJob:
    """A plan and its first app's model, with ``geometry.gamma`` streams and, if ``plan.merged``, a
    merged LoRA.

    ``notes``: changes to the model for a target, for the manifest. ``calibrated``: weights of the
    base that replace those of its folder in every further model of the job.
    """

    plan: ExportPlan
    loaded: "LoadedModel"
    report: Report
    notes: tuple[str, ...] = ()
    calibrated: "Mapping[str, Tensor]" = field(default_factory=dict)

    @classmethod
    def of(
        cls, plan: ExportPlan, report: Report, calibrated: "Mapping[str, Tensor] | None" = None
    ) -> Self:
        """Load the first app of a plan."""
        from ssdevice.model.loading import load

        own = calibrated or {}
        gamma = plan.geometry.gamma or None
        scratch = plan.options.out.parent
        loaded = load(
            plan.folder,
            plan.adapter,
            plan.geometry.context,
            gamma,
            plan.merged,
            own,
            scratch,
            plan.identity,
        )
        return cls(plan, loaded, report, calibrated=own)

    def folded(self) -> Self:
        """The job with stream adapters folded into weights of stream rows, in place: one product
        replaces three.

        Only if streams run separately from main rows and apps are not switched.
        """
        streams = self.loaded.model.streams
        if not self.plan.merged or self.plan.schedule is not Schedule.DEFERRED or streams is None:
            return self
        from ssdevice.model.mapped import mapped

        folded = streams.fold()
        for row in folded:
            row.weight.data = mapped(row.weight, self.plan.options.out.parent)
        return replace(self, notes=(*self.notes, FOLDED)) if folded else self

    def for_app(self, app: AppPlan) -> "ExportJob":
        """The job for one app of several, with a separate model: drop it before the next."""
        return ExportJob.of(self.plan.of(app), self.report, self.calibrated)


@dataclass(frozen=True)
class TargetResult:
    """What a target wrote.

    ``files``: role -> path in the bundle (POSIX, relative), of every file or folder.

    ``notes``: deviations from the request, one sentence each, for the manifest. ``tools``: packages
    to list with their versions. ``apps``: entries by name, unless the plan is merged. ``followed``:
    the gate's facts of programs before they were lowered (``parity.traced``).
    """

    files: Mapping[str, str]
    cache: CacheForm
    cache_dtype: str
    notes: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    apps: Mapping[str, App] = field(default_factory=dict)
    followed: Mapping[str, float] = field(default_factory=dict)


class Exporter(ABC):
    """Writes a target's files. ``bits``: precision -> bits of a weight on disk, with its scales.

    ``schedule``, ``chunk``: the defaults. ``repeats``: drafts that repeat the text without streams
    (0: no step), and ``short``: those of a short step beside one of twice as many or more.
    ``calibrates``: precisions that rows of data may round, where ``schemes`` have grids.
    ``smooths``: those with one scale for a whole row of a linear's inputs, which outliers decide
    (``calibration.smoothing``). ``chooses``: it has functions for a host that chooses tokens.
    ``several_apps``: it takes plans that are not merged, and fills ``TargetResult.apps``.
    """

    bits: ClassVar[Mapping[Quant, float]]
    schedule: ClassVar[Schedule]
    chunk: ClassVar[int] = 64
    repeats: ClassVar[int] = 0
    short: ClassVar[int] = 0
    several_apps: ClassVar[bool] = False
    calibrates: ClassVar[frozenset[Quant]] = frozenset()
    smooths: ClassVar[frozenset[Quant]] = frozenset()
    chooses: ClassVar[bool] = False

    def schemes(self, plan: ExportPlan) -> "Schemes":
        """The target's table of how weights are stored, in the plan's precision: all in float32."""
        from ssdevice.export.weights import FLOAT32, Schemes  # which imports torch

        return Schemes(FLOAT32)

    def check(self, plan: ExportPlan) -> None:  # noqa: B027  most targets take every plan
        """Raise ConfigError for apps that cannot share a bundle of this target."""

    def prepare(self, job: ExportJob) -> ExportJob:
        """The job for both ``export`` and ``gate``, with the model in the form that the target
        writes.
        """
        return job

    @abstractmethod
    def export(self, job: ExportJob, folder: "Path") -> TargetResult:
        """Write the target's files below ``folder``, the unfinished bundle; this may release the
        model's memory.
        """

    @abstractmethod
    def gate(self, job: ExportJob, folder: "Path", result: TargetResult) -> Mapping[str, float]:
        """Compare the written files with the reference.

        Returns the largest differences; raises ParityError.
        """


Names = Mapping[str, str]
"""The contract's functions -> their names in a file."""


def function_names(plan: ExportPlan) -> dict[str, Names]:
    """By app: its functions of the contract -> their names in the file.

    A merged app uses the contract's names. Apps that do not change main rows share the base's
    functions of one row.
    """
    if plan.merged:
        [app] = plan.apps
        return {app.name: {name: name for name in plan.function_names}}
    table: dict[str, Names] = {}
    taken = set(plan.function_names)
    for app in plan.apps:
        suffix = "" if app.folder is None else f"_{re.sub(r'[^A-Za-z0-9_]', '_', app.name)}"
        own = plan.of(app).function_names
        while suffix and any(f"{name}{suffix}" in taken for name in own):
            suffix += "_"
        names = {
            name: name if name in ONE_ROW and not app.has_lora else f"{name}{suffix}"
            for name in own
        }
        taken.update(names.values())
        table[app.name] = names
    return table


def check_functions(plan: ExportPlan) -> None:
    """Raise InputError for apps that cannot be functions of one file.

    All functions share a cache, so no app may have more layers than another; and the name of an app
    is part of its functions' names, which have a limit.
    """
    for app in plan.apps:
        if not plan.merged and app.draft_layers:
            raise InputError(
                f"{app.folder}: streams of draft layers cannot share a bundle with other apps yet: "
                "export this app by itself, or train it with --draft-layers 0"
            )
    for owner, names in function_names(plan).items():
        for name in names.values():
            check_rule(f"--adapter {owner}=: the name of its function", name, NAME)


def app_results(plan: ExportPlan, table: Mapping[str, Names]) -> dict[str, App]:
    """What the manifest says of each app; nothing of a merged one, whose functions are the
    bundle's.
    """
    if plan.merged:
        return {}
    return {
        app.name: app.entry(
            app.name, plan.identity.sha256, AdapterKind.FUNCTION, functions=dict(table[app.name])
        )
        for app in plan.apps
    }


def jobs(job: ExportJob) -> Iterator[tuple[AppPlan, ExportJob]]:
    """A job for each app in turn; finish with one before taking the next."""
    first, *others = job.plan.apps
    yield first, replace(job, plan=job.plan.of(first))
    for app in others:
        yield app, job.for_app(app)
