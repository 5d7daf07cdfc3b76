"""Converts a torch module to Core ML: each function to a separate package, and several packages to one."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ssdevice.config import Schedule
from ssdevice.contract import KEYS, PREFILL, VALUES, CacheForm, FunctionSpec, Geometry, functions
from ssdevice.export.forms import function_module
from ssdevice.export.mlprogram import ops as coreml_ops
from ssdevice.export.mlprogram.graph import name_inputs, simplify
from ssdevice.export.mlprogram.half import half_precision
from ssdevice.export.mlprogram.options import Deployment, KVWrite
from ssdevice.export.mlprogram.quiet import ct, quiet
from ssdevice.export.state_form import InternalCacheForm, Write
from ssdevice.model.step import StreamModel

CACHE_DTYPE = "float16"
WRITES: dict[KVWrite, Write] = {KVWrite.SLICE: coreml_ops.write_slice, KVWrite.MASK: coreml_ops.write_masked}
MAIN = "main"
"""The name that coremltools gives the only function of a package."""


def specs(geometry: Geometry) -> dict[str, FunctionSpec]:
    """The contract's functions with their cache as state."""
    return functions(geometry, CacheForm.INTERNAL, CACHE_DTYPE)


def convert(
    name: str,
    model: StreamModel,
    geometry: Geometry,
    schedule: Schedule,
    write: KVWrite,
    deployment: Deployment = Deployment.IOS18,
) -> Any:
    """One of the contract's functions as an MLModel in float16, with the contract's tensor names."""
    coreml_ops.register()
    spec = specs(geometry)[name]
    inputs = tuple(torch.zeros([int(size) for size in tensor.shape], dtype=torch.int32) for tensor in spec.inputs)
    with quiet(), torch.no_grad():
        module = function_module(name, half_precision(model), geometry, schedule)
        form = InternalCacheForm(name, module, geometry, dtype=torch.float16, write=WRITES[write])
        program = torch.export.export(form, inputs).run_decompositions({})
        name_inputs(program, [tensor.name for tensor in spec.inputs])
        simplify(program, (KEYS, VALUES))
        # Without streams prefill has no drafts, and Core ML has no empty tensors.
        outputs = spec.outputs if model.gamma or name != PREFILL else spec.outputs[:1]
        return ct.convert(
            program,
            outputs=[ct.TensorType(name=tensor.name) for tensor in outputs],
            minimum_deployment_target=ct.target[deployment.value],
            compute_precision=ct.precision.FLOAT16,
            skip_model_load=True,
        )


def merge(packages: Mapping[str, Path], out: Path, default: str) -> None:
    """Merge packages of one function each; equal weights are stored once."""
    from coremltools.models.utils import MultiFunctionDescriptor, save_multifunction

    coreml_ops.register()
    descriptor = MultiFunctionDescriptor()
    for name, path in packages.items():
        descriptor.add_function(str(path), src_function_name=MAIN, target_function_name=name)
    descriptor.default_function_name = default
    with quiet():
        save_multifunction(descriptor, str(out))


def release_memory() -> None:
    """Return freed memory to the system: glibc's allocator keeps pieces of freed weights unless it is told."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only in glibc; other allocators do this themselves
        if trim is not None:
            trim(0)
