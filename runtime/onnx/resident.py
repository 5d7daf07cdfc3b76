"""Resident memory of an ONNX bundle, predicted from its graphs: which weights each packs, and which stay mapped.

Sizes come from the bundle. The constants are ONNX Runtime's and Python's, measured on x86-64 Linux with two threads;
``docs/performance.md`` compares predictions with measured processes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ssdevice import wire
from ssdevice.contract import PREFILL, STEP, Geometry
from ssdevice.errors import BundleError
from ssdevice.runtime.onnx import kernels
from ssdevice.runtime.onnx.cache import BUCKET
from ssdevice.runtime.resident import Resident
from ssdevice.text.tokenizer import TOKENIZER_ROLE

if TYPE_CHECKING:
    from ssdevice.bundle.folder import Bundle

RUNTIME = 72_000_000
TOKENIZER = 2_500_000, 8
"""Bytes, and bytes for each of ``tokenizer.json``."""
GRAPH, GRAPH_WITHOUT_KERNELS = 17, 30
"""Bytes for each byte of a graph. Without kernels it has more nodes: those of the functions in their place."""
WORK, LOGITS, WORK_WITHOUT_KERNELS = 1_400_000, 3, 1.8
"""Bytes, bytes for each byte of logits, and the factor without kernels."""
PAGES = 1 << 16
"""Bytes that Linux maps around one that is read."""
OPENING = 1.5
"""How often ONNX Runtime holds its largest weight once more while it packs."""

LINEARS = (kernels.HALF_LINEAR, kernels.INT4_LINEAR, kernels.INT8_LINEAR, kernels.INT8_ARGMAX)
INT4_SCALES = (kernels.INT4_LINEAR, 2)
"""The operator and its input that are scales of blocks."""
EMBEDDINGS = (kernels.INT8_EMBEDDING, kernels.TIED_EMBEDDING)
OURS = (*LINEARS, *EMBEDDINGS)
PRODUCTS = ("MatMul", "Gemm", "FusedMatMul", "MatMulNBits", "MatMulInteger")
GATHERS = ("Gather", *EMBEDDINGS)


@dataclass(frozen=True)
class Weight:
    """A constant of a graph. ``place``: the same for all graphs that share it; ``readers``: operators and inputs."""

    place: tuple[str, str]
    size: int
    readers: frozenset[tuple[str, int]]

    def read_by(self, operators: Collection[str]) -> bool:
        """Whether one of the operators reads it."""
        return any(operator in operators for operator, _ in self.readers)

    def packed(self) -> int:
        """Bytes that ONNX Runtime holds of it, which packs for each graph; 0 if it stays where it is."""
        if not self.read_by((*LINEARS, *PRODUCTS)):
            return 0
        # MatMulNBits also keeps the amount that each block's zero adds, a float like the block's scale.
        return self.size * (2 if INT4_SCALES in self.readers else 1)

    def held(self) -> int:
        """Bytes that our kernels hold of it, which keep INT4's scales as the bfloat16 numbers that they are."""
        return self.size // 2 if INT4_SCALES in self.readers else self.size

    def mapped(self, tokens: int) -> int:
        """Bytes of it that calls read from the file."""
        if not self.read_by(GATHERS):
            return 0
        # An embedding that is also the head has its columns gathered, which reaches every page.
        return self.size if self.read_by((*LINEARS, *PRODUCTS)) else min(self.size, tokens * PAGES)


def predict(
    bundle: Bundle, files: dict[str, Path], geometry: Geometry, adapter: int, tokens: int, ours: bool
) -> Resident:
    """The memory of a process that calls the functions in ``files`` (their graphs) with ``tokens`` in the cache.

    ``adapter``: bytes of the app's own files; ``ours``: with kernels. Raises BundleError for a file that is no graph.
    """
    graphs = [read_weights(file) for file in files.values()]
    shared = {weight.place: weight.held() for graph in graphs for weight in graph if weight.read_by(OURS)}
    packed, mapped, largest, last = adapter + (sum(shared.values()) if ours else 0), 0, 0, 0
    for graph in graphs:
        own = [weight for weight in graph if not (ours and weight.read_by(OURS))]
        packed += sum(weight.packed() for weight in own)
        mapped += sum(weight.mapped(tokens) for weight in own)
        largest = max(largest, *(weight.size for weight in graph), 0)
        last = max(last, sum(weight.size for weight in graph if ours and weight.read_by(OURS)))
    start, each = TOKENIZER
    tokenizer = start + each * bundle.file(TOKENIZER_ROLE).stat().st_size
    nodes = (GRAPH if ours else GRAPH_WITHOUT_KERNELS) * sum(file.stat().st_size for file in files.values())
    # Kernels of our own are packed while the whole file is mapped, and once more to find them equal.
    opening = last + largest if last else int(OPENING * largest)
    rows = min(tokens if ours else tokens + BUCKET, geometry.capacity)
    return Resident(
        kernels=ours,
        runtime=RUNTIME,
        tokenizer=tokenizer,
        graphs=nodes,
        weights=packed,
        mapped=mapped,
        cache=rows * geometry.token_bytes(bundle.manifest.cache_dtype),
        work=int((WORK + LOGITS * _logits(files, geometry)) * (1 if ours else WORK_WITHOUT_KERNELS)),
        opening=RUNTIME + tokenizer + nodes + packed + opening,
    )


def _logits(files: Collection[str], geometry: Geometry) -> int:
    """Bytes of the logits that one call of each function computes."""
    rows = {STEP: geometry.tree.emitted + geometry.gamma, PREFILL: 1 + geometry.gamma}
    return 4 * geometry.vocab * sum(rows.get(function, 1) for function in files)


# Fields of ONNX's messages.
GRAPH_OF_MODEL, FUNCTIONS_OF_MODEL, NODES, INITIALIZERS, FUNCTION_NODES = 7, 25, 1, 5, 7
NODE_INPUTS, NODE_OPERATOR = 1, 4
TENSOR_NAME, TENSOR_EXTERNAL, ENTRY_KEY, ENTRY_VALUE = 8, 13, 1, 2


def read_weights(file: Path) -> list[Weight]:
    """The constants of a graph that lie in another file. Raises BundleError."""
    try:
        model = wire.message(memoryview(file.read_bytes()))
        graph = wire.submessage(model, GRAPH_OF_MODEL) or {}
        nodes = list(wire.messages(graph, NODES))
        for function in wire.messages(model, FUNCTIONS_OF_MODEL):  # values in regions are named as outside
            nodes += wire.messages(function, FUNCTION_NODES)
        readers: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
        for node in nodes:
            for index, name in enumerate(wire.texts(node, NODE_INPUTS)):
                readers[name].add((wire.text(node, NODE_OPERATOR), index))
        found = []
        for tensor in wire.messages(graph, INITIALIZERS):
            entries = wire.messages(tensor, TENSOR_EXTERNAL)
            where = {wire.text(entry, ENTRY_KEY): wire.text(entry, ENTRY_VALUE) for entry in entries}
            if where:
                place = where.get("location", ""), where.get("offset", "0")
                used = frozenset(readers[wire.text(tensor, TENSOR_NAME)])
                found.append(Weight(place, int(where.get("length", "0")), used))
        return found
    except (wire.WireError, ValueError) as error:
        raise BundleError(f"{file}: not an ONNX graph ({error})") from error


def resident(bundle: Bundle, app: str | None, functions: Collection[str], tokens: int, ours: bool) -> Resident:
    """``predict`` for an app of a bundle (None: its default app) and those of its functions that are called."""
    from ssdevice.runtime.onnx.engine import app_graphs

    files, geometry = app_graphs(bundle, app)
    own = bundle.app(app).files
    adapter = sum(bundle.manifest.files[path].size for path in own)
    called = {function: file for function, file in files.items() if function in functions}
    return predict(bundle, called, geometry, adapter, tokens, ours)
