"""What torch and ExecuTorch remember of a program, and with it its graphs, for as long as the process lives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch._subclasses import FakeTensorMode
from torch.fx.experimental import proxy_tensor


@contextmanager
def emptied_caches() -> Iterator[None]:
    """In this context nothing that is lowered is remembered longer than it is needed.

    ExecuTorch compares each graph with its partitioned copy and remembers all pairs of nodes that it compared, and
    the last node that a partition cannot have, to log it.
    """
    from executorch.exir.backend import backend_api, utils

    compare = backend_api.is_identical_graph

    def identical(one: Any, other: Any) -> Any:
        try:
            return compare(one, other)
        finally:
            utils.is_same_node.cache_clear()

    try:
        with (
            patch.object(backend_api, "is_identical_graph", identical),
            patch.object(utils.WhyNoPartition, "__call__", lambda *_, **__: None),
        ):
            yield
    finally:
        FakeTensorMode.cache_clear()
        proxy_tensor._FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT.clear()  # of the last trace
