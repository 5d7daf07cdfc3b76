"""coremltools without its own messages and progress bars."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from unittest.mock import patch

from tqdm import tqdm

from ssdevice.export.quiet import quiet as silenced

# On import, coremltools reports missing native parts and packages that are newer than it was tested with.
for _name in ("coremltools", "torchao"):
    logging.getLogger(_name).setLevel(logging.ERROR)
import coremltools as ct  # noqa: E402

__all__ = ["ct", "quiet"]


@contextmanager
def quiet() -> Iterator[None]:
    """In this context coremltools and torch report only errors; the caller reports progress."""
    hidden = patch.object(tqdm, "__init__", partialmethod(tqdm.__init__, disable=True))
    with hidden, silenced("coremltools", "torch"):
        yield
