"""How an app's float tensors are stored in a bundle: float32, float16, or int8 with a scale per column.

An int8 tensor has a companion ``[.., columns]`` float32, named with the suffix ``SCALE``. Hosts load all as float32, so
graphs and programs take the same tensors however they were stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssdevice.adapters.weights import int8_columns
from ssdevice.bundle.manifest import Precision

Array = NDArray[Any]
ADAPTERS = "adapters"
"""Folder of the apps' folders in a bundle."""
SCALE = ".int8_scale"
LEAST_ROWS = 8
"""With fewer rows a scale per column costs more than int8 saves; such tensors are stored as float16."""
PRECISIONS = (Precision.FP32, Precision.FP16, Precision.INT8)


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
    """The inverse of ``stored``, with floats as float32. Raises ValueError for a scale that does not fit."""
    found: dict[str, Array] = {}
    for name, value in tensors.items():
        scale = tensors.get(name + SCALE)
        if scale is not None:
            if value.dtype != np.int8 or value.ndim < 2 or scale.shape != (*value.shape[:-2], value.shape[-1]):
                raise ValueError(f"{name!r} is {value.dtype} {list(value.shape)}, its scale {list(scale.shape)}")
            found[name] = value * scale.astype(np.float32)[..., None, :]
        elif not name.endswith(SCALE):
            found[name] = value.astype(np.float32) if value.dtype == np.float16 else value
        elif name.removesuffix(SCALE) not in tensors:
            raise ValueError(f"{name!r} is the scale of a tensor that is missing")
    return found
