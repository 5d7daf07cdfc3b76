"""Gives the torch reference the weights of a Core ML package, so that compression makes no
difference.
"""

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from ssdevice.errors import ParityError
from ssdevice.export import weights
from ssdevice.export.mlprogram.weights import FLOAT16, key_of, short_name, weight_key
from ssdevice.export.parity.difference import Array
from ssdevice.export.plan import Quant
from ssdevice.mil.program import Program
from ssdevice.model.step import StreamModel

CLOSE = {Quant.FP16: 0.005, Quant.INT8: 0.2, Quant.INT4: 0.7, Quant.PALETTE4: 0.7}
"""Allowed relative difference of a stored matrix from the model's, measured on their sketches.

It is well above the cost of rounding, even if outliers stretch the scales; a different matrix
differs by 1.4.
"""
FLOATS = weights.Schemes(FLOAT16)
"""For a walk that asks only which weights there are."""
Sketches = Mapping[str, Tensor]
"""Name of a matrix -> its ``sketch`` before its values were released."""


@contextmanager
def stored_weights(
    model: StreamModel, program: Program, functions: Collection[str]
) -> Iterator[None]:
    """In this context every matrix of the model has the package's values.

    Raises ParityError for a missing one.
    """
    before = adopt_weights(model, program, functions)
    try:
        yield
    finally:
        for weight, values in before.items():
            weight.data = values


def adopt_weights(
    model: StreamModel,
    program: Program,
    functions: Collection[str],
    quant: Quant | None = None,
    own: Sketches | None = None,
) -> dict[Tensor, Tensor]:
    """Give every matrix of the model its values in these functions of a package, sharing the
    package's memory.

    Returns the previous values. ``own``: the sketches of ``drop_matrices``. Raises ParityError for
    a matrix that the package lacks or, with the requested precision ``quant``, one that differs by
    more than that costs: a reference with the package's weights would not notice.
    """
    where = program.package.path
    adopted = dict[Tensor, Tensor]()
    stored = decompressed(program, functions)
    for one in weights.stored(model, FLOATS):
        names = one.names
        weight = one.weight
        keys = [key for name in names for key in (key_of(name), short_name(key_of(name)))]
        if (array := next((stored[key] for key in keys if key in stored), None)) is None:
            raise ParityError(f"{where}: weight {names[0]} is not in the package")
        if array.shape != tuple(weight.shape):
            raise ParityError(
                f"{where}: weight {names[0]} has shape {list(array.shape)}, "
                f"not {list(weight.shape)}"
            )
        with warnings.catch_warnings():
            # The array is read-only, and the reference does not write.
            warnings.simplefilter("ignore")
            tensor = torch.from_numpy(array)
        if quant is not None:
            wanted = own[names[0]] if own else sketch(weight.data)
            off = float((sketch(tensor) - wanted).norm() / wanted.norm().clamp_min(1e-12))
            if not off <= CLOSE[quant]:
                raise ParityError(
                    f"{where}: weight {names[0]} differs from the model's by {off:.2g} of its "
                    f"size, at most {CLOSE[quant]} can be rounding"
                )
        adopted[weight] = tensor.to(weight.dtype)
    before = {weight: weight.data for weight in adopted}
    for weight, values in adopted.items():
        weight.data = values
    return before


def drop_matrices(model: StreamModel) -> Sketches:
    """Release the memory of every matrix, which keeps only its shape until ``adopt_weights`` gives
    it values.
    """
    sketches = {}
    for one in weights.stored(model, FLOATS):
        weight = one.weight
        sketches[one.names[0]] = sketch(weight.data)
        weight.data = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
    return sketches


def sketch(matrix: Tensor) -> Tensor:
    """A matrix ``[rows, columns]`` times a fixed random vector: ``[rows]`` numbers that identify
    it.
    """
    return matrix.detach().float() @ torch.randn(
        matrix.shape[-1], generator=torch.Generator().manual_seed(0)
    )


def decompressed(program: Program, functions: Collection[str]) -> dict[str, Array]:
    """The matrices of these functions by their converted names, without prefix and suffixes."""
    found: dict[str, Array] = {}
    for name in functions:
        constants = program.plan(name).constants
        for output, kind in program.package.function(name).makers.items():
            key = weight_key(kind, output)
            array = constants.get(output)
            if key is not None and array is not None and array.ndim >= 2:
                found.setdefault(key, array)
    return found
