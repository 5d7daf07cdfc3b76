"""Tensors of adapters: safetensors files as NumPy arrays, and how a bundle stores floats.

A bundle stores an app's floats as float32, float16, or int8 with a scale per column. An int8 tensor
has a companion ``[.., columns]`` float32, named with the suffix ``SCALE``. Hosts convert what they
load to float32, so graphs and programs take the same tensors however they were stored.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from ssdevice.bundle.manifest import Precision
from ssdevice.errors import InputError, check_no_pointer, first_line, reading

Array = NDArray[Any]
Floats = NDArray[np.float32]
Codes = tuple[NDArray[np.int8], Floats]
ADAPTERS = "adapters"
"""Folder of the apps' folders in a bundle."""
SCALE = ".int8_scale"
LEAST_ROWS = 8
"""Tensors with fewer rows are stored as float16: a scale per column costs more than int8 saves."""
PRECISIONS = (Precision.FP32, Precision.FP16, Precision.INT8)
LEVELS = 127.0
"""Largest code of an int8 weight."""
PAIR_LEVELS = 127.5
"""Largest sum of two neighbours' codes before rounding, 128 after it: see ``int8_factors``."""
COLUMNS = 4096
"""How many columns are quantized at a time."""
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I8": "|i1"}


def read_floats(file: Path) -> dict[str, Floats]:
    """Every tensor as float32.

    Raises InputError for another kind of file, or values that are not finite floats.
    """
    floats = {}
    for name, value in read_tensors(file).items():
        if value.dtype == np.int8:
            raise InputError(f"{file}: tensor {name!r} is I8, expected floats")
        floats[name] = value.astype(np.float32, copy=False)
        if not np.isfinite(floats[name]).all():
            raise InputError(f"{file}: tensor {name!r} has values that are not finite")
    return floats


def read_tensors(file: Path) -> dict[str, NDArray[Any]]:
    """Every tensor in its type, BF16 as float32.

    Raises InputError for another kind of file or unknown types.
    """
    check_no_pointer(file)
    try:
        with reading(file):
            tensors = deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise InputError(f"{file}: not a safetensors file ({first_line(error)})") from error
    return {name: _array(f"{file}: tensor {name!r}", entry) for name, entry in sorted(tensors)}


def _array(what: str, entry: Mapping[str, Any]) -> NDArray[Any]:
    kind = entry["dtype"]
    if kind not in DTYPES:
        raise InputError(f"{what} is {kind}, expected {', '.join(DTYPES)}")
    flat = np.frombuffer(entry["data"], DTYPES[kind])
    if kind == "BF16":  # the upper half of a float32
        flat = (flat.astype(np.uint32) << 16).view(np.float32)
    try:
        return flat.reshape(entry["shape"])
    except ValueError as error:  # nothing, of a shape that NumPy does not have
        raise InputError(f"{what} has shape {str(entry['shape'])[:60]}: {error}") from error


def write_tensors(file: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Write tensors of float32, float16 or int8."""
    file.write_bytes(save({name: np.ascontiguousarray(value) for name, value in tensors.items()}))


def stored(tensors: Mapping[str, Array], precision: Precision) -> dict[str, Array]:
    """Tensors in the form that a file holds. Those that are not float32 are unchanged."""
    found: dict[str, Array] = {}
    for name, value in tensors.items():
        if value.dtype != np.float32 or precision is Precision.FP32:
            found[name] = value
        elif precision is Precision.INT8 and value.ndim > 1 and value.shape[-2] >= LEAST_ROWS:
            found[name], found[name + SCALE] = int8_columns(value)
        else:
            found[name] = value.astype(np.float16)
    return found


def restored(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The inverse of ``stored``, with floats as float32.

    Raises ValueError for a scale that does not fit.
    """
    found: dict[str, Array] = {}
    for name, value in tensors.items():
        scale = tensors.get(name + SCALE)
        if scale is not None:
            found[name] = _from_int8(name, value, scale)
        elif not name.endswith(SCALE):
            found[name] = value.astype(np.float32) if value.dtype == np.float16 else value
        elif name.removesuffix(SCALE) not in tensors:
            raise ValueError(f"{name!r} is the scale of a tensor that is missing")
    return found


def _from_int8(name: str, value: Array, scale: Array) -> Array:
    """The floats of a tensor in int8; raises ValueError unless its scale fits."""
    fits = value.ndim >= 2 and scale.shape == (*value.shape[:-2], value.shape[-1])
    if value.dtype != np.int8 or not fits:
        raise ValueError(
            f"{name!r} is {value.dtype} {list(value.shape)}, its scale {list(scale.shape)}"
        )
    return value * scale.astype(np.float32)[..., None, :]


def int8_columns(weight: Array) -> Codes:
    """The nearest int8 codes of ``weight [.., K, N]`` and their scales ``[.., N]``.

    A column of zeros gets scale 1.
    """

    def scale(columns: Array) -> Floats:
        return _peak(columns) / np.float32(LEVELS)

    return _int8(weight, scale)


def int8_factors(weight: Array) -> Codes:
    """Like ``int8_columns``, with scales that keep products with uint8 inputs exact on every CPU.

    x86 without VNNI multiplies two neighbouring weights by inputs of 0..255 and adds both products
    in 16 bits (``vpmaddubsw``), which saturates beyond 32767. So the codes of inputs 2i and 2i + 1
    may add up to at most 128.
    """
    paired = weight.shape[-2] // 2 * 2

    def scale(columns: Array) -> Floats:
        # Of opposite signs, a sum never exceeds a single weight.
        sums = columns[..., 0:paired:2, :] + columns[..., 1:paired:2, :]
        of_one = _peak(columns) / np.float32(LEVELS)
        of_two = _peak(sums) / np.float32(PAIR_LEVELS)
        return np.asarray(np.maximum(of_one, of_two), np.float32)

    return _int8(weight, scale)


def _peak(weight: Array) -> Floats:
    """The largest magnitude in each column, ``[.., N]``."""
    most = weight.max(axis=-2, initial=0)
    least = weight.min(axis=-2, initial=0)
    return np.asarray(np.maximum(most, -least), np.float32)


def _int8(weight: Array, scale_of: Callable[[Array], Floats]) -> Codes:
    """Codes and scales, made from a part of the columns at a time: embeddings are large."""
    codes = np.empty_like(weight, np.int8)
    scales = np.empty((*weight.shape[:-2], weight.shape[-1]), np.float32)
    for at in range(0, weight.shape[-1], COLUMNS):
        columns = weight[..., at : at + COLUMNS]
        scale = scale_of(columns)
        scale = np.where(scale > 0, scale, np.float32(1))
        levels = np.rint(columns / scale[..., None, :])
        codes[..., at : at + COLUMNS] = np.clip(levels, -LEVELS, LEVELS, out=levels)
        scales[..., at : at + COLUMNS] = scale
    return codes, scales
