"""The torch reference with the weights that a Core ML package holds: what compression cost is then no difference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from ssdevice.errors import ParityError
from ssdevice.export.parity import Array
from ssdevice.mil.program import Program
from ssdevice.mil.reader import Package
from ssdevice.model.step import StreamModel

PREFIX = "p_module_model_"
"""What torch.export and coremltools put before a parameter's name."""
HALF = "_to_fp16"
"""What its half-precision pass puts behind it; compression adds more."""


@contextmanager
def stored_weights(model: StreamModel, package: Path) -> Iterator[None]:
    """Within this context every matrix of the model has the package's values; raises ParityError for one it lacks."""
    stored = decompressed(package)
    saved: list[tuple[nn.Parameter, Tensor]] = []
    try:
        for names, weight in _matrices(model).items():
            array = next((stored[key] for key in map(key_of, names) if key in stored), None)
            if array is None:
                raise ParityError(f"{package}: weight {names[0]} is not in the package")
            if array.shape != tuple(weight.shape):
                raise ParityError(
                    f"{package}: weight {names[0]} has shape {list(array.shape)}, not {list(weight.shape)}"
                )
            saved.append((weight, weight.data))
            weight.data = torch.from_numpy(array.copy()).to(weight.dtype)
        yield
    finally:
        for weight, data in saved:
            weight.data = data


def key_of(name: str) -> str:
    """A parameter's name as conversion spells it."""
    return name.replace(".", "_").lower()


def _matrices(model: StreamModel) -> dict[tuple[str, ...], nn.Parameter]:
    """Every matrix that is multiplied with or looked up in, once, under all its names."""
    names: dict[int, list[str]] = {}
    weights: dict[int, nn.Parameter] = {}
    for path, part in model.named_modules():
        if isinstance(part, (nn.Linear, nn.Embedding)):
            names.setdefault(id(part.weight), []).append(f"{path}.weight")
            weight: nn.Parameter = part.weight  # type: ignore[assignment]
            weights[id(weight)] = weight
    return {tuple(names[key]): weight for key, weight in weights.items()}


def decompressed(package: Path) -> dict[str, Array]:
    """Matrices of a package by the name conversion gave them, without what conversion added."""
    program = Program(Package.open(package))
    found: dict[str, Array] = {}
    for name, function in program.package.functions.items():
        constants = program.plan(name).constants
        for operation in function.operations:
            key, _, rest = operation.output.lower().removeprefix(PREFIX).partition(HALF)
            if operation.kind.startswith("constexpr_") or (operation.kind == "const" and not rest):
                array = constants.get(operation.output)
                if array is not None and array.ndim == 2:
                    found.setdefault(key, array)
    return found
