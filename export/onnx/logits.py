"""The ONNX engine with its logits shown, for telling near-ties from faults.

The graphs in the bundle end in the choice of a token and copy no logits; here what is chosen from is made an output of
a copy in memory.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import onnxruntime as ort

from ssdevice.bundle.folder import Bundle
from ssdevice.contract import PLAIN, STEP, TOKENS, TensorSpec
from ssdevice.errors import BundleError
from ssdevice.export.logits import ShowsLogits
from ssdevice.export.onnx.nodes import ancestors, makers, show_choices
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.onnx.engine import OnnxEngine, app_adapter, app_graphs
from ssdevice.runtime.onnx.sessions import SharedBase

LOGITS = "shown_logits"
CHOICES = ("ArgMax", "TopK")
"""Operators that choose a token."""
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"


class LogitsEngine(ShowsLogits, OnnxEngine):
    """An OnnxEngine that shows logits."""

    shown = LOGITS

    @classmethod
    def of(cls, bundle: Bundle, app: str | None, options: EngineOptions) -> LogitsEngine:
        """The engine of an app; its graphs are its own."""
        files, geometry = app_graphs(bundle, app)
        adapter = app_adapter(bundle, app, SharedBase.of(bundle, options))
        engine = cls(files, geometry, bundle.manifest.cache_dtype, options, adapter=adapter)
        for name, rows in ((STEP, geometry.tree.size), (PLAIN, 1)):
            spec = engine.specs[name]
            shown = TensorSpec(LOGITS, (rows, geometry.vocab), "float32")
            engine.specs[name] = replace(spec, outputs=(*spec.outputs, shown))
        return engine

    def model(self, function: str, options: ort.SessionOptions) -> str | bytes:
        if function not in (STEP, PLAIN):
            return super().model(function, options)
        options.add_session_config_entry(WEIGHTS_FOLDER, str(self.files[function].parent))
        return show_logits(self.files[function], self.specs[function].outputs[-1])


def show_logits(file: Path, shown: TensorSpec) -> bytes:
    """The graph in ``file`` with the logits that decide TOKENS as the further output ``shown``.

    Raises BundleError for a graph in which they are not found.
    """
    model = onnx.load(str(file), load_external_data=False)
    graph = model.graph
    show_choices(graph)
    maker = makers(graph)
    # Of the choices behind the tokens, the one that depends on no other is made on the main logits: the other picks
    # the end node from what the first said.
    choices = [node for node in ancestors(maker, [TOKENS]) if node.op_type in CHOICES]
    first = [node for node in choices if not any(n.op_type in CHOICES for n in ancestors(maker, node.input[:1]))]
    if len(first) != 1:
        raise BundleError(f"{file}: {len(first)} nodes of {' or '.join(CHOICES)} decide the tokens, expected one")
    ints, floats = onnx.TensorProto.INT64, onnx.TensorProto.FLOAT
    graph.initializer.append(onnx.helper.make_tensor(f"{LOGITS}_shape", ints, [2], [int(size) for size in shown.shape]))
    graph.node.append(onnx.helper.make_node("Reshape", [first[0].input[0], f"{LOGITS}_shape"], [LOGITS]))
    graph.output.append(onnx.helper.make_tensor_value_info(LOGITS, floats, list(shown.shape)))
    content: bytes = model.SerializeToString()
    return content
