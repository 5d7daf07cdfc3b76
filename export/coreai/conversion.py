"""Converts functions of the contract to one asset of Core AI, in which they share weights."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import torch
from torch.export import ExportedProgram

from ssdevice.contract import LOGITS, PLAIN, STEP, FunctionSpec
from ssdevice.errors import SSDeviceError, first_line
from ssdevice.export.forms import function_module
from ssdevice.export.plan import ExportPlan
from ssdevice.export.quiet import quiet
from ssdevice.export.state_form import InternalCacheForm, example_inputs
from ssdevice.model.step import StreamModel

with quiet("coreai_torch"):  # it takes torch's build "2.13.0+cpu" for a version that nobody has tried
    from coreai_torch import TorchConverter, get_decomp_table


def trace(spec: FunctionSpec, model: StreamModel, plan: ExportPlan) -> ExportedProgram:
    """The exported program of a function of the contract, with one state tensor each for keys and values."""
    module = function_module(spec.name, model, plan.geometry, plan.schedule)
    form = InternalCacheForm(spec.name, module, plan.geometry, logits=True)
    with quiet("coreai_torch"), torch.no_grad():
        program: ExportedProgram = torch.export.export(form, example_inputs(spec)).run_decompositions(
            get_decomp_table()
        )
    return program


class Asset:
    """An asset in the making."""

    def __init__(self) -> None:
        self._converter = TorchConverter(mode=TorchConverter.Mode.RELEASE)

    def add(self, name: str, spec: FunctionSpec, program: ExportedProgram) -> None:
        """Add what was traced for a function as ``name``. Raises SSDeviceError if it cannot be converted."""
        outputs = [tensor.name for tensor in spec.outputs if 0 not in tensor.shape]
        try:
            self._converter.add_exported_program(
                program,
                input_names=[tensor.name for tensor in spec.inputs],
                output_names=[*outputs, LOGITS] if spec.name in (STEP, PLAIN) else outputs,
                state_names=[tensor.name for tensor in spec.states],
                entrypoint_name=name,
            )
        except (ValueError, RuntimeError) as error:
            raise SSDeviceError(f"coreai-torch cannot convert {name}: {first_line(error)}") from error

    def save(self, out: Path) -> None:
        """Convert the functions and write the asset, which holds equal weights once. Raises SSDeviceError."""
        # The converter writes its progress to stdout, which belongs to the command line's own output.
        with quiet("coreai_torch"), contextlib.redirect_stdout(io.StringIO()):
            try:
                self._converter.to_coreai().save_asset(out)
            except (ValueError, RuntimeError) as error:
                raise SSDeviceError(f"coreai-torch cannot convert the functions: {first_line(error)}") from error
