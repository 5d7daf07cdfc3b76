"""Converts a torch module to Core ML: each function to a separate program, and several programs to one package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ssdevice.config import Schedule
from ssdevice.contract import KEYS, PREFILL, VALUES, CacheForm, Geometry, functions
from ssdevice.export.forms import function_module
from ssdevice.export.mlprogram import ops as coreml_ops
from ssdevice.export.mlprogram.graph import functional, name_inputs, simplify
from ssdevice.export.mlprogram.half import half_precision
from ssdevice.export.mlprogram.options import Deployment, KVWrite
from ssdevice.export.mlprogram.program import to_model, to_program
from ssdevice.export.mlprogram.quiet import ct, quiet
from ssdevice.export.quiet import without_stack_traces
from ssdevice.export.state_form import InternalCacheForm, Write, example_inputs
from ssdevice.model.step import StreamModel

CACHE_DTYPE = "float16"
WRITES: dict[KVWrite, Write] = {KVWrite.SLICE: coreml_ops.write_slice, KVWrite.MASK: coreml_ops.write_masked}


def convert(
    name: str,
    model: StreamModel,
    geometry: Geometry,
    schedule: Schedule,
    write: KVWrite,
    deployment: Deployment = Deployment.IOS18,
) -> Any:
    """One of the contract's functions as a coremltools program in float16, with the contract's tensor names."""
    coreml_ops.register()
    spec = functions(geometry, CacheForm.INTERNAL, CACHE_DTYPE)[name]
    inputs = example_inputs(spec)
    with quiet(), torch.no_grad(), without_stack_traces():
        module = function_module(name, half_precision(model), geometry, schedule)
        form = InternalCacheForm(name, module, geometry, dtype=torch.float16, write=WRITES[write])
        program = functional(torch.export.export(form, inputs))
        name_inputs(program, [tensor.name for tensor in spec.inputs])
        simplify(program, (KEYS, VALUES))
        # Without streams prefill has no drafts, and Core ML has no empty tensors.
        outputs = spec.outputs if model.gamma or name != PREFILL else spec.outputs[:1]
        types = [ct.TensorType(name=tensor.name, dtype=getattr(np, tensor.dtype)) for tensor in outputs]
        return to_program(program, types, deployment)


def save(programs: Mapping[str, Any], out: Path, default: str, deployment: Deployment = Deployment.IOS18) -> None:
    """Write programs of one function each as the functions of a package; equal weights are stored once."""
    with quiet():
        to_model(programs, default, deployment).save(str(out))
