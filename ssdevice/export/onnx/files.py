"""Files of an ONNX bundle: graphs without weights, and one file of weights that all of them point
into.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes import common as passes

from ssdevice.adapters.slots import Variant
from ssdevice.contract import ONE_ROW, FunctionSpec
from ssdevice.errors import SSDeviceError
from ssdevice.export.onnx.editor import CONTRIB
from ssdevice.export.onnx.functions import add_functions
from ssdevice.export.onnx.linears import LINEAR_DOMAIN
from ssdevice.runtime.onnx.kernels import ATTENTION, CAPPED_ATTENTION, TREE_ATTENTION

INLINE = 1024
"""Constants of fewer bytes stay in the graph."""
ALIGNMENT = 64
PAGE = 4096
IR_VERSION = 11
PRODUCER = "ssdevice"


class WeightFile:
    """Tensors one after another, each content once; large ones begin on a page so that they can be
    mapped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb")
        self._places: dict[tuple[bytes, int], int] = {}

    def close(self) -> None:
        self._file.close()

    def add(self, content: bytes) -> int:
        """Where these bytes begin; written now unless they are there already."""
        if (key := (hashlib.sha256(content).digest(), len(content))) not in self._places:
            step = PAGE if len(content) >= PAGE else ALIGNMENT
            end = self._file.tell()
            at = -(-end // step) * step
            self._file.write(b"\0" * (at - end))
            self._file.write(content)
            self._places[key] = at
        return self._places[key]


def graph_file(function: str, variant: Variant) -> str:
    return f"{function}.{variant.name}.onnx"


def app_functions(variant: Variant, names: Sequence[str]) -> dict[str, str]:
    """The graphs of an app with this variant, by function; ``names``: the functions that the bundle
    has.
    """
    plain = Variant(lora=variant.lora)
    return {
        name: graph_file(name, plain if name in ONE_ROW else variant) for name in variant.own(names)
    }


def save_graph(model: ir.Model, spec: FunctionSpec, path: Path, weights: WeightFile) -> None:
    """Write a graph that reads large constants from ``weights``; the contract says its first inputs
    and all outputs.
    """
    graph = model.graph
    own = [*graph.inputs[: len(spec.inputs)], *graph.outputs]
    for tensor, value in zip((*spec.inputs, *spec.outputs), own, strict=True):
        found = value.dtype.numpy().name if value.dtype is not None else "unknown"
        if value.name != tensor.name or found != tensor.dtype:
            raise SSDeviceError(
                f"{spec.name}: the graph has {value.name} {found}, not {tensor.name} {tensor.dtype}"
            )
        value.shape = ir.Shape(list(tensor.shape))
    for value in graph.initializers.values():
        constant = value.const_value
        assert constant is not None
        if constant.nbytes >= INLINE:
            content = constant.tobytes()
            shape = ir.Shape(constant.numpy().shape)
            name = value.name or ""
            place = (weights.path.name, weights.add(content), len(content))
            folder = weights.path.parent
            value.const_value = ir.ExternalTensor(
                *place, constant.dtype, shape=shape, name=name, base_dir=folder
            )
    passes.ClearMetadataAndDocStringPass()(model)  # traces name files of the machine that made them
    model.opset_imports.pop(LINEAR_DOMAIN, None)
    model.opset_imports[CONTRIB] = 1
    add_functions(model, spec.name in ONE_ROW)
    model.ir_version = IR_VERSION
    model.producer_name = PRODUCER
    model.producer_version = None
    graph.name = PRODUCER
    if not any(node.op_type == CAPPED_ATTENTION for node in graph):
        model.metadata_props[ATTENTION] = TREE_ATTENTION
    for node in graph:
        for output in node.outputs:
            if output.type is None:
                output.shape = None  # a shape without an element type has no place in the file
    ir.save(model, path)
