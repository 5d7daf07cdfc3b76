"""ExecuTorch bundles: one program whose functions share a KV cache that the program owns.

The cache is one per loaded program. Conversations take turns in it: whoever is called next puts the rows of the one
before aside and its own back, which copies nothing as long as one conversation goes on. ExecuTorch's Python binding
takes torch tensors, so torch is loaded here, behind the binding; a phone's runtime needs neither.
"""

from __future__ import annotations

import importlib
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ssdevice.contract import (
    CHUNK,
    COUNT,
    DRAFTS,
    KEYS,
    LENGTH,
    NEXT_DRAFTS,
    NEXT_ROOT,
    PLAIN,
    PREFILL,
    ROOT,
    STEP,
    TOKENS,
    VALID,
    VALUES,
    CacheForm,
    FunctionSpec,
    Geometry,
    functions,
)
from ssdevice.errors import BundleError, InputError, MissingExtraError
from ssdevice.runtime.engines import Conversation, Engine, EngineOptions

if TYPE_CHECKING:
    from ssdevice.bundle import Bundle

PROGRAM = "program"
"""Role of the program file."""
CACHE_DTYPE = "float32"
OPERATORS = "executorch.kernels.quantized"
"""Registers the operators of quantized embeddings; a program that has them does not load without."""
Array = NDArray[np.float32]


class _ThreadPool:
    """The number of threads is one per process, and may change only while no function of any program is loaded."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.asked = 0
        self.loaded = 0

    def acquire(self, threads: int) -> None:
        """Before a function is loaded: make the pool this large (0: leave it); raises InputError if it is too late."""
        portable: Any = importlib.import_module("executorch.extension.pybindings.portable_lib")
        with self.lock:
            if threads and self.loaded and threads != portable._threadpool_get_thread_count():
                raise InputError(
                    f"{threads} threads: ExecuTorch has one pool per process, and it runs with "
                    f"{portable._threadpool_get_thread_count()} already; close the other sessions first"
                )
            if threads and not self.loaded:
                portable._unsafe_reset_threadpool(threads)
            self.loaded += 1

    def release(self, count: int) -> None:
        """After functions were unloaded."""
        with self.lock:
            self.loaded -= count


POOL = _ThreadPool()


class ExecutorchEngine(Engine):
    """A loaded program; each function is loaded when it is first called.

    Raises BundleError for a file that is no program, lacks a function, or needs what this runtime does not have.
    """

    def __init__(self, file: Path, geometry: Geometry, names: Sequence[str], options: EngineOptions) -> None:
        super().__init__(geometry, frozenset(names))
        self.file = file
        self.options = options
        every = functions(geometry, CacheForm.STATE, CACHE_DTYPE)
        self.specs = {name: every[name] for name in names}
        self._methods: dict[str, Any] = {}
        self._program: Any = _load_program(file)
        self._torch = importlib.import_module("torch")
        self._owner: weakref.ref[ExecutorchConversation] | None = None
        missing = sorted(set(names) - self._program.method_names)
        if missing:
            raise BundleError(
                f"{file}: the program has no {missing[0]}; it has {', '.join(sorted(self._program.method_names))}"
            )

    def method(self, function: str) -> Any:
        """A function's method, loaded now if it was not; raises BundleError."""
        if function not in self._methods:
            if self._program is None:
                raise InputError(f"{self.file}: the session was closed")
            if function not in self.specs:
                raise BundleError(f"{self.file}: the bundle has no {function}; it has {', '.join(self.specs)}")
            POOL.acquire(self.options.threads)
            try:
                self._methods[function] = self._load(function)
            except BundleError:
                POOL.release(1)
                raise
        return self._methods[function]

    def _load(self, function: str) -> Any:
        """The loaded method; raises BundleError unless it takes what the contract says."""
        spec = self.specs[function]
        try:
            method = self._program.load_method(function)._method
        except RuntimeError as error:
            raise BundleError(_explain(self.file, function, error)) from error
        meta = method.method_meta()
        found = [tuple(meta.input_tensor_meta(i).sizes()) for i in range(meta.num_inputs())]
        expected = [tuple(tensor.shape) for tensor in spec.inputs]
        if found != expected:
            raise BundleError(
                f"{self.file}: {function} takes tensors of shapes {found}, the manifest says {expected}; "
                "export the bundle again"
            )
        return method

    def states(self, function: str) -> list[Any]:
        """The live cache as torch tensors ``[kv_heads, capacity, head_dim]``: keys, then values, layer by layer.

        Programs store keys as ``[kv_heads, head_dim, capacity]``; raises BundleError for a cache of another form.
        """
        method, layers, g = self.method(function), range(self.geometry.layers), self.geometry
        keys = [method.get_attribute(f"{KEYS}.{i}") for i in layers]
        values = [method.get_attribute(f"{VALUES}.{i}") for i in layers]
        if tuple(keys[0].shape) != (g.kv_heads, g.head_dim, g.capacity):
            raise BundleError(f"{self.file}: a cache of shape {tuple(keys[0].shape)}; export the bundle again")
        return [*(key.transpose(1, 2) for key in keys), *values]

    def tensor(self, array: NDArray[Any]) -> Any:
        """A torch tensor in an array's memory."""
        return self._torch.from_numpy(array)

    def seat(self, conversation: ExecutorchConversation, function: str) -> None:
        """Make the program's cache this conversation's."""
        owner = self._owner() if self._owner is not None else None
        if owner is conversation:
            return
        states = self.states(function)
        if owner is not None:
            owner.saved = [state[:, : owner.written].numpy().copy() for state in states]
        if conversation.saved is not None:
            for state, rows in zip(states, conversation.saved, strict=True):
                state[:, : rows.shape[1]].copy_(self.tensor(rows))
        conversation.saved = None
        self._owner = weakref.ref(conversation)

    def new_conversation(self) -> ExecutorchConversation:
        return ExecutorchConversation(self)

    def close(self) -> None:
        POOL.release(len(self._methods))
        self._methods.clear()
        self._program = None


class ExecutorchConversation(Conversation):
    """``saved``: its rows while another conversation has the cache; ``written``: how many rows it ever wrote to."""

    def __init__(self, engine: ExecutorchEngine) -> None:
        super().__init__(engine.geometry)
        self.engine = engine
        self.saved: list[Array] | None = None
        self.written = 0
        self._calls = {name: _Call(engine, spec) for name, spec in engine.specs.items()}

    def prefill(self, chunk: Sequence[int]) -> int:
        call, count = self._call(PREFILL), len(chunk)
        call.inputs[CHUNK][:count] = chunk
        call.inputs[VALID][0] = count
        out = self._run(call, self.geometry.chunk)
        self._keep_drafts(out)
        return int(out[NEXT_ROOT][0])

    def step(self, root: int) -> list[int]:
        call = self._call(STEP)
        call.inputs[ROOT][0] = root
        call.inputs[DRAFTS][:] = self.drafts
        out = self._run(call, self.geometry.tree.emitted)
        count = int(out[COUNT][0])
        self._keep_drafts(out)
        tokens: list[int] = out[TOKENS][:count].tolist()
        return tokens

    def step_plain(self, root: int) -> int:
        call = self._call(PLAIN)
        call.inputs[ROOT][0] = root
        return int(self._run(call, 1)[TOKENS][0])

    def rows(self, start: int, end: int) -> Array:
        """Cache rows ``[2 * layers, end - start, kv_heads * head_dim]``: keys and values of layer 0, of layer 1, .."""
        self.engine.seat(self, PREFILL)
        states = self.engine.states(PREFILL)
        layers = self.geometry.layers
        pairs = [part for pair in zip(states[:layers], states[layers:], strict=True) for part in pair]
        return np.stack([part[:, start:end].numpy().transpose(1, 0, 2).reshape(end - start, -1) for part in pairs])

    def _call(self, function: str) -> _Call:
        if function not in self._calls:
            raise BundleError(f"{self.engine.file}: the bundle has no {function}")
        return self._calls[function]

    def _run(self, call: _Call, rows: int) -> Mapping[str, NDArray[Any]]:
        self.engine.seat(self, call.spec.name)
        self.written = max(self.written, min(self.length + rows, self.geometry.capacity))
        call.inputs[LENGTH][0] = self.length
        clock = perf_counter()
        out = call.execute()
        self.native_seconds += perf_counter() - clock
        return out

    def _keep_drafts(self, out: Mapping[str, NDArray[Any]]) -> None:
        if NEXT_DRAFTS in out:
            self.drafts[:] = out[NEXT_DRAFTS]


class _Call:
    """One function: arrays for its inputs, and tensors over the same memory."""

    def __init__(self, engine: ExecutorchEngine, spec: FunctionSpec) -> None:
        self.engine, self.spec = engine, spec
        # Sizes are static here: only caches that are inputs have names for them.
        self.inputs = {t.name: np.zeros([int(size) for size in t.shape], np.int32) for t in spec.inputs}
        self.names = [tensor.name for tensor in spec.outputs if 0 not in tensor.shape]
        self._tensors = [engine.tensor(array) for array in self.inputs.values()]

    def execute(self) -> Mapping[str, NDArray[Any]]:
        """The outputs by name, valid until the function runs again."""
        method = self.engine.method(self.spec.name)
        try:
            out = method.call(self._tensors, clone_outputs=False)
        except RuntimeError as error:
            raise BundleError(_explain(self.engine.file, self.spec.name, error)) from error
        return {name: tensor.numpy() for name, tensor in zip(self.names, out, strict=True)}


def open_engine(bundle: Bundle, app: str | None, options: EngineOptions) -> ExecutorchEngine:
    """The engine of an ExecuTorch bundle; raises BundleError for another cache form or a program that does not load."""
    manifest = bundle.manifest
    if manifest.cache is not CacheForm.STATE or manifest.cache_dtype != CACHE_DTYPE:
        raise BundleError(
            f"{bundle.folder}: a {manifest.cache_dtype} cache in form {manifest.cache}, "
            f"ExecuTorch bundles have {CACHE_DTYPE} in form {CacheForm.STATE}"
        )
    return ExecutorchEngine(bundle.file(PROGRAM), bundle.geometry, list(bundle.functions), options)


def constants(file: Path) -> dict[str, Any]:
    """The constant methods of a program by name: integers, and arrays of integers."""
    program = _load_program(file)
    found: dict[str, Any] = {}
    for name in sorted(program.method_names):
        meta = program.metadata(name)
        if not meta.num_inputs() and not meta.num_attributes():
            (value,) = program.load_method(name).execute([])
            found[name] = value if isinstance(value, (int, float, bool, str)) else value.numpy()
    return found


def _load_program(file: Path) -> Any:
    try:
        runtime: Any = importlib.import_module("executorch.runtime")
        importlib.import_module(OPERATORS)
    except ModuleNotFoundError as error:
        raise MissingExtraError("executorch", error.name or "executorch") from error
    if not file.is_file():
        raise BundleError(f"{file}: no such program")
    try:
        return runtime.Runtime.get().load_program(file)
    except (RuntimeError, OSError) as error:
        raise BundleError(f"{file}: not a whole ExecuTorch program ({_first_line(error)})") from error


def _explain(file: Path, function: str, error: Exception) -> str:
    reason = _first_line(error)
    if "0x14" in reason:
        reason += ": an operator of the program is not in this runtime; its libraries must be loaded before"
    if "0x20" in reason or "0x30" in reason:
        reason += ": the program's delegate is not in this runtime, or the file is damaged"
    return f"{file}: ExecuTorch cannot run {function} ({reason})"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
