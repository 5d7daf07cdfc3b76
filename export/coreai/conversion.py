"""Converts the contract's functions to one asset of Core AI, in which they share weights."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path

import torch

from ssdevice.contract import PREFILL, CacheForm, FunctionSpec
from ssdevice.errors import SSDeviceError, first_line
from ssdevice.export.forms import function_module
from ssdevice.export.plan import ExportPlan
from ssdevice.export.quiet import quiet
from ssdevice.export.state_form import InternalCacheForm
from ssdevice.model.step import StreamModel
from ssdevice.runtime.coreai.engine import CACHE_DTYPE, LOGITS

with quiet("coreai_torch"):  # it takes torch's build "2.13.0+cpu" for a version that nobody has tried
    from coreai_torch import TorchConverter, get_decomp_table

Report = Callable[[int, str], None]


def save_asset(model: StreamModel, plan: ExportPlan, out: Path, report: Report) -> None:
    """Convert every function of a plan and write the asset. ``report(number, what)`` is called before each stage.

    Raises SSDeviceError if coreai-torch cannot convert a function.
    """
    specs = plan.functions(CacheForm.INTERNAL, CACHE_DTYPE)
    converter = TorchConverter(mode=TorchConverter.Mode.RELEASE)
    # The converter writes its progress to stdout, which belongs to the command line's own output.
    with quiet("coreai_torch"), contextlib.redirect_stdout(io.StringIO()):
        for number, spec in enumerate(specs.values()):
            report(number, spec.name)
            try:
                _add(converter, model, plan, spec)
            except (ValueError, RuntimeError) as error:
                raise SSDeviceError(f"coreai-torch cannot convert {spec.name}: {first_line(error)}") from error
        report(len(specs), "convert")
        converter.to_coreai().save_asset(out)


def _add(converter: TorchConverter, model: StreamModel, plan: ExportPlan, spec: FunctionSpec) -> None:
    """Trace one function and hand it to the converter with the contract's names."""
    geometry = plan.geometry
    form = InternalCacheForm(
        spec.name, function_module(spec.name, model, geometry, plan.schedule), geometry, logits=True
    )
    inputs = tuple(torch.zeros([int(size) for size in tensor.shape], dtype=torch.int32) for tensor in spec.inputs)
    with torch.no_grad():
        program = torch.export.export(form, inputs).run_decompositions(get_decomp_table())
    outputs = [tensor.name for tensor in spec.outputs if 0 not in tensor.shape]
    if spec.name != PREFILL:
        outputs.append(LOGITS)
    converter.add_exported_program(
        program,
        input_names=[tensor.name for tensor in spec.inputs],
        output_names=outputs,
        state_names=[tensor.name for tensor in spec.states],
        entrypoint_name=spec.name,
    )
