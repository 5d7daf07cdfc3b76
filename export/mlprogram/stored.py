"""The torch reference with the weights that a Core ML package holds: what compression cost is then no difference."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from ssdevice.errors import ParityError
from ssdevice.export.mlprogram.names import short_name, weight_key
from ssdevice.export.parity.reference import Array
from ssdevice.export.plan import Quant
from ssdevice.mil.program import Program
from ssdevice.model.step import StreamModel

Saved = list[tuple[nn.Parameter, Tensor]]
CLOSE = {Quant.FP16: 0.005, Quant.INT8: 0.2, Quant.INT4: 0.7, Quant.PALETTE4: 0.7}
"""How far a stored matrix may be from the model's, relative to it, as ``sketch`` sees both.

Well beyond what rounding costs even where outliers stretch the scales; another matrix is off by 1.4.
"""
Sketches = Mapping[str, Tensor]
"""By the name of a matrix: what ``sketch`` saw of it before its values were given back."""


@contextmanager
def stored_weights(model: StreamModel, program: Program, functions: Collection[str]) -> Iterator[None]:
    """Within this context every matrix of the model has the package's values; raises ParityError for one it lacks."""
    saved: Saved = []
    try:
        adopt_weights(model, program, functions, saved)
        yield
    finally:
        for weight, data in saved:
            weight.data = data


def adopt_weights(
    model: StreamModel,
    program: Program,
    functions: Collection[str],
    saved: Saved | None = None,
    quant: Quant | None = None,
    sketches: Sketches | None = None,
) -> None:
    """Give every matrix of the model the values it has in these functions of a package, in the package's memory.

    ``saved`` receives what the model had. ``quant``: how weights were to be stored. ``sketches``: of a model that was
    given to ``drop_matrices``. Raises ParityError for a matrix
    that the package lacks, or with ``quant`` for one that is not the model's up to what this costs: a reference that
    takes over the package's weights would not notice.
    """
    where = program.package.path
    stored = decompressed(program, functions)
    for names, weight in _matrices(model).items():
        keys = [key for name in names for key in (key_of(name), short_name(key_of(name)))]
        array = next((stored[key] for key in keys if key in stored), None)
        if array is None:
            raise ParityError(f"{where}: weight {names[0]} is not in the package")
        if array.shape != tuple(weight.shape):
            raise ParityError(f"{where}: weight {names[0]} has shape {list(array.shape)}, not {list(weight.shape)}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the array cannot be written; neither does the reference
            tensor = torch.from_numpy(array)
        if quant is not None:
            _check_close(where, names[0], sketches[names[0]] if sketches else sketch(weight.data), tensor, CLOSE[quant])
        if saved is not None:
            saved.append((weight, weight.data))
        weight.data = tensor.to(weight.dtype)


def drop_matrices(model: StreamModel) -> Sketches:
    """Give back the memory of every matrix, which keeps its shape alone until ``adopt_weights`` gives it values."""
    sketches = {}
    for names, weight in _matrices(model).items():
        sketches[names[0]] = sketch(weight.data)
        weight.data = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
    return sketches


def sketch(matrix: Tensor) -> Tensor:
    """A matrix ``[rows, columns]`` times one fixed random vector: ``[rows]`` that tell it from any other."""
    generator = torch.Generator().manual_seed(0)
    return matrix.detach().float() @ torch.randn(matrix.shape[1], generator=generator)


def _check_close(where: Path, name: str, own: Tensor, stored: Tensor, bound: float) -> None:
    off = float((sketch(stored) - own).norm() / own.norm().clamp_min(1e-12))
    if not off <= bound:
        raise ParityError(
            f"{where}: weight {name} is {off:.2g} of itself from the model's, at most {bound} can be rounding"
        )


def key_of(name: str) -> str:
    """A parameter's name as conversion spells it."""
    return re.sub(r"[^A-Za-z0-9_]", "_", name).lower()


def _matrices(model: StreamModel) -> dict[tuple[str, ...], nn.Parameter]:
    """Every matrix that is multiplied with or looked up in, once, under all its names."""
    names: dict[int, list[str]] = {}
    weights: dict[int, nn.Parameter] = {}
    for path, part in model.named_modules(remove_duplicate=False):  # stream adapters hang in two places
        if isinstance(part, (nn.Linear, nn.Embedding)):
            names.setdefault(id(part.weight), []).append(f"{path}.weight")
            weight: nn.Parameter = part.weight  # type: ignore[assignment]
            weights[id(weight)] = weight
    return {tuple(names[key]): weight for key, weight in weights.items()}


def decompressed(program: Program, functions: Collection[str]) -> dict[str, Array]:
    """Matrices of these functions by the name conversion gave them, without what conversion added."""
    found: dict[str, Array] = {}
    for name in functions:
        constants = program.plan(name).constants
        for operation in program.package.function(name).operations:
            key = weight_key(operation.kind, operation.output)
            array = constants.get(operation.output) if key is not None else None
            if key is not None and array is not None and array.ndim == 2:
                found.setdefault(key, array)
    return found
