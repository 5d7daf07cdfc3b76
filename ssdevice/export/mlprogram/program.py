"""Functions as programs of coremltools: each is converted once, and several become one model that
shares weights.

coremltools compresses and joins functions that are saved packages: it reads every package back and
converts it again. Here the program in memory is compressed (``weights``) and joined, with the same
passes and the same result.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partialmethod
from hashlib import sha256
from typing import Any
from unittest.mock import patch

import numpy as np
from torch.export import ExportedProgram
from tqdm import tqdm

from ssdevice.export.mlprogram.options import Deployment
from ssdevice.export.quiet import quiet as silenced
from ssdevice.model.mapped import release

# On import, coremltools reports missing native parts and packages that are newer than it was tested
# with.
for _name in ("coremltools", "torchao"):
    logging.getLogger(_name).setLevel(logging.ERROR)
import coremltools as ct  # noqa: E402

__all__ = ["ct", "quiet"]


@contextmanager
def quiet() -> Iterator[None]:
    """In this context coremltools and torch report only errors; the caller reports progress."""
    with (
        patch.object(tqdm, "__init__", partialmethod(tqdm.__init__, disable=True)),
        silenced("coremltools", "torch"),
    ):
        yield


MAIN = "main"
"""The name that coremltools gives the only function of a program."""


def to_program(program: ExportedProgram, outputs: Sequence[Any], deployment: Deployment) -> Any:
    """A function as a coremltools ``Program`` in float16, after all passes.

    ``outputs``: ``ct.TensorType`` each.
    """
    from coremltools.converters.mil.mil.passes.pass_pipeline import (
        PassPipeline,
        PassPipelineManager,
    )

    with _unchecked():
        made = ct.convert(
            program,
            convert_to="milinternal",
            outputs=list(outputs),
            minimum_deployment_target=ct.target[deployment.value],
            compute_precision=ct.transform.FP16ComputePrecision(op_selector=_half),
        )
        PassPipelineManager.apply_pipeline(made, PassPipeline.get_pipeline("backend_mlprogram"))
    made.validate(check_essential_scope=True)
    made._check_early_error_out_for_invalid_program()
    # Otherwise the model's package would also hold the origin of every operation, for ExecuTorch's
    # debugger.
    made.functions[MAIN]._essential_scope_sources.clear()
    return made


def _half(operation: Any) -> bool:
    """Every operation is computed in float16.

    The weights that have been rounded so far leave memory.
    """
    if operation.op_type in ("linear", "gather"):
        release()
    return True


def to_model(programs: Mapping[str, Any], default: str, deployment: Deployment) -> Any:
    """An MLModel of these functions that stores equal weights once.

    ``default``: Core ML's default function.
    """
    from coremltools.converters.mil.converter import mil_convert
    from coremltools.converters.mil.mil import Program

    whole = Program()
    for name, program in programs.items():
        whole.add_function(name, program.functions[MAIN])
    whole.default_function_name = default
    whole.export_as_multifunction = [*programs] != [MAIN]
    whole.skip_all_passes = True
    _share(whole)
    with _unchecked():
        return mil_convert(
            whole,
            convert_from="milinternal",
            convert_to="mlprogram",
            compute_units=ct.ComputeUnit.CPU_ONLY,
            specification_version=ct.target[deployment.value],
            skip_model_load=True,
        )


def _share(program: Any) -> None:
    """Give constants with equal contents one identity, under which coremltools stores them once."""
    for function in program.functions.values():
        for operation in function.operations:
            value = operation.outputs[0].val if operation.op_type == "const" else None
            if isinstance(value, np.ndarray) and operation.weight_id is None:
                kind = (str(operation.outputs[0].dtype), value.shape)
                operation.weight_id = (
                    f"{kind} {sha256(np.ascontiguousarray(value).data).hexdigest()}"
                )


@contextmanager
def _unchecked() -> Iterator[None]:
    """Without what coremltools does after every pass and what takes longer than the passes.

    That is a check of the whole program, the search for values that compressed weights reach (there
    are none yet, or no pass follows), and the program as text for a log that nobody reads.
    """
    from coremltools.converters.mil.mil import Block, Program

    blocks = patch.multiple(Block, _propagate_nonreplaceable_vars=_nothing, indented_str=_nothing)
    with patch.object(Program, "validate", _nothing), blocks:
        yield


def _nothing(*_: Any, **__: Any) -> str:
    return ""
