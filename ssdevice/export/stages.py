"""The stages of an export in order. A failure in any of them leaves nothing behind."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from ssdevice.bundle.folder import Bundle, BundleWriter
from ssdevice.export.calibration.calibrate import calibrated_job, smoothed_job
from ssdevice.export.crosscheck.check import check_export
from ssdevice.export.exporter import Exporter, ExportJob
from ssdevice.export.manifest import make_manifest
from ssdevice.export.plan import ExportOptions, ExportPlan, make_plan
from ssdevice.export.target import exporter
from ssdevice.memory import free_memory
from ssdevice.progress import Report
from ssdevice.runtime import phrases
from ssdevice.text.tokenizer import TOKENIZER_FILE, TOKENIZER_ROLE

COLLECT_AFTER = 100_000
"""New objects before a search for garbage; with Python's default of 700 it took 6 % of an
ExecuTorch export.
"""

STAGES = {
    "load the model": 5,
    "compare with transformers": 8,
    "calibrate": 20,
    "write the graphs": 42,
    "check parity": 25,
}
"""Every stage with its part of an export's time, in hundredths."""


class Whole:
    """The report of a whole export: reports of a stage move it forward, and never back."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._name = ""
        self._begun = 0
        self._share = 0
        self._reached = 0

    def begin(self, name: str) -> None:
        """Begin the next of the ``STAGES``."""
        self._name = name
        self._begun += self._share
        self._share = STAGES[name]
        self(name, 0, 1, "")

    def __call__(self, _: str, done: int, total: int, detail: str) -> None:
        self._reached = max(self._reached, self._begun + self._share * done // max(1, total))
        self._report(
            "export", self._reached, 100, f"{self._name}, {detail}" if detail else self._name
        )


def export_bundle(options: ExportOptions, report: Report) -> Bundle:
    """Plan, make and publish a bundle. A failure or an interruption leaves nothing behind.

    Raises InputError for options that cannot be exported, ParityError for an export that computes
    something else.
    """
    target = exporter(options)
    return export_plan(make_plan(options, target), target, report)


def export_plan(plan: ExportPlan, target: Exporter, report: Report) -> Bundle:
    """``export_bundle`` for a plan that was made before."""
    options = plan.options
    whole = Whole(report)
    with BundleWriter(options.out, overwrite=options.overwrite) as writer, fewer_collections():
        whole.begin("load the model")
        job = ExportJob.of(plan, whole)
        whole.begin("compare with transformers")
        if options.cross_check:
            check_export(job)
        job = target.prepare(job)
        whole.begin("calibrate")
        job = calibrated_job(smoothed_job(job, target), target)
        whole.begin("write the graphs")
        result = target.export(job, writer.folder)
        free_memory()  # the gate needs as much again
        whole.begin("check parity")
        parity = {**result.followed, **target.gate(job, writer.folder, result)}
        report("export", 100, 100, "done")
        writer.add_file(TOKENIZER_FILE, plan.tokenizer.tokenizer_json, TOKENIZER_ROLE)
        if plan.phrases:
            writer.add_file(phrases.FILE, plan.phrases, phrases.ROLE)
        for role, path in result.files.items():
            writer.declare(path, role)
        return writer.commit(make_manifest(plan, result, parity))


@contextmanager
def fewer_collections() -> Iterator[None]:
    """In this context garbage is searched for less often: each search visits all objects of a
    growing graph.
    """
    before = gc.get_threshold()
    gc.set_threshold(COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
