"""ExecuTorch bundles: one program whose functions share a KV cache that the program owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from ssdevice.contract import (
    CHUNK,
    COUNT,
    DRAFTS,
    LENGTH,
    NEXT_DRAFTS,
    NEXT_ROOT,
    PLAIN,
    PREFILL,
    ROOT,
    STEP,
    TOKENS,
    VALID,
    CacheForm,
    FunctionSpec,
    Geometry,
    functions,
)
from ssdevice.errors import BundleError
from ssdevice.runtime.engine import Conversation, Engine, EngineOptions
from ssdevice.runtime.executorch.program import AdapterSlots, Array, LoadedProgram, explain, load_program

if TYPE_CHECKING:
    from ssdevice.bundle.folder import Bundle

PROGRAM = "program"
"""Role of the program file."""
CACHE_DTYPE = "float32"
LOGITS = "logits"
"""Last output of ``step`` and ``step_plain`` beyond the contract, of programs exported with it: ``[T, V]``."""


class ExecutorchEngine(Engine):
    """A program opened for one app. ``names``: the contract's functions that the app has.

    ``program``: one that other engines use too; None: this engine's own. ``adapter``: what the app puts into the
    program's slots. Raises BundleError as LoadedProgram does.
    """

    def __init__(
        self,
        file: Path,
        geometry: Geometry,
        names: Sequence[str],
        options: EngineOptions,
        program: LoadedProgram | None = None,
        adapter: AdapterSlots | None = None,
    ) -> None:
        super().__init__(geometry, frozenset(names))
        self.file = file
        self.specs = specs_of(geometry, names)
        self.program = program or LoadedProgram(file, geometry, self.specs, options)
        self.adapter = adapter
        self.program.users += 1
        self._open = True

    @classmethod
    def of(cls, bundle: Bundle, app: str | None, options: EngineOptions, copy: Path | None = None) -> Self:
        """The engine of an app; raises BundleError for another cache form or a program that does not load.

        ``copy``: the bundle's program in another file, which is opened for this engine alone.
        """
        manifest, file, found = bundle.manifest, copy or bundle.file(PROGRAM), bundle.app(app)
        if manifest.cache is not CacheForm.STATE or manifest.cache_dtype != CACHE_DTYPE:
            raise BundleError(
                f"{bundle.folder}: a {manifest.cache_dtype} cache in form {manifest.cache}, "
                f"ExecuTorch bundles have {CACHE_DTYPE} in form {CacheForm.STATE}"
            )
        if not found.functions:
            return cls(file, bundle.geometry, list(bundle.functions), options)
        if len(found.files) > 1:
            raise BundleError(f"{bundle.folder}: app {found.name!r} lists {len(found.files)} files, expected one")
        specs = specs_of(bundle.geometry, list(bundle.functions))
        if copy:
            program = LoadedProgram(file, bundle.geometry, specs, options)
        else:
            program = LoadedProgram.of(bundle, file, specs, options)
        adapter = AdapterSlots(bundle.file(found.files[0])) if found.files else None
        return cls(file, bundle.geometry, list(found.functions), options, program, adapter)

    def outputs(self, function: str) -> list[str]:
        """Names of what a function gives: the contract's tensors that have elements, and logits where it gives them."""
        names = [tensor.name for tensor in self.specs[function].outputs if 0 not in tensor.shape]
        more = self.program.method(function).method_meta().num_outputs() - len(names)
        return [*names, LOGITS] if more == 1 and function != PREFILL else names

    def new_conversation(self) -> ExecutorchConversation:
        return ExecutorchConversation(self)

    def conversation_beside(self, other: Conversation) -> ExecutorchConversation:
        conversation = self.new_conversation()
        if isinstance(other, ExecutorchConversation):
            conversation.memory = other.memory
        return conversation

    def warm(self) -> None:
        for function in self.specs:
            self.program.method(function)

    def close(self) -> None:
        if self._open:
            self._open = False
            self.program.release()


class ExecutorchConversation(Conversation):
    """See ``executorch_program.Seated``."""

    def __init__(self, engine: ExecutorchEngine) -> None:
        super().__init__(engine.geometry)
        self.engine = engine
        self.saved: list[Array] | None = None
        self.written = 0
        self.adapter = engine.adapter
        self.memory: object = object()
        self._calls = {name: _Call(engine, spec) for name, spec in engine.specs.items()}

    def prefill(self, chunk: Sequence[int]) -> int:
        call, count = self._call(PREFILL), len(chunk)
        call.inputs[CHUNK][:count] = chunk
        call.inputs[VALID][0] = count
        with self.engine.program.lock:
            out = self._run(call, self.geometry.chunk)
            self._keep_drafts(out)
            return int(out[NEXT_ROOT][0])

    def step(self, root: int) -> list[int]:
        call = self._call(STEP)
        call.inputs[ROOT][0] = root
        call.inputs[DRAFTS][:] = self.drafts
        with self.engine.program.lock:
            out = self._run(call, self.geometry.tree.emitted)
            count = int(out[COUNT][0])
            self._see(out)
            self._keep_drafts(out)
            tokens: list[int] = out[TOKENS][:count].tolist()
        return tokens

    def step_plain(self, root: int) -> int:
        call = self._call(PLAIN)
        call.inputs[ROOT][0] = root
        with self.engine.program.lock:
            out = self._run(call, 1)
            self._see(out)
            return int(out[TOKENS][0])

    def rows(self, start: int, end: int) -> Array:
        """Cache rows ``[2 * layers, end - start, kv_heads * head_dim]``: keys and values of layer 0, of layer 1, .."""
        program, layers = self.engine.program, self.geometry.layers
        with program.lock:
            program.seat(self, PREFILL)
            states = program.states(PREFILL)
            pairs = [part for pair in zip(states[:layers], states[layers:], strict=True) for part in pair]
            return np.stack([part[:, start:end].numpy().transpose(1, 0, 2).reshape(end - start, -1) for part in pairs])

    def _call(self, function: str) -> _Call:
        if function not in self._calls:
            raise BundleError(f"{self.engine.file}: the bundle has no {function}")
        return self._calls[function]

    def _run(self, call: _Call, rows: int) -> Mapping[str, NDArray[Any]]:
        self.engine.program.seat(self, call.spec.name)
        self.written = max(self.written, min(self.length + rows, self.geometry.capacity))
        call.inputs[LENGTH][0] = self.length
        clock = perf_counter()
        out = call.execute()
        self.native_seconds += perf_counter() - clock
        return out

    def _see(self, out: Mapping[str, NDArray[Any]]) -> None:
        """Called with what a step gives, valid until the next call."""

    def _keep_drafts(self, out: Mapping[str, NDArray[Any]]) -> None:
        if NEXT_DRAFTS in out:
            self.drafts[:] = out[NEXT_DRAFTS]


class _Call:
    """One function: arrays for its inputs, and tensors over the same memory."""

    def __init__(self, engine: ExecutorchEngine, spec: FunctionSpec) -> None:
        self.engine, self.spec = engine, spec
        # Sizes are static here: only caches that are inputs have names for them.
        self.inputs = {t.name: np.zeros([int(size) for size in t.shape], np.int32) for t in spec.inputs}
        self.names: list[str] = []
        self._tensors = [engine.program.tensor(array) for array in self.inputs.values()]

    def execute(self) -> Mapping[str, NDArray[Any]]:
        """The outputs by name, valid until the function runs again."""
        method = self.engine.program.method(self.spec.name)
        try:
            out = method.call(self._tensors, clone_outputs=False)
        except RuntimeError as error:
            raise BundleError(explain(self.engine.file, self.spec.name, error)) from error
        names = self.names = self.names or self.engine.outputs(self.spec.name)
        if len(out) != len(names):
            raise BundleError(
                f"{self.engine.file}: {self.spec.name} gives {len(out)} tensors, expected {len(names)}; "
                "export the bundle again"
            )
        return {name: tensor.numpy() for name, tensor in zip(names, out, strict=True)}


def open_engine(bundle: Bundle, app: str | None, options: EngineOptions) -> ExecutorchEngine:
    """The engine of an app of an ExecuTorch bundle; see ``ExecutorchEngine.of``."""
    return ExecutorchEngine.of(bundle, app, options)


def specs_of(geometry: Geometry, names: Sequence[str]) -> dict[str, FunctionSpec]:
    """The signatures of some of the contract's functions as a program has them."""
    every = functions(geometry, CacheForm.STATE, CACHE_DTYPE)
    return {name: every[name] for name in names}


def constants(file: Path) -> dict[str, Any]:
    """The constant methods of a program by name: integers, and arrays of integers."""
    program = load_program(file)
    found: dict[str, Any] = {}
    for name in sorted(program.method_names):
        meta = program.metadata(name)
        if not meta.num_inputs() and not meta.num_attributes():
            (value,) = program.load_method(name).execute([])
            found[name] = value if isinstance(value, (int, float, bool, str)) else value.numpy()
    return found
