"""coremltools without what it says of itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ssdevice.export.quiet import quiet as silenced

# Importing coremltools reports its absent native parts and every version newer than it was tested with.
for _name in ("coremltools", "torchao"):
    logging.getLogger(_name).setLevel(logging.ERROR)
import coremltools as ct  # noqa: E402

__all__ = ["ct", "quiet"]


@contextmanager
def quiet() -> Iterator[None]:
    """Within this context coremltools and torch say nothing but errors: progress is the caller's to report."""
    bars = [(module, name, getattr(module, name)) for module, name in _progress_bars()]
    for module, name, bar in bars:
        setattr(module, name, partial(bar, disable=True))
    try:
        with silenced("coremltools", "torch"):
            yield
    finally:
        for module, name, bar in bars:
            setattr(module, name, bar)


def _progress_bars() -> Iterator[tuple[Any, str]]:
    """Where coremltools holds the class of its progress bars."""
    from coremltools.converters.mil.frontend.torch import ops
    from coremltools.converters.mil.mil.passes import pass_pipeline
    from coremltools.optimize.coreml import _quantization_passes

    for module in (ops, pass_pipeline, _quantization_passes):
        for name in ("tqdm", "_tqdm"):
            if hasattr(module, name):
                yield module, name
