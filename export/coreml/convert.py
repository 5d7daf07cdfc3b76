"""From a torch module to Core ML: one function as a package of its own, and several merged into one."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Mapping, Sequence
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
"""What coremltools calls the only function of a package."""


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
    """One of the contract's functions as an MLModel in float16, its tensors named as the contract does."""
    coreml_ops.register()
    spec = specs(geometry)[name]
    inputs = tuple(torch.zeros(_shape(tensor.shape), dtype=torch.int32) for tensor in spec.inputs)
    with quiet(), torch.no_grad():
        module = function_module(name, half_precision(model), geometry, schedule)
        form = InternalCacheForm(name, module, geometry, dtype=torch.float16, write=WRITES[write])
        program = torch.export.export(form, inputs).run_decompositions({})
        name_inputs(program, [tensor.name for tensor in spec.inputs])
        simplify(program, (KEYS, VALUES))
        # Without streams prefill gives no drafts: Core ML has no empty tensors.
        outputs = spec.outputs if model.gamma or name != PREFILL else spec.outputs[:1]
        return ct.convert(
            program,
            outputs=[ct.TensorType(name=tensor.name) for tensor in outputs],
            minimum_deployment_target=ct.target[deployment.value],
            compute_precision=ct.precision.FLOAT16,
            skip_model_load=True,
        )


def merge(packages: Mapping[str, Path], out: Path, default: str) -> None:
    """One package of several one-function packages; equal weights are stored once."""
    from coremltools.models.utils import MultiFunctionDescriptor, save_multifunction

    coreml_ops.register()
    descriptor = MultiFunctionDescriptor()
    for name, path in packages.items():
        descriptor.add_function(str(path), src_function_name=MAIN, target_function_name=name)
    descriptor.default_function_name = default
    with quiet():
        save_multifunction(descriptor, str(out))


def release_memory() -> None:
    """Give back what conversions left: pieces of freed weights stay with the process unless the allocator is asked."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others give back by themselves
        if trim is not None:
            trim(0)


def _shape(sizes: Sequence[int | str]) -> tuple[int, ...]:
    return tuple(int(size) for size in sizes)
