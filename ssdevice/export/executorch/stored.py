"""The weights of the products that an ExecuTorch program delegates, read from its file and compared
with the model's.

Delegates show no products, so the gate follows the traced programs (docs/parity.md). What delegates
multiply with can be read: every fully connected node of XNNPACK's graphs must have the weight of a
linear that the model calls. Their order is not compared, since lowering moves products that do not
depend on each other. Field numbers are those of ExecuTorch's program.fbs and XNNPACK's schema.fbs.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn

from ssdevice.errors import ParityError
from ssdevice.export.weights import multiplies
from ssdevice.model.mapped import release
from ssdevice.model.step import StreamModel
from ssdevice.runtime.executorch.file import Data, Graph, Table, read_program

FULLY_CONNECTED = 2
"""Member of the union XNodeUnion."""
FLOAT32 = 1
ROWS_OF_INT8 = 6
ROWS_OF_INT4 = 8
GROUPS_OF_INT4 = 10
"""Members of XNNDatatype."""
PER_CHANNEL = 1
PER_GROUP = 4
"""Members of the union XNNQuantParams."""
SAME = 1e-6
"""Allowed relative difference (rms) of a weight: codes times scales are rounded once."""
Array = NDArray[np.float32]


def check_stored(file: Path, model: StreamModel, products: Mapping[str, Sequence[str]]) -> None:
    """Compare the products that a program delegates with the linears of the model that was lowered.

    ``products``: by function, the weights that it multiplies with, each as often as it does. They
    may be missing in the delegates: they can be slots, or outside. Raises ParityError, and
    BundleError for a damaged file.
    """
    called: dict[str, list[tuple[str, nn.Linear]]] = {}
    for function, names in products.items():
        called[function] = []
        for name in names:
            owner = model.get_submodule(name.removesuffix(".weight"))
            if multiplies(owner):
                called[function].append((name, owner))

    def compare(data: Data, program: Table) -> None:
        for plan in program.tables(1):
            if (method := plan.text(0)) in called:
                graphs = (Graph(entry, data, program) for entry in plan.tables(7))
                _compare(
                    method,
                    called[method],
                    (weight for graph in graphs for weight in _weights(graph)),
                )

    read_program(file, compare)


def _compare(method: str, called: list[tuple[str, nn.Linear]], stored: Iterator[Array]) -> None:
    """Raise ParityError unless every stored weight is a linear's, once for each of its calls."""
    left = list(called)
    for number, weight in enumerate(stored):
        at = next((i for i, (_, linear) in enumerate(left) if _same(weight, linear)), None)
        if at is None:
            alike = next(
                (name for name, linear in left if weight.shape == tuple(linear.weight.shape)),
                "any linear",
            )
            raise ParityError(
                f"{method}: product {number} of the delegates, {weight.shape[0]} by "
                f"{weight.shape[1]}, has another weight than {alike} and those after it: "
                "ExecuTorch stored something else than it was given"
            )
        del left[at]
        release()


def _same(stored: Array, linear: nn.Linear) -> bool:
    weight = linear.weight.dequantize() if hasattr(linear.weight, "qdata") else linear.weight
    if stored.shape != tuple(weight.shape):
        return False
    own = weight.detach().numpy()
    return bool(np.linalg.norm(stored - own) <= SAME * np.linalg.norm(own))


def _weights(graph: Graph) -> Iterator[Array]:
    """The weights ``[N, K]`` of a delegate's products, dequantized."""
    for node in graph.root.tables(1):
        if node.byte(0) == FULLY_CONNECTED:
            tensor, quantized = graph.values[node.table(1).integer(1)]
            if tensor.integer(3):
                yield _weight(graph, tensor, quantized)


def _content(graph: Graph, number: int) -> bytes:
    holder, start, size = graph.place(number)
    return holder[start : start + size]


def _weight(graph: Graph, tensor: Table, quantized: Table | None) -> Array:
    shape = tensor.integers(2)
    kind = tensor.byte(0)
    content = _content(graph, tensor.integer(3))
    if quantized is None and kind == FLOAT32:
        return np.frombuffer(content, np.float32).reshape(shape)
    if quantized is None or kind not in (ROWS_OF_INT8, ROWS_OF_INT4, GROUPS_OF_INT4):
        raise ValueError(f"weights of kind {kind}")
    if kind == ROWS_OF_INT8:
        codes = np.frombuffer(content, np.int8).reshape(shape).astype(np.float32)
    else:
        both = np.frombuffer(content, np.uint8)
        codes = (np.stack([both & 15, both >> 4], -1).reshape(shape).astype(np.float32)) - 8
    scales = _scales(graph, quantized.table(2), quantized.byte(1)).reshape(shape[0], -1)
    return (codes.reshape(shape[0], -1, shape[1] // scales.shape[1]) * scales[..., None]).reshape(
        shape
    )


def _scales(graph: Graph, of: Table, kind: int) -> Array:
    if kind == PER_CHANNEL:
        return np.frombuffer(_content(graph, of.integer(2)), np.float32)
    if kind != PER_GROUP:
        raise ValueError(f"quantization of kind {kind}")
    return (np.frombuffer(_content(graph, of.integer(4)), np.uint16).astype(np.uint32) << 16).view(
        np.float32
    )
