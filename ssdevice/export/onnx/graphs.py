"""Written graphs, read again: what their values are computed from, the part of the method of each
node, and logits.

=============
=================================================================================================
part           its nodes =============
=================================================================================================
layers         embedding and layers of the rows to verify; in the fused schedule also what streams
share with them head           from the last norm to the model's own tokens verification   what else
the accepted tokens and their count need streams        layers of the streams; deferred: all of
them, fused: what is not shared stream head    from the streams' last norm to the next draft rows
what only the cache's new rows need =============
=================================================================================================
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Self

import onnx
import onnxruntime as ort
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from ssdevice.bundle.folder import Bundle
from ssdevice.contract import (
    COUNT,
    LOGITS,
    NEXT_DRAFTS,
    PLAIN,
    ROWS,
    STEP,
    STEP_SHORT,
    TOKENS,
    TensorSpec,
)
from ssdevice.errors import BundleError
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.onnx.engine import OnnxEngine, app_adapter, app_graphs
from ssdevice.runtime.onnx.kernels import INT8_ARGMAX, INT8_LINEAR, REGION
from ssdevice.runtime.onnx.sessions import SharedBase

CHOICES = ("TopK", INT8_ARGMAX)
"""Operators that choose tokens of a large vocabulary."""
ALL_CHOICES = ("ArgMax", "TopK")
"""Operators that choose anything, after ``show_choices``."""
NORM = "Norm"
"""In the names of operators that normalize: ``RMSNormalization``, ``LayerNormalization``, our
``AddNorm``.
"""
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"


def makers(graph: GraphProto) -> dict[str, NodeProto]:
    """The node that computes each value."""
    return {name: node for node in graph.node for name in node.output}


def ancestors(
    maker: Mapping[str, NodeProto],
    values: Iterable[str],
    stop: Callable[[NodeProto], bool] = lambda _: False,
) -> list[NodeProto]:
    """The nodes that ``values`` are computed from, each once; not those beyond a node where
    ``stop``.
    """
    found: dict[tuple[str, ...], NodeProto] = {}
    waiting = list(values)
    while waiting:
        if (node := maker.get(waiting.pop())) is not None and (
            outputs := tuple(node.output)
        ) not in found:
            found[outputs] = node
            waiting += () if stop(node) else node.input
    return list(found.values())


def show_choices(graph: GraphProto) -> None:
    """Make each product that a column is chosen from a value: undoes ``fused.best_columns``."""
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        graph.node.append(node)
        if node.op_type == INT8_ARGMAX:
            product = graph.node[-1]
            product.op_type = INT8_LINEAR
            product.output[0] = node.name
            one = helper.make_tensor(f"{node.output[0]}_k", TensorProto.INT64, [1], [1])
            graph.initializer.append(one)
            chosen = [f"{node.output[0]}_value", node.output[0]]
            graph.node.append(helper.make_node("TopK", [node.name, one.name], chosen, axis=-1))


def show_regions(model: ModelProto) -> None:
    """Replace each region by its nodes, whose values keep their names: undoes
    ``fused.join_regions``.
    """
    bodies = {
        function.overload: function.node for function in model.functions if function.name == REGION
    }
    nodes = list(model.graph.node)
    del model.graph.node[:]
    for node in nodes:
        model.graph.node.extend(bodies[node.overload] if node.op_type == REGION else [node])


def parts_of(file: Path) -> dict[str, str]:
    """The part of every node of a ``step`` graph by node name; empty for a graph that is not built
    as expected.
    """
    model = onnx.load(str(file), load_external_data=False)
    show_regions(model)
    maker = makers(model.graph)

    def head(choices: list[NodeProto]) -> list[NodeProto]:
        made = [name for choice in choices for name in choice.output]
        return ancestors(maker, made, stop=lambda node: NORM in node.op_type)

    accepted = ancestors(maker, [TOKENS, COUNT])
    drafted = ancestors(maker, [NEXT_DRAFTS])
    known = {node.name for node in accepted}
    own = [node for node in accepted if node.op_type in CHOICES]
    streams = [node for node in drafted if node.op_type in CHOICES and node.name not in known]
    if len(own) != 1 or not streams:
        return {}
    claims = {
        "head": head(own),
        "layers": ancestors(maker, own[0].output),
        "verification": accepted,
        "stream head": head(streams),
        "streams": drafted,
        "rows": ancestors(maker, [ROWS]),
    }
    parts: dict[str, str] = {}
    for part, nodes in claims.items():
        for node in nodes:
            parts.setdefault(node.name, part)
    return parts


class LogitsEngine(OnnxEngine):
    """An OnnxEngine that shows the logits behind its tokens: an output of a copy of each graph in
    memory.

    The graphs of a bundle end in the choice of a token and copy no logits.
    """

    @classmethod
    def of(cls, bundle: Bundle, app: str | None, options: EngineOptions) -> Self:
        """The engine of an app; it shares no graph."""
        files, geometry = app_graphs(bundle, app)
        adapter = app_adapter(bundle, app, SharedBase.of(bundle, options))
        engine = cls(files, geometry, bundle.manifest.cache_dtype, options, adapter=adapter)
        rows = {STEP: geometry.tree.size, PLAIN: 1, STEP_SHORT: geometry.short + 1}
        for name in rows.keys() & engine.specs.keys():
            spec = engine.specs[name]
            shown = TensorSpec(LOGITS, (rows[name], geometry.vocab), "float32")
            engine.specs[name] = replace(spec, outputs=(*spec.outputs, shown))
        return engine

    def model(self, function: str, options: ort.SessionOptions) -> str | bytes:
        if function not in (STEP, PLAIN, STEP_SHORT):
            return super().model(function, options)
        options.add_session_config_entry(WEIGHTS_FOLDER, str(self.files[function].parent))
        return show_logits(self.files[function], self.specs[function].outputs[-1])


def show_logits(file: Path, shown: TensorSpec) -> bytes:
    """The graph in ``file`` with the logits that decide TOKENS as the further output ``shown``.

    Raises BundleError if they are not found.
    """
    model = onnx.load(str(file), load_external_data=False)
    graph = model.graph
    show_choices(graph)
    maker = makers(graph)
    # Of the choices behind the tokens, the one on the main logits depends on no other; another one
    # picks the end node.
    choices = [node for node in ancestors(maker, [TOKENS]) if node.op_type in ALL_CHOICES]
    first = []
    for node in choices:
        if not any(n.op_type in ALL_CHOICES for n in ancestors(maker, node.input[:1])):
            first.append(node)
    if len(first) != 1:
        raise BundleError(
            f"{file}: {len(first)} nodes of {' or '.join(ALL_CHOICES)} decide the tokens, "
            "expected one"
        )
    sizes = [int(size) for size in shown.shape]
    graph.initializer.append(helper.make_tensor(f"{LOGITS}_shape", TensorProto.INT64, [2], sizes))
    graph.node.append(helper.make_node("Reshape", [first[0].input[0], f"{LOGITS}_shape"], [LOGITS]))
    graph.output.append(helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, sizes))
    return bytes(model.SerializeToString())
