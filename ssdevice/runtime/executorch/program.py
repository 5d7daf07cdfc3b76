"""A loaded ExecuTorch program: its functions, and the conversation that has its cache and slots.

A program has one cache and one set of slots, so conversations take turns. The one that is called
next saves the rows of the previous one, restores its own, and puts its app's adapter into the
slots; while one conversation continues, nothing is copied. ExecuTorch's Python binding takes torch
tensors, so torch is loaded here; a phone's runtime needs neither.
"""

import importlib
import threading
import weakref
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ssdevice.adapters.storage import read_tensors, restored
from ssdevice.bundle.manifest import SCHEMA_VERSION
from ssdevice.contract import KEYS, PLAIN, STEP, VALUES, FunctionSpec, Geometry, TensorSpec
from ssdevice.errors import BundleError, InputError, first_line, needs_extra
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.executorch.checks import check_program
from ssdevice.runtime.executorch.file import COREML, has_coreml, operators_of
from ssdevice.runtime.notice import native_silence

if TYPE_CHECKING:
    from ssdevice.bundle.folder import Bundle
    from ssdevice.runtime.executorch.engine import ExecutorchCache

OPERATORS = "executorch.kernels.quantized"
"""Importing it registers the operators of quantized embeddings. Programs that use them do not load
without.
"""
SET_ADAPTER = "set_adapter"
"""The method that fills a program's slots: one input per slot, in the order of their names."""
SCHEMA = "schema_version"
"""The constant method that returns the version of the program's schema."""
Array = NDArray[np.float32]
Specs = Mapping[str, FunctionSpec]


class _ThreadPool:
    """ExecuTorch's thread pool: one per process.

    It can be resized only while no function of any program is loaded.
    """

    def __init__(self) -> None:
        # Reentrant: a garbage-collected program may release it at any allocation.
        self.lock = threading.RLock()
        self.loaded = 0

    def acquire(self, threads: int) -> None:
        """Call before loading a function.

        Resizes the pool (0: leave it); raises InputError if that is impossible.
        """
        portable: Any = importlib.import_module("executorch.extension.pybindings.portable_lib")
        with self.lock:
            if threads and self.loaded and threads != portable._threadpool_get_thread_count():
                raise InputError(
                    f"{threads} threads: ExecuTorch has one pool per process, which already runs "
                    f"with {portable._threadpool_get_thread_count()}; "
                    "close the other sessions first"
                )
            if threads and not self.loaded:
                with native_silence():  # it asks for files of phones
                    portable._unsafe_reset_threadpool(threads)
            self.loaded += 1

    def release(self, count: int) -> None:
        """Call after unloading ``count`` functions."""
        with self.lock:
            self.loaded -= count


POOL = _ThreadPool()


class AdapterSlots:
    """An app's tensors by slot, from its safetensors file in the bundle. Raises InputError."""

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            self.tensors: dict[str, Array] = restored(read_tensors(file))
        except ValueError as error:
            raise InputError(f"{file}: {error}") from error
        for name, value in self.tensors.items():
            if value.dtype != np.float32:
                raise InputError(
                    f"{file}: {name!r} is {value.dtype} without a scale; slots take floats"
                )


class LoadedProgram:
    """A program that loads a function on its first call.

    ``lock``: held from a call until its outputs are read. ``users``: number of open engines. Raises
    BundleError for a file that is not a program, lacks a function, or needs something that this
    runtime does not have.
    """

    _shared: ClassVar["weakref.WeakValueDictionary[Hashable, LoadedProgram]"] = (
        weakref.WeakValueDictionary()
    )
    _table: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self, file: Path, geometry: Geometry, specs: Specs, options: EngineOptions
    ) -> None:
        self.file = file
        self.geometry = geometry
        self.specs = dict(specs)
        self.options = options
        self.lock = threading.RLock()
        self.users = 0
        self._methods: dict[str, Any] = {}
        # Also for programs that are never closed.
        self._unload = weakref.finalize(self, _unload, self._methods)
        self._program: Any = load_program(file)
        self._torch = importlib.import_module("torch")
        self._owner: weakref.ref[ExecutorchCache] | None = None
        self._installed: AdapterSlots | None = None  # slots start as zeros, which is the bare base
        self._slots: dict[str, Any] = {}
        known = self._program.method_names
        missing = sorted(set(specs) - known)
        if missing:
            raise BundleError(
                f"{file}: the program has no {missing[0]}; it has {', '.join(sorted(known))}"
            )

    @classmethod
    def of(
        cls, bundle: "Bundle", file: Path, specs: Specs, options: EngineOptions
    ) -> "LoadedProgram":
        """The LoadedProgram that all engines of this program share, loaded by the first of them."""
        entry = bundle.manifest.files[file.relative_to(bundle.folder).as_posix()]
        key = (file.resolve(), entry.sha256, options)
        with cls._table:
            found = cls._shared.get(key)
            if found is None or found.closed:
                found = cls._shared[key] = cls(file, bundle.geometry, specs, options)
            return found

    @property
    def closed(self) -> bool:
        return self._program is None

    def method(self, function: str) -> Any:
        """A function's method, loaded on first use.

        Raises BundleError, InputError once it is closed.
        """
        if function not in self._methods:
            if self._program is None:
                raise InputError(f"{self.file}: the session was closed")
            if function not in self._program.method_names:
                raise BundleError(
                    f"{self.file}: the program has no {function}; export the bundle again"
                )
            POOL.acquire(self.options.threads)
            try:
                self._methods[function] = self._load(function)
            except BaseException:
                POOL.release(1)
                raise
        return self._methods[function]

    def _load(self, function: str) -> Any:
        """The loaded method. Raises BundleError unless its tensors have the contract's shapes."""
        if not self._methods:
            self._check_schema()
        try:
            with native_silence():
                method = self._program.load_method(function)._method
        except RuntimeError as error:
            raise BundleError(explain(self.file, function, error)) from error
        if function in self.specs:
            meta = method.method_meta()
            spec = self.specs[function]
            given = [meta.input_tensor_meta(i) for i in range(meta.num_inputs())]
            self._check_shapes(f"{function} takes", given, spec.inputs)
            made = [meta.output_tensor_meta(i) for i in range(meta.num_outputs())]
            outputs = [tensor for tensor in spec.outputs if 0 not in tensor.shape]
            logits = function in (STEP, PLAIN) and len(made) == len(outputs) + 1
            self._check_shapes(f"{function} returns", made[:-1] if logits else made, outputs)
        return method

    def _check_shapes(
        self, what: str, metas: Sequence[Any], expected: Sequence[TensorSpec]
    ) -> None:
        found = [tuple(meta.sizes()) for meta in metas]
        shapes = [tuple(tensor.shape) for tensor in expected]
        if found != shapes:
            raise BundleError(
                f"{self.file}: {what} tensors of shapes {found}, the manifest says {shapes}; "
                "export the bundle again"
            )

    def _check_schema(self) -> None:
        if SCHEMA not in self._program.method_names:
            raise BundleError(f"{self.file}: it has no {SCHEMA}: not a program of ssdevice")
        made = self._program.load_method(SCHEMA).execute([])
        found = made[0] if made else None
        if found != SCHEMA_VERSION:
            raise BundleError(
                f"{self.file}: a program with schema {found}, this runtime reads {SCHEMA_VERSION}; "
                "export it again"
            )

    def states(self, function: str) -> list[Any]:
        """The live cache as torch tensors ``[kv_heads, capacity, head_dim]``.

        The keys of all layers come first, then the values. Raises BundleError for a cache of
        another form.
        """
        method = self.method(function)
        g = self.geometry
        try:
            found = [
                method.get_attribute(f"{name}.{layer}")
                for name in (KEYS, VALUES)
                for layer in range(g.layers)
            ]
        except RuntimeError as error:
            raise BundleError(
                f"{self.file}: {function} has not the model's cache ({first_line(error)})"
            ) from error
        for state in found:
            if tuple(state.shape) != (g.kv_heads, g.capacity, g.head_dim):
                raise BundleError(
                    f"{self.file}: a cache of shape {tuple(state.shape)}; export the bundle again"
                )
        return found

    def tensor(self, array: NDArray[Any]) -> Any:
        """A torch tensor that shares an array's memory."""
        return self._torch.from_numpy(array)

    def seat(self, cache: "ExecutorchCache", function: str) -> None:
        """Give ``cache`` the turn: put its rows and its adapter into the program."""
        if self._installed is not cache.adapter:
            self._install(cache.adapter)
        owner = self._owner() if self._owner is not None else None
        if owner is cache:
            return
        states = self.states(function)
        if owner is not None and owner.memory is not cache.memory:
            owner.saved = [state[:, : owner.written].numpy().copy() for state in states]
        if cache.saved is not None:
            for state, rows in zip(states, cache.saved, strict=True):
                state[:, : rows.shape[1]].copy_(self.tensor(rows))
        cache.saved = None
        self._owner = weakref.ref(cache)

    def _install(self, adapter: AdapterSlots | None) -> None:
        """Put an app's tensors into the slots, zeros for None.

        Raises BundleError for tensors that do not fit.
        """
        if adapter is None:
            for state in self._slots.values():
                state.zero_()
        else:
            states = {}
            for name, value in adapter.tensors.items():
                states[name] = self._slot(adapter, name, value)
            slots = self.method(SET_ADAPTER).method_meta().num_inputs()
            if slots != len(states):
                raise BundleError(
                    f"{adapter.file}: {len(states)} tensors, the program has {slots} slots; "
                    "export the bundle again"
                )
            for name, state in states.items():
                state.copy_(self.tensor(adapter.tensors[name]))
            self._slots = states
        self._installed = adapter

    def _slot(self, adapter: AdapterSlots, name: str, value: Array) -> Any:
        """The live tensor of a slot. Raises BundleError unless it exists with this shape."""
        state = self._slots.get(name)
        if state is None:
            try:
                state = self.method(SET_ADAPTER).get_attribute(name)
            except RuntimeError as error:
                raise BundleError(
                    f"{adapter.file}: the program has no slot {name!r}; export it again"
                ) from error
        if tuple(state.shape) != value.shape:
            raise BundleError(
                f"{adapter.file}: {name!r} has shape {list(value.shape)}, "
                f"its slot {list(state.shape)}; export the bundle again"
            )
        return state

    def release(self) -> None:
        """Called when an engine is closed; the last one releases the memory."""
        self.users -= 1
        if self.users <= 0 and self._program is not None:
            self._unload()
            self._slots.clear()
            self._program = None


def _unload(methods: dict[str, Any]) -> None:
    POOL.release(len(methods))
    methods.clear()


def load_program(file: Path) -> Any:
    """ExecuTorch's program object for a file.

    Raises BundleError, MissingExtraError without ExecuTorch.
    """
    with needs_extra("executorch"):
        runtime: Any = importlib.import_module("executorch.runtime")
        importlib.import_module(OPERATORS)
    if not file.is_file():
        raise BundleError(f"{file}: no such program")
    check_program(file)
    try:
        with native_silence():
            opened = runtime.Runtime.get()
            program = opened.load_program(file)
    except (RuntimeError, OSError) as error:
        raise BundleError(
            f"{file}: not a whole ExecuTorch program ({first_line(error)})"
        ) from error
    if has_coreml(file) and not opened.backend_registry.is_available(COREML):
        # Imported here, because other programs do not need the interpreter.
        from ssdevice.runtime.executorch.coreml_delegate import InterpretedProgram

        return InterpretedProgram(file, program)
    return program


def explain(file: Path, function: str, error: Exception) -> str:
    """Why ExecuTorch cannot run a function, as far as its error codes tell."""
    reason = first_line(error)
    if "0x14" in reason:
        reason += ": an operator of the program is not in this runtime; load its libraries first"
        portable: Any = importlib.import_module("executorch.extension.pybindings.portable_lib")
        missing = operators_of(file, function) - set(portable._get_operator_names())
        if missing:
            reason += f" ({', '.join(sorted(missing))})"
    if "0x20" in reason or "0x30" in reason:
        reason += ": the program's delegate is not in this runtime, or the file is damaged"
    return f"{file}: ExecuTorch cannot run {function} ({reason})"
