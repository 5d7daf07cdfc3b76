"""Silences the logs and warnings of other packages while they work."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def quiet(*packages: str) -> Iterator[None]:
    """In this context the loggers of these packages report only errors, and warnings are ignored.

    Nor does torch record the source line of every operation that it traces, which nobody reads.
    """
    from torch.fx import config

    inside = tuple(f"{package}." for package in packages)
    names = {
        *packages,
        *(name for name in logging.root.manager.loggerDict if name.startswith(inside)),
    }
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in names}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), patch.object(config, "do_not_emit_stack_traces", True):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
