"""``.onnx_adapter`` files: an app's tensors by graph input, in ONNX Runtime's own format."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from ssdevice.adapters.storage import SCALE, restored
from ssdevice.errors import BundleError, first_line

ADAPTER_FILE = "adapter.onnx_adapter"
ADAPTER_VERSION = 1


def model_version(base_sha256: str) -> int:
    """How the file identifies its base: the first 31 bits of the sha256 of its weights."""
    return int(base_sha256[:8], 16) & 0x7FFFFFFF


def write_adapter(file: Path, tensors: Mapping[str, NDArray[Any]], base_sha256: str) -> None:
    """Write an app's tensors in the form of ``adapters.storage.stored``; loading widens them to
    float32.
    """
    adapter = ort.AdapterFormat()
    adapter.set_adapter_version(ADAPTER_VERSION)
    adapter.set_model_version(model_version(base_sha256))
    adapter.set_parameters({name: _value(value) for name, value in tensors.items()})
    adapter.export_adapter(str(file))


class AdapterTensors:
    """An app's tensors in memory, shared by all sessions of the app.

    Raises BundleError if the base is another.
    """

    def __init__(self, file: Path, base_sha256: str) -> None:
        self.file = file
        try:
            adapter = ort.AdapterFormat.read_adapter(str(file))
            version = adapter.get_adapter_version()
            model = adapter.get_model_version()
            values = adapter.get_parameters()
        except Exception as error:  # the bindings derive their errors from Exception itself
            raise BundleError(
                f"{file}: ONNX Runtime cannot read it ({first_line(error)})"
            ) from error
        if version != ADAPTER_VERSION:
            raise BundleError(
                f"{file}: adapter version {version}, this ssdevice reads {ADAPTER_VERSION}"
            )
        if model != model_version(base_sha256):
            raise BundleError(f"{file}: made for another base than the bundle's")
        try:
            # Tensors that graphs can take as they are stay where they are.
            self.values: dict[str, ort.OrtValue] = {}
            packed: dict[str, NDArray[Any]] = {}
            for name, value in values.items():
                if _is_packed(name, value, values):
                    packed[name] = value.numpy()
                else:
                    self.values[name] = _aligned(value)
            for name, array in restored(packed).items():
                self.values[name] = _value(array)
        except ValueError as error:
            raise BundleError(f"{file}: {error}") from error

    def check(self, session: ort.InferenceSession, names: frozenset[str], where: str) -> None:
        """Raise BundleError unless each graph input in ``names`` has a tensor that fits."""
        for wanted in session.get_inputs():
            if wanted.name not in names:
                continue
            value = self.values.get(wanted.name)
            if value is None:
                raise BundleError(
                    f"{self.file}: has no {wanted.name!r}, which {where} needs; add the app again"
                )
            if value.data_type() != wanted.type or not fits(value.shape(), wanted.shape):
                raise BundleError(
                    f"{self.file}: {wanted.name!r} is {value.data_type()} {list(value.shape())}, "
                    f"{where} needs {wanted.type} {list(wanted.shape)}"
                )


def fits(shape: Sequence[int | str], declared: Sequence[int | str | None]) -> bool:
    """Whether a graph takes a tensor of this shape.

    A name or None in the ``declared`` shape stands for any size.
    """
    if len(shape) != len(declared):
        return False
    for size, wanted in zip(shape, declared, strict=True):
        if isinstance(wanted, int) and size != wanted:
            return False
    return True


def _is_packed(name: str, value: ort.OrtValue, values: Mapping[str, ort.OrtValue]) -> bool:
    return value.data_type() == "tensor(float16)" or name + SCALE in values or name.endswith(SCALE)


def _aligned(value: ort.OrtValue) -> ort.OrtValue:
    """The tensor at an address for its type: ONNX Runtime's file has multiples of four bytes."""
    if value.data_type() == "tensor(int64)":
        return _value(np.array(value.numpy()))
    return value


def _value(array: NDArray[Any]) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
