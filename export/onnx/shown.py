"""An ONNX bundle's graphs with every product as an output: what the parity gate follows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from ssdevice.contract import LENGTH, NEXT_ROOT, TOKENS, past_key, past_value
from ssdevice.export.onnx.graph import JOIN, LOGITS, READS, WIDTH
from ssdevice.export.onnx.logits import WEIGHTS_FOLDER
from ssdevice.export.onnx.nodes import ancestors, makers, show_products
from ssdevice.export.parity.difference import Array
from ssdevice.export.parity.products import Call, Product
from ssdevice.export.plan import ExportPlan
from ssdevice.memory import free_memory
from ssdevice.runtime.onnx.adapter import AdapterTensors

MODULE = "module.model."
"""Ends what the tracer puts before a parameter's name; with open identifiers there is more before it."""

WRAPPED = ".base"
"""Part of a weight's name where a low-rank term stands beside it; apps share graphs in which none does."""


class OnnxShown:
    """See ``parity.products.Shown``. ``files``: function -> graph; ``adapter``: what its slots take.

    ``plan``: the app's.
    """

    def __init__(
        self, files: Mapping[str, Path], plan: ExportPlan, cache_dtype: str, adapter: AdapterTensors | None
    ) -> None:
        self.dtype: type[np.generic] = np.dtype(cache_dtype).type
        self.files, self.geometry, self.slotted = files, plan.geometry, not plan.merged
        self.adapter = {name: value.numpy() for name, value in adapter.values.items()} if adapter is not None else {}
        self._open: tuple[str, ort.InferenceSession, list[tuple[str, str, str]]] | None = None

    def spell(self, parameter: str) -> str:
        return parameter.replace(WRAPPED, "")

    def call(self, function: str, integers: Mapping[str, Array], length: int, past: Array) -> Call:
        if self._open is None or self._open[0] != function:
            self.close()  # a session holds the weights, so there is one at a time
            self._open = function, *open_shown(self.files[function])
        _, session, marks = self._open
        names = [value.name for value in session.get_outputs()]
        feeds = {**integers, LENGTH: np.array([length], np.int32)}
        rows = past if length else np.zeros((len(past), 1, self.geometry.row_width), np.float32)
        rows = rows.astype(self.dtype, copy=False)
        for layer in range(self.geometry.layers):
            feeds[past_key(layer)], feeds[past_value(layer)] = rows[2 * layer], rows[2 * layer + 1]
        for value in session.get_inputs():
            if value.name not in feeds:
                feeds[value.name] = self.adapter[value.name]
        out = dict(zip(names, session.run(names, feeds), strict=True))
        return Call(out, [made for name, *ends in marks for made in self._products(name, *map(out.__getitem__, ends))])

    def close(self) -> None:
        self._open = None
        free_memory()

    def _products(self, weights: str, source: Array, result: Array) -> Iterator[Product]:
        """The product of each of the weights that one result joins."""
        start = 0
        for part in weights.split(JOIN):
            weight, _, width = part.rpartition(WIDTH) if JOIN in weights else (part, "", result.shape[-1])
            yield self._product(weight, source, result[..., start : start + int(width)])
            start += int(width)

    def _product(self, weight: str, source: Array, result: Array) -> Product:
        outputs = result.reshape(-1, result.shape[-1])
        name = self.spell(weight.partition(MODULE)[2])
        return Product(name, source.reshape(-1, source.shape[-1]), outputs)


def open_shown(file: Path) -> tuple[ort.InferenceSession, list[tuple[str, str, str]]]:
    """A session of a copy in memory that also gives every product, and (weight, rows, result) of these in order."""
    model = onnx.load(str(file), load_external_data=False)
    show_products(model)
    made = [name for node in model.graph.node for name in node.output]
    marks = []
    for name in made:
        if name == LOGITS:
            head = next((other for other in made if other.endswith(f"{READS}{LOGITS}")), None)
            if head is not None:
                marks.append((head.partition(READS)[0], head, name))
        elif READS in name and not name.endswith(f"{READS}{LOGITS}"):
            weight, _, source = name.partition(READS)
            marks.append((weight, source, name))
    # Main rows before streams, as the model calls a linear for them; regions may have them the other way round.
    chosen = [value.name for value in model.graph.output if value.name in (TOKENS, NEXT_ROOT)]
    main = {name for node in ancestors(makers(model.graph), chosen) for name in node.output}
    marks.sort(key=lambda mark: mark[2] not in main)
    outputs = {value.name for value in model.graph.output}
    for name in dict.fromkeys(name for _, source, result in marks for name in (source, result)):
        if name not in outputs:
            model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    options.add_session_config_entry(WEIGHTS_FOLDER, str(file.parent))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]), marks
