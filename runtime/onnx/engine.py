"""ONNX bundles on ONNX Runtime: the cache stays in one array of the host and is bound in place.

A call fills a few integers, runs a binding whose memory never moves, and copies the accepted rows. There is one binding
per function and visible size of the cache, made when it is first needed; an app's adapter is bound there, once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort
from numpy.typing import DTypeLike, NDArray

from ssdevice.contract import (
    CHUNK,
    COUNT,
    DRAFTS,
    FUNCTIONS,
    LENGTH,
    NEXT_DRAFTS,
    NEXT_ROOT,
    PAST,
    PLAIN,
    PREFILL,
    ROOT,
    ROWS,
    STEP,
    TOKENS,
    VALID,
    CacheForm,
    FunctionSpec,
    Geometry,
    functions,
)
from ssdevice.errors import BundleError, first_line
from ssdevice.runtime.engine import Conversation, Engine, EngineOptions, Kernel
from ssdevice.runtime.onnx.adapter import AdapterTensors
from ssdevice.runtime.onnx.cache import RowCache
from ssdevice.runtime.onnx.sessions import SharedBase, check_tensors, kernel_times
from ssdevice.tree import Tree

if TYPE_CHECKING:
    from ssdevice.bundle.folder import Bundle

PROVIDER = "CPUExecutionProvider"
SPINNING = "session.intra_op.allow_spinning"
SILENT = 4  # errors are raised; a log would print them a second time
ort.set_default_logger_severity(SILENT)  # allocations log apart from sessions


class OnnxEngine(Engine):
    """Sessions of ONNX Runtime by function, each opened when it is first called.

    ``files``: the graph of every function the app has. ``shared``: opens graphs that other engines of this process use
    too; None: this engine's own. ``adapter``: what the slots of the graphs take. Raises BundleError for a graph that
    is not what the contract says.
    """

    def __init__(
        self,
        files: Mapping[str, Path],
        geometry: Geometry,
        cache_dtype: str,
        options: EngineOptions,
        shared: SharedBase | None = None,
        adapter: AdapterTensors | None = None,
    ) -> None:
        super().__init__(geometry, frozenset(files))
        self.files = dict(files)
        self.shared = shared
        self.adapter = adapter
        self.options = options
        self.cache_dtype = cache_dtype
        self.specs = functions(geometry, CacheForm.ROWS, cache_dtype)
        self._sessions: dict[str, ort.InferenceSession] = {}
        self._profiles = Path(tempfile.mkdtemp(prefix="ssdevice-")) if options.profile else None

    @property
    def opened(self) -> frozenset[str]:
        """Functions whose graphs are in memory."""
        return frozenset(self._sessions)

    def session(self, function: str) -> ort.InferenceSession:
        """The session of a function, opened now if it was not; raises BundleError."""
        if function not in self._sessions:
            if function not in self.files:
                raise BundleError(f"the bundle has no {function}; it has {', '.join(sorted(self.files))}")
            file = self.files[function]
            opened = (
                self._open(function) if self.shared is None else self.shared.open(file, lambda: self._open(function))
            )
            self._check(function, opened)
            self._sessions[function] = opened
        return self._sessions[function]

    def warm(self) -> None:
        for function in self.files:
            self.session(function)

    def _open(self, function: str) -> ort.InferenceSession:
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.options.threads
        options.log_severity_level = SILENT
        options.add_session_config_entry(SPINNING, "1" if self.options.spinning else "0")
        if self._profiles is not None:
            options.enable_profiling = True
            options.profile_file_prefix = str(self._profiles / function)
        file = self.files[function]
        try:
            return ort.InferenceSession(self.model(function, options), options, providers=[PROVIDER])
        except Exception as error:  # the bindings derive their errors from Exception itself
            raise BundleError(f"{file}: ONNX Runtime cannot load it ({first_line(error)})") from error

    def _check(self, function: str, session: ort.InferenceSession) -> None:
        """Raise BundleError unless a graph has the contract's tensors, and the adapter what its slots take."""
        file = self.files[function]
        spec = self.specs[function]
        for given, expected in (
            (session.get_inputs(), spec.inputs),
            (session.get_outputs(), spec.outputs),
        ):
            check_tensors(f"{file}: {function}", given, expected)
        slots = {tensor.name for tensor in session.get_inputs()} - {tensor.name for tensor in spec.inputs}
        if slots and self.adapter is None:
            raise BundleError(f"{file}: {function} asks for {sorted(slots)[0]!r}, and the app has no adapter")
        if self.adapter is not None:
            self.adapter.check(session, frozenset(slots), function)

    def model(self, function: str, options: ort.SessionOptions) -> str | bytes:
        """What ONNX Runtime loads for a function."""
        return str(self.files[function])

    def new_conversation(self) -> OnnxConversation:
        return OnnxConversation(self)

    def conversation_beside(self, other: Conversation) -> OnnxConversation:
        conversation = self.new_conversation()
        if isinstance(other, OnnxConversation):
            conversation.take_cache(other.cache)
        return conversation

    def close(self) -> None:
        self._sessions.clear()
        self.shared = self.adapter = None

    def profile(self) -> dict[str, list[Kernel]]:
        """Kernels of one call by function; ends profiling."""
        return {name: kernel_times(Path(session.end_profiling())) for name, session in self._sessions.items()}


class OnnxConversation(Conversation):
    """A cache of the host and the memory of all calls on it."""

    def __init__(self, engine: OnnxEngine) -> None:
        super().__init__(engine.geometry)
        self.cache = RowCache(engine.geometry, engine.cache_dtype)
        self.calls = {name: Call(engine, engine.specs[name], self.cache) for name in engine.functions}

    def take_cache(self, cache: RowCache) -> None:
        """Use the memory of another cache of the same size; to be called before anything else."""
        if cache.array.shape == self.cache.array.shape and cache.array.dtype == self.cache.array.dtype:
            self.cache = cache
            for call in self.calls.values():
                call.cache = cache

    def prefill(self, chunk: Sequence[int]) -> int:
        call, count = self.calls[PREFILL], len(chunk)
        call.tensors[CHUNK][:count] = chunk
        call.tensors[VALID][0] = count
        self._run(call)
        self.cache.commit(self.length, call.tensors[ROWS], count)
        self.drafts[:] = call.tensors[NEXT_DRAFTS]
        return self._token(call, int(call.tensors[NEXT_ROOT][0]))

    def step(self, root: int) -> list[int]:
        call = self.calls[STEP]
        call.tensors[ROOT][0] = root
        call.tensors[DRAFTS][:] = self.drafts
        self._run(call)
        count = int(call.tensors[COUNT][0])
        if not 1 <= count <= self.geometry.tree.emitted:
            raise BundleError(f"{call.file}: it gives {count} tokens, expected 1 to {self.geometry.tree.emitted}")
        self.cache.commit(self.length, call.tensors[ROWS], count)
        self.drafts[:] = call.tensors[NEXT_DRAFTS]
        return [self._token(call, token) for token in call.tensors[TOKENS][:count].tolist()]

    def step_plain(self, root: int) -> int:
        call = self.calls[PLAIN]
        call.tensors[ROOT][0] = root
        self._run(call)
        self.cache.commit(self.length, call.tensors[ROWS], 1)
        return self._token(call, int(call.tensors[TOKENS][0]))

    def _token(self, call: Call, token: int) -> int:
        """A token that a graph gave: a damaged one may give anything, and texts are made of it."""
        if not 0 <= token < self.geometry.vocab:
            raise BundleError(f"{call.file}: it gives token {token}, the model has {self.geometry.vocab}")
        return token

    def _run(self, call: Call) -> None:
        call.tensors[LENGTH][0] = self.length
        binding, session = call.binding(self.cache.visible(self.length)), call.session
        clock = perf_counter()
        try:
            session.run_with_iobinding(binding)
        except Exception as error:  # the bindings derive their errors from Exception itself
            raise BundleError(f"{call.file}: ONNX Runtime cannot run it ({first_line(error)})") from error
        self.native_seconds += perf_counter() - clock


class Call:
    """One function on one cache: arrays for all its tensors but the past, and bindings to them by visible rows."""

    def __init__(self, engine: OnnxEngine, spec: FunctionSpec, cache: RowCache) -> None:
        self.engine, self.spec, self.cache = engine, spec, cache
        self.tensors: dict[str, NDArray[Any]] = {}
        self.past: list[str] = []
        for tensor in (*spec.inputs, *spec.outputs):
            if PAST in tensor.shape:
                self.past.append(tensor.name)
            else:
                self.tensors[tensor.name] = np.zeros(tensor.shape, tensor.dtype)  # type: ignore[arg-type]
        self._session: ort.InferenceSession | None = None
        self._bindings: dict[int, ort.IOBinding] = {}

    @property
    def file(self) -> Path:
        """The graph, for messages."""
        return self.engine.files[self.spec.name]

    @property
    def session(self) -> ort.InferenceSession:
        if self._session is None:
            self._session = self.engine.session(self.spec.name)
        return self._session

    def binding(self, rows: int) -> ort.IOBinding:
        """The binding that shows the first ``rows`` rows of the cache."""
        if rows not in self._bindings:
            binding = self.session.io_binding()
            present = {tensor.name for tensor in self.session.get_inputs()}
            for tensor in self.spec.inputs:
                if tensor.name in self.tensors and tensor.name in present:
                    binding.bind_input(tensor.name, *_memory(self.tensors[tensor.name]))
            adapter = self.engine.adapter.values if self.engine.adapter is not None else {}
            for name in present & adapter.keys():
                binding.bind_ortvalue_input(name, adapter[name])
            for index, name in enumerate(self.past):
                binding.bind_input(name, *_memory(self.cache.prefix(index, rows)))
            for tensor in self.spec.outputs:
                binding.bind_output(tensor.name, *_memory(self.tensors[tensor.name]))
            self._bindings[rows] = binding
        return self._bindings[rows]


def app_graphs(bundle: Bundle, app: str | None) -> tuple[dict[str, Path], Geometry]:
    """The graphs of an app by function, and its geometry: without streams that of plain decoding."""
    own = bundle.app(app).functions or {function: function for function in bundle.functions}
    files = {function: bundle.file(own[function]) for function in FUNCTIONS if function in own}
    geometry = bundle.geometry
    if STEP not in files and geometry.gamma:
        geometry = replace(geometry, gamma=0, k=1, tree=Tree.root_only())
    return files, geometry


def app_adapter(bundle: Bundle, app: str | None, shared: SharedBase) -> AdapterTensors | None:
    """What the slots of an app's graphs take; None for an app without files of its own. Raises BundleError."""
    found = bundle.app(app)
    if not found.files:
        return None
    if len(found.files) != 1:
        raise BundleError(f"{bundle.folder}: app {found.name!r} lists {len(found.files)} files, expected one adapter")
    entry = bundle.manifest.files[found.files[0]]
    return shared.adapter(bundle.folder / found.files[0], entry.sha256, bundle.manifest.model.sha256)


def open_engine(bundle: Bundle, app: str | None, options: EngineOptions) -> OnnxEngine:
    """The engine of an ONNX bundle; raises BundleError for one of another cache form or a graph that does not load."""
    manifest = bundle.manifest
    if manifest.cache is not CacheForm.ROWS:
        raise BundleError(f"{bundle.folder}: cache form {manifest.cache}, ONNX bundles have {CacheForm.ROWS}")
    files, geometry = app_graphs(bundle, app)
    shared = SharedBase.of(bundle, options)
    adapter = app_adapter(bundle, app, shared)
    # A profile is of one engine's calls, so its graphs are its own.
    return OnnxEngine(files, geometry, manifest.cache_dtype, options, None if options.profile else shared, adapter)


def _memory(array: NDArray[Any]) -> tuple[str, int, DTypeLike, tuple[int, ...], int]:
    """What ONNX Runtime is told of an array it uses in place; the array must outlive the binding."""
    assert array.flags.c_contiguous
    return "cpu", 0, array.dtype, array.shape, array.ctypes.data
