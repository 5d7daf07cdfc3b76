"""coremltools without its own messages and progress bars."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from ssdevice.export.quiet import quiet as silenced

# On import, coremltools reports missing native parts and packages that are newer than it was tested with.
for _name in ("coremltools", "torchao"):
    logging.getLogger(_name).setLevel(logging.ERROR)
import coremltools as ct  # noqa: E402

__all__ = ["ct", "quiet"]


@contextmanager
def quiet() -> Iterator[None]:
    """In this context coremltools and torch report only errors; the caller reports progress."""
    with ExitStack() as stack:
        for module, name in _progress_bars():
            stack.enter_context(patch.object(module, name, partial(getattr(module, name), disable=True)))
        stack.enter_context(silenced("coremltools", "torch"))
        yield


def _progress_bars() -> Iterator[tuple[Any, str]]:
    """The modules and names under which coremltools holds the class of its progress bars."""
    from coremltools.converters.mil.frontend.torch import ops
    from coremltools.converters.mil.mil.passes import pass_pipeline
    from coremltools.optimize.coreml import _quantization_passes

    for module in (ops, pass_pipeline, _quantization_passes):
        for name in ("tqdm", "_tqdm"):
            if hasattr(module, name):
                yield module, name
