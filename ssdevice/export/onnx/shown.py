"""An ONNX bundle's graphs with every product as an output: what the parity gate follows."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from ssdevice.contract import NEXT_ROOT, TOKENS, past_key, past_value
from ssdevice.export.onnx.graphs import (
    WEIGHTS_FOLDER,
    ancestors,
    makers,
    show_choices,
    show_regions,
)
from ssdevice.export.parity.difference import Array
from ssdevice.export.parity.products import Call, Product, Shown
from ssdevice.memory import free_memory
from ssdevice.runtime.onnx.engine import OnnxEngine

MODULE = "module.model."
"""Ends what the tracer puts before a parameter's name; with open identifiers there is more before
it.
"""

WRAPPED = ".base"
"""In the name of a weight with a low-rank term beside it; apps share graphs with and without such
terms.
"""

Weights = tuple[tuple[str, int], ...]
Written = tuple[Weights, str, str]
"""A product of a file: its weights with how many columns each has, and the names of its rows and
its result.
"""


class OnnxShown(Shown):
    """The graphs of an ``engine``, with an adapter if they have slots.

    ``products``: those of each file.
    """

    def __init__(
        self, engine: OnnxEngine, products: Mapping[Path, list[Written]], slotted: bool
    ) -> None:
        self.dtype = np.dtype(engine.cache_dtype).type
        self.files = engine.files
        self.products = products
        self.geometry = engine.geometry
        self.slotted = slotted
        self.adapter = (
            {name: value.numpy() for name, value in engine.adapter.values.items()}
            if engine.adapter
            else {}
        )
        self._open: tuple[str, ort.InferenceSession, list[Written]] | None = None

    def spell(self, parameter: str) -> str:
        return parameter.replace(WRAPPED, "")

    def call(self, function: str, inputs: Mapping[str, Array], length: int, past: Array) -> Call:
        if self._open is None or self._open[0] != function:
            self.close()  # a session holds the weights, so there is one at a time
            file = self.files[function]
            self._open = function, *open_shown(file, self.products[file])
        _, session, products = self._open
        names = [value.name for value in session.get_outputs()]
        feeds = dict(inputs)
        rows = past if length else np.zeros((len(past), 1, self.geometry.row_width), np.float32)
        rows = rows.astype(self.dtype, copy=False)
        for layer in range(self.geometry.layers):
            feeds[past_key(layer)] = rows[2 * layer]
            feeds[past_value(layer)] = rows[2 * layer + 1]
        for value in session.get_inputs():
            if value.name not in feeds:
                feeds[value.name] = self.adapter[value.name]
        out = dict(zip(names, session.run(names, feeds), strict=True))
        shown = [
            one
            for weights, rows, made in products
            for one in self._split(weights, out[rows], out[made])
        ]
        return Call(out, shown)

    def close(self) -> None:
        self._open = None
        free_memory()

    def _split(self, weights: Weights, source: Array, result: Array) -> Iterator[Product]:
        """The product of each of the weights that one result joins."""
        rows = source.reshape(-1, source.shape[-1])
        start = 0
        for weight, width in weights:
            columns = result[..., start : start + width]
            yield Product(self.spell(weight.partition(MODULE)[2]), rows, columns.reshape(-1, width))
            start += width


def open_shown(file: Path, products: list[Written]) -> tuple[ort.InferenceSession, list[Written]]:
    """A session of a copy in memory that also gives every product, and those that it computes in
    order.
    """
    model = onnx.load(str(file), load_external_data=False)
    show_regions(model)
    show_choices(model.graph)
    names = [name for node in model.graph.node for name in node.output]
    place = {name: at for at, name in enumerate(names)}
    # Main rows before streams, as the model calls a linear for them; regions may have them the
    # other way round.
    chosen = [value.name for value in model.graph.output if value.name in (TOKENS, NEXT_ROOT)]
    main = {name for node in ancestors(makers(model.graph), chosen) for name in node.output}
    shown = [product for product in products if product[2] in place]
    shown.sort(key=lambda product: (product[2] not in main, place[product[2]]))
    outputs = {value.name for value in model.graph.output}
    for name in dict.fromkeys(name for _, *ends in shown for name in ends):
        if name not in outputs:
            model.graph.output.append(
                onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
            )
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    options.add_session_config_entry(WEIGHTS_FOLDER, str(file.parent))
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    ), shown
