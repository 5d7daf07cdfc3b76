"""The Core AI target: one asset whose functions share weights and take the cache as state."""

import contextlib
import io
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch.export import ExportedProgram
from torch.nn.utils import parametrize

from ssdevice.config import Schedule
from ssdevice.contract import LOGITS, PLAIN, STEP, CacheForm, FunctionSpec
from ssdevice.errors import SSDeviceError, first_line
from ssdevice.export.coreai.weights import schemes, stored
from ssdevice.export.driver import EngineDriver
from ssdevice.export.exporter import (
    Exporter,
    ExportJob,
    TargetResult,
    app_results,
    check_functions,
    function_names,
    jobs,
)
from ssdevice.export.forms import function_module
from ssdevice.export.parity.gate import FLOAT_JITTER, check, check_each
from ssdevice.export.parity.products import FLOAT32
from ssdevice.export.parity.traced import follow_traced
from ssdevice.export.plan import AppPlan, ExportPlan, Quant
from ssdevice.export.quiet import quiet
from ssdevice.export.state_form import InternalCacheForm, example_inputs
from ssdevice.export.weights import Schemes
from ssdevice.model.step import StreamModel
from ssdevice.runtime.coreai.engine import CACHE_DTYPE, MODEL, CoreAIEngine

with quiet(
    "coreai_torch"
):  # it takes torch's build "2.13.0+cpu" for a version that nobody has tried
    from coreai_torch import TorchConverter, get_decomp_table


def trace(spec: FunctionSpec, model: StreamModel, plan: ExportPlan) -> ExportedProgram:
    """The exported program of a function of the contract, with one state tensor each for keys and
    values.
    """
    module = function_module(spec.name, model, plan.geometry, plan.schedule)
    form = InternalCacheForm(spec.name, module, plan.geometry, logits=True)
    with quiet("coreai_torch"), torch.no_grad():
        exported = torch.export.export(form, example_inputs(spec))
        program: ExportedProgram = exported.run_decompositions(get_decomp_table())
    return program


@contextlib.contextmanager
def converting(what: str) -> Iterator[None]:
    """In this context what coreai-torch raises is an SSDeviceError."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        raise SSDeviceError(f"coreai-torch cannot convert {what}: {first_line(error)}") from error


def add(asset: TorchConverter, name: str, spec: FunctionSpec, program: ExportedProgram) -> None:
    """Add what was traced for a function as ``name``.

    Raises SSDeviceError if it cannot be converted.
    """
    outputs = [tensor.name for tensor in spec.outputs if 0 not in tensor.shape]
    with converting(name):
        asset.add_exported_program(
            program,
            input_names=[tensor.name for tensor in spec.inputs],
            output_names=[*outputs, LOGITS] if spec.name in (STEP, PLAIN) else outputs,
            state_names=[tensor.name for tensor in spec.states],
            entrypoint_name=name,
        )


ASSET = "model.aimodel"
TOOLS = ("torch", "transformers", "coreai-torch", "coreai-core")
LARGE_CACHE = 2048
"""Phones are reported to fail with a cache of so many rows."""


class CoreAIExporter(Exporter):
    """Writes one ``.aimodel``.

    Several apps become functions of it, over the base's weights; see ``Exporter``.
    """

    bits = {Quant.FP32: 32.0, Quant.FP16: 16.0, Quant.INT8: 8.1, Quant.INT4: 5.2}  # noqa: RUF012
    schedule = Schedule.FUSED
    several_apps = True
    chooses = True
    calibrates = frozenset({Quant.INT4})

    def check(self, plan: ExportPlan) -> None:
        check_functions(plan)

    def schemes(self, plan: ExportPlan) -> Schemes:
        return schemes(plan.options.quant)

    def export(self, job: ExportJob, folder: Path) -> TargetResult:
        plan = job.plan
        table = function_names(job.plan)
        asset = TorchConverter(mode=TorchConverter.Mode.RELEASE)
        total = len({name for names in table.values() for name in names.values()})
        programs: dict[str, ExportedProgram] = {}
        notes = [*job.notes]
        followed = dict[str, float]()

        def report(what: str) -> None:
            job.report("write the graphs", len(programs), total + 1, what)

        for app, one in jobs(job):
            specs = one.plan.functions(CacheForm.INTERNAL, CACHE_DTYPE)
            model = one.loaded.model
            with stored(model, plan.options.quant) as found:
                new = {
                    name: specs[function]
                    for function, name in table[app.name].items()
                    if name not in programs
                }
                for name, spec in new.items():
                    report(name)
                    programs[name] = trace(spec, model, one.plan)
                own = {function: programs[name] for function, name in table[app.name].items()}
                with parametrize.cached():  # weights are not computed in every call
                    for fact, value in follow_traced(one, specs, own, FLOAT32, report).items():
                        followed[fact] = max(value, followed.get(fact, value))
                for name, spec in new.items():
                    add(asset, name, spec, programs[name])
            notes += [note for note in found if note not in notes]
        report("convert")
        # The converter writes its progress to stdout, which belongs to the command line's own
        # output.
        with (
            quiet("coreai_torch"),
            contextlib.redirect_stdout(io.StringIO()),
            converting("the functions"),
        ):
            asset.to_coreai().save_asset(folder / ASSET)  # which holds equal weights once
        if plan.options.quant is not Quant.FP32:
            notes.append(
                "only weights are rounded: activations, products and the cache are float32"
            )
        if plan.geometry.capacity >= LARGE_CACHE:
            notes.append(
                f"the cache has {plan.geometry.capacity} rows; from {LARGE_CACHE} on phones are "
                "reported to fail: choose a smaller --context for them"
            )
        apps = app_results(plan, table)
        return TargetResult(
            {MODEL: ASSET}, CacheForm.INTERNAL, CACHE_DTYPE, tuple(notes), TOOLS, apps, followed
        )

    def gate(self, job: ExportJob, folder: Path, result: TargetResult) -> Mapping[str, float]:
        """Compare the asset, in Apple's runtime, with torch models of the stored weights; see
        ``Exporter``.
        """

        def check_app(app: AppPlan, one: ExportJob) -> Mapping[str, float]:
            engine = CoreAIEngine(
                folder / ASSET, job.plan.geometry, function_names(job.plan)[app.name]
            )
            with (
                EngineDriver(engine) as driver,
                stored(one.loaded.model, job.plan.options.quant, values=True),
            ):
                return check(one, driver, FLOAT_JITTER)

        return check_each(job, check_app)
