"""ONNX bundles on ONNX Runtime: the cache is one array of the host, bound in place.

A call runs a binding and copies the accepted rows. Each function has a binding per visible size of
the cache, made on first use with an app's adapter; its memory never moves.
"""

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
import onnxruntime as ort
from numpy.typing import DTypeLike, NDArray

from ssdevice.bundle.manifest import Precision
from ssdevice.contract import CHOOSING, GREEDY, PAST, ROWS, STEP, CacheForm, Geometry, functions
from ssdevice.errors import BundleError, first_line
from ssdevice.runtime.engine import (
    Cache,
    Engine,
    EngineOptions,
    Inputs,
    Kernel,
    Outputs,
    check_cache,
)
from ssdevice.runtime.onnx import kernels
from ssdevice.runtime.onnx.adapter import AdapterTensors
from ssdevice.runtime.onnx.cache import LANES, RowCache
from ssdevice.runtime.onnx.sessions import SharedBase, check_tensors, give_back, kernel_times

if TYPE_CHECKING:
    from ssdevice.bundle.folder import Bundle

PROVIDER = "CPUExecutionProvider"
SPINNING = "session.intra_op.allow_spinning"
STOP_SPINNING = "session.force_spinning_stop"
"""At the end of every call."""
SILENT = 4  # errors are raised, and a log would print them again
ort.set_default_logger_severity(SILENT)  # allocations do not use a session's logger
OLDER = (
    "; export it again if an older ssdevice exported it, or decode without kernels (--no-kernels)"
)
BINDINGS = 256
"""Visible sizes for which a function keeps a binding: enough for answers over some 500 rows."""


class OnnxEngine(Engine):
    """Sessions of ONNX Runtime by function, each opened on its first call.

    ``files``: the graph of every function that the app has.
    ``shared``: opens graphs that engines of this process share; None: this engine opens its own.
    ``adapter``: the tensors for the graphs' slots.
    ``quantized``: all large products are those of kernels, if there are any. They then share
    threads among sessions (``kernels.crew``).

    Raises BundleError for a graph that breaks the contract.
    """

    def __init__(
        self,
        files: Mapping[str, Path],
        geometry: Geometry,
        cache_dtype: str,
        options: EngineOptions,
        shared: SharedBase | None = None,
        adapter: AdapterTensors | None = None,
        quantized: bool = False,
    ) -> None:
        super().__init__(geometry, frozenset(files), next(iter(files.values()), Path()).parent)
        self.files = {function: file.absolute() for function, file in files.items()}
        self._checked = {file: _identity(file) for file in self.files.values()}
        self.shared = shared
        self.adapter = adapter
        self.options = options
        self.cache_dtype = cache_dtype
        self.specs = functions(geometry, CacheForm.EXTERNAL, cache_dtype)
        self._library = kernels.library() if options.kernels else None
        self._crew = 0  # threads that sessions share
        if self._library is not None:
            self.kernels = kernels.loaded(self._library)
        if quantized and self.kernels and options.spinning:
            self._crew = options.threads or kernels.cores()
        self._sessions: dict[str, ort.InferenceSession] = {}
        self._caches: WeakSet[OnnxCache] = WeakSet()
        self._profiles: tempfile.TemporaryDirectory[str] | None = None
        if options.profile:
            self._profiles = tempfile.TemporaryDirectory(prefix="ssdevice-")

    def session(self, function: str) -> ort.InferenceSession:
        """The session of a function, opened on first use. Raises BundleError."""
        if function not in self._sessions:
            opening = partial(self._open, function)
            if self.shared is None:
                opened = opening()
            else:
                opened = self.shared.open(self.files[function], opening)
            self._check(function, opened)
            self._sessions[function] = opened
        return self._sessions[function]

    def warm(self) -> None:
        for function in self.files:
            self.session(function)

    def _open(self, function: str) -> ort.InferenceSession:
        options = ort.SessionOptions()
        options.log_severity_level = SILENT
        options.intra_op_num_threads = 1 if self._crew else self.options.threads
        options.add_session_config_entry(SPINNING, "1" if self.options.spinning else "0")
        options.add_session_config_entry(STOP_SPINNING, "1")
        if self._profiles is not None:
            options.enable_profiling = True
            options.profile_file_prefix = str(Path(self._profiles.name) / function)
        file = self.files[function]
        if _identity(file) != self._checked[file]:
            raise BundleError(
                f"{file.parent} was replaced while it was in use; open the session again"
            )
        with ExitStack() as stack:
            if self._library is not None:
                crew = kernels.crew(self._library, self._crew, self.options.profile)
                stack.enter_context(crew)
            try:
                if self._library is not None:
                    options.register_custom_ops_library(str(self._library))
                model = self.model(function, options)
                session = ort.InferenceSession(model, options, providers=[PROVIDER])
            except Exception as error:  # the bindings derive their errors from Exception itself
                older = OLDER if self._library is not None else ""
                raise BundleError(
                    f"{file}: ONNX Runtime cannot load it ({first_line(error)}){older}"
                ) from error
        give_back(file.parent)
        return session

    def _check(self, function: str, session: ort.InferenceSession) -> None:
        """Raise BundleError unless a graph has the contract's tensors, and the adapter fits it."""
        file = self.files[function]
        spec = self.specs[function]
        check_tensors(f"{file}: {function}", session.get_inputs(), spec.inputs)
        check_tensors(f"{file}: {function}", session.get_outputs(), spec.outputs)
        integers = {tensor.name for tensor in spec.inputs}
        slots = {tensor.name for tensor in session.get_inputs()} - integers
        if slots and self.adapter is None:
            raise BundleError(
                f"{file}: {function} needs {sorted(slots)[0]!r}, but the app has no adapter"
            )
        if self.adapter is not None:
            self.adapter.check(session, frozenset(slots), function)

    def model(self, function: str, options: ort.SessionOptions) -> str | bytes:
        """The model that ONNX Runtime loads for a function: a path, or its bytes."""
        return str(self.files[function])

    def new_cache(self, inputs: Inputs, beside: Cache | None = None) -> "OnnxCache":
        shape = RowCache.shape(self.geometry)
        dtype = np.dtype(self.cache_dtype)
        rows = beside.memory if isinstance(beside, OnnxCache) else None
        if rows is None or (rows.array.shape, rows.array.dtype) != (shape, dtype):
            rows = RowCache(self.geometry, dtype)
        cache = OnnxCache(self, inputs, rows)
        self._caches.add(cache)
        return cache

    def release(self) -> None:
        if self._profiles is not None:
            for session in self._sessions.values():
                session.end_profiling()
            self._profiles.cleanup()
        for cache in self._caches:
            cache.calls.clear()
        self._sessions.clear()
        self.shared = self.adapter = None

    def profile(self) -> dict[str, list[Kernel]]:
        """The kernels of one call by function. This ends profiling."""
        return {
            name: kernel_times(Path(session.end_profiling()))
            for name, session in self._sessions.items()
        }


class OnnxCache(Cache):
    """A cache of the host and the functions called on it. ``calls``: those called so far."""

    def __init__(self, engine: OnnxEngine, inputs: Inputs, memory: RowCache) -> None:
        super().__init__(inputs)
        self.engine = engine
        self.memory = memory
        self.calls: dict[str, _Call] = {}

    def call(self, function: str, length: int) -> Outputs:
        call = self.calls.get(function)
        if call is None:
            call = self.calls[function] = _Call(self.engine, function, self.inputs, self.memory)
        binding = call.binding(self.memory.visible(length, call.lanes))
        clock = perf_counter()
        try:
            call.session.run_with_iobinding(binding)
        except Exception as error:  # the bindings derive their errors from Exception itself
            file = self.engine.files[function]
            raise BundleError(
                f"{file}: ONNX Runtime cannot run it ({first_line(error)})"
            ) from error
        self.native_seconds += perf_counter() - clock
        return call.outputs

    def commit(self, outputs: Outputs, length: int, count: int) -> None:
        self.memory.commit(length, outputs[ROWS], count)

    def rows(self, start: int, end: int) -> NDArray[Any]:
        return self.memory.array[:, start:end].copy()


class _Call:
    """A function on a cache: memory for its outputs, and its bindings by visible rows."""

    def __init__(self, engine: OnnxEngine, function: str, inputs: Inputs, memory: RowCache) -> None:
        spec = engine.specs[function]
        self.session = engine.session(function)
        attention = self.session.get_modelmeta().custom_metadata_map.get(kernels.ATTENTION)
        self.lanes = 1 if engine.kernels and attention == kernels.TREE_ATTENTION else LANES
        self.outputs: dict[str, NDArray[Any]] = {}
        for tensor in spec.outputs:
            shape = [int(size) for size in tensor.shape]
            self.outputs[tensor.name] = np.zeros(shape, tensor.dtype)
        self._memory = memory
        self._past = [tensor.name for tensor in spec.inputs if PAST in tensor.shape]
        # A graph may not need all integers, and a short step takes the first drafts only.
        present = {tensor.name for tensor in self.session.get_inputs()}
        self._integers: dict[str, NDArray[np.int32]] = {}
        for tensor in spec.inputs:
            if tensor.name in present and tensor.name in inputs:
                self._integers[tensor.name] = inputs[tensor.name][: int(tensor.shape[0])]
        adapter = engine.adapter.values if engine.adapter is not None else {}
        self._adapter = {name: adapter[name] for name in present & adapter.keys()}
        self._bindings: dict[int, ort.IOBinding] = {}  # the last used ones, the newest last

    def binding(self, rows: int) -> ort.IOBinding:
        """The binding that shows the graph the first ``rows`` rows of the cache."""
        binding = self._bindings[rows] = self._bindings.pop(rows, None) or self._bind(rows)
        if len(self._bindings) > BINDINGS:
            del self._bindings[next(iter(self._bindings))]
        return binding

    def _bind(self, rows: int) -> ort.IOBinding:
        binding = self.session.io_binding()
        for name, integers in self._integers.items():
            binding.bind_input(name, *_memory(integers))
        for name, value in self._adapter.items():
            binding.bind_ortvalue_input(name, value)
        for index, name in enumerate(self._past):
            binding.bind_input(name, *_memory(self._memory.prefix(index, rows)))
        for name, array in self.outputs.items():
            binding.bind_output(name, *_memory(array))
        return binding


def app_graphs(bundle: "Bundle", app: str | None) -> tuple[dict[str, Path], Geometry]:
    """The graphs of an app by function, and its geometry.

    Without streams that is the geometry of plain decoding.
    """
    own = bundle.function_names(app)
    known = [function for function in GREEDY + CHOOSING if function in own]
    files = {function: bundle.file(own[function]) for function in known}
    geometry = bundle.geometry
    if STEP not in files and geometry.gamma:
        geometry = geometry.plain
    return files, geometry


def app_adapter(bundle: "Bundle", app: str | None, shared: SharedBase) -> AdapterTensors | None:
    """The tensors for the slots of an app's graphs; None for an app without files.

    Raises BundleError.
    """
    found = bundle.app(app)
    if not found.files:
        return None
    if len(found.files) != 1:
        raise BundleError(
            f"{bundle.folder}: app {found.name!r} lists {len(found.files)} files, "
            "expected one adapter"
        )
    entry = bundle.manifest.files[found.files[0]]
    return shared.adapter(
        bundle.folder / found.files[0], entry.sha256, bundle.manifest.model.sha256
    )


def open_engine(bundle: "Bundle", app: str | None, options: EngineOptions) -> OnnxEngine:
    """The engine of an ONNX bundle.

    Raises BundleError for another cache form or a graph that does not load.
    """
    check_cache(bundle, CacheForm.EXTERNAL)
    files, geometry = app_graphs(bundle, app)
    shared = SharedBase.of(bundle, options)
    adapter = app_adapter(bundle, app, shared)
    quantized = bundle.manifest.precision in (Precision.INT4, Precision.INT8)
    # A profile must contain only this engine's calls, so then it does not share graphs.
    graphs = None if options.profile else shared
    return OnnxEngine(
        files, geometry, bundle.manifest.cache_dtype, options, graphs, adapter, quantized
    )


def _identity(file: Path) -> tuple[int, int] | None:
    """Tells a file from one that has replaced it since."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _memory(array: NDArray[Any]) -> tuple[str, int, DTypeLike, tuple[int, ...], int]:
    """Arguments that bind an array in place; the array must outlive the binding."""
    assert array.flags.c_contiguous
    return "cpu", 0, array.dtype, array.shape, array.ctypes.data
