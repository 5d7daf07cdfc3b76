"""Apps as functions of one file: the names of each app's functions, and a job for each app."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ssdevice.bundle.manifest import AdapterKind, App
from ssdevice.contract import ONE_ROW
from ssdevice.export.exporter import ExportJob
from ssdevice.export.plan import AppPlan, ExportPlan

Names = Mapping[str, str]
"""The contract's functions -> their names in a file."""


def function_names(plan: ExportPlan) -> dict[str, Names]:
    """By app: its functions of the contract -> their names in the file.

    A merged app uses the contract's names. Apps that do not change main rows share the base's functions of one row.
    """
    if plan.merged:
        return {app.name: {name: name for name in plan.function_names} for app in plan.apps}
    table: dict[str, Names] = {}
    taken = set(plan.function_names)
    for app in plan.apps:
        suffix = "" if app.folder is None else f"_{re.sub(r'[^A-Za-z0-9_]', '_', app.name)}"
        own = plan.of(app).function_names
        while suffix and any(f"{name}{suffix}" in taken for name in own):
            suffix += "_"
        names = {name: name if name in ONE_ROW and not app.has_lora else f"{name}{suffix}" for name in own}
        taken.update(names.values())
        table[app.name] = names
    return table


def app_results(plan: ExportPlan, table: Mapping[str, Names]) -> dict[str, App]:
    """What the manifest says of each app; nothing of a merged one, whose functions are the bundle's."""
    if plan.merged:
        return {}
    return {
        app.name: app.entry(app.name, plan.identity.sha256, AdapterKind.FUNCTION, functions=dict(table[app.name]))
        for app in plan.apps
    }


def jobs(job: ExportJob) -> Iterator[tuple[AppPlan, ExportJob]]:
    """A job for each app in turn; finish with one before taking the next."""
    first, *others = job.plan.apps
    yield first, replace(job, plan=job.plan.of(first))
    for app in others:
        yield app, job.for_app(app)
