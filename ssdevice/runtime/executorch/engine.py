"""ExecuTorch bundles: one program that owns a KV cache, which its functions share."""

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Self

import numpy as np

from ssdevice import contract
from ssdevice.bundle.folder import Bundle
from ssdevice.contract import PREFILL, CacheForm, FunctionSpec, Geometry
from ssdevice.errors import BundleError
from ssdevice.runtime.engine import (
    Cache,
    Engine,
    EngineOptions,
    Inputs,
    Outputs,
    check_cache,
    rows_of_state,
)
from ssdevice.runtime.executorch.program import AdapterSlots, Array, LoadedProgram, explain

PROGRAM = "program"
"""Role of the program file."""
CACHE_DTYPE = "float32"
ADAPTER_FILE = "adapter.safetensors"
"""An app's tensors by slot, which a host passes to ``set_adapter``."""


class ExecutorchEngine(Engine):
    """A program opened for one app.

    ``names``: the contract's functions that the app has. ``program``: one that other engines share;
    None: this engine loads its own. ``adapter``: the app's tensors for the program's slots. Raises
    BundleError, see LoadedProgram.
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
        super().__init__(geometry, frozenset(names), file)
        self.specs = specs_of(geometry, names)
        self.adapter = adapter
        self.program = program or LoadedProgram(file, geometry, self.specs, options)
        self.program.users += 1
        self.names: dict[str, list[str]] = {}
        for name, spec in self.specs.items():
            outputs = [tensor.name for tensor in spec.outputs if 0 not in tensor.shape]
            self.names[name] = [*outputs, contract.LOGITS]

    @classmethod
    def of(cls, bundle: Bundle, app: str | None, options: EngineOptions) -> Self:
        """The engine of an app.

        Raises BundleError for another cache form or a program that does not load.
        """
        file = bundle.file(PROGRAM)
        found = bundle.app(app)
        check_cache(bundle, CacheForm.INTERNAL, CACHE_DTYPE)
        if not found.functions:
            return cls(file, bundle.geometry, list(bundle.functions), options)
        if len(found.files) > 1:
            raise BundleError(
                f"{bundle.folder}: app {found.name!r} lists {len(found.files)} files, expected one"
            )
        program = LoadedProgram.of(
            bundle, file, specs_of(bundle.geometry, list(bundle.functions)), options
        )
        adapter = AdapterSlots(bundle.file(found.files[0])) if found.files else None
        return cls(file, bundle.geometry, list(found.functions), options, program, adapter)

    def outputs(self, function: str) -> list[str]:
        """Names of a function's outputs.

        They are the contract's tensors that have elements, and logits if it returns them.
        """
        return self.names[function][: self.program.method(function).method_meta().num_outputs()]

    def new_cache(self, inputs: Inputs, beside: Cache | None = None) -> "ExecutorchCache":
        memory = beside.memory if isinstance(beside, ExecutorchCache) else object()
        return ExecutorchCache(self, inputs, memory)

    def warm(self) -> None:
        for function in self.specs:
            self.program.method(function)

    def release(self) -> None:
        self.program.release()


class ExecutorchCache(Cache):
    """The program's cache while it has the turn (``LoadedProgram.seat``).

    ``saved``: its rows while another cache has the turn.
    ``written``: how many there are.
    ``adapter``: tensors for the slots; None for the bare base.
    ``memory``: caches with the same one do not save their rows for each other.
    """

    def __init__(self, engine: ExecutorchEngine, inputs: Inputs, memory: object) -> None:
        super().__init__(inputs)
        self.engine = engine
        self.memory = memory
        self.adapter = engine.adapter
        self.saved: list[Array] | None = None
        self.written = 0
        self._tensors: dict[str, list[Any]] = {}
        for name, spec in engine.specs.items():
            tensors = [engine.program.tensor(inputs[tensor.name]) for tensor in spec.inputs]
            self._tensors[name] = tensors

    def call(self, function: str, length: int) -> Outputs:
        engine = self.engine
        program = self.engine.program
        with program.lock:
            program.seat(self, function)
            most = max(engine.geometry.chunk, engine.geometry.tree.size)  # new rows of any function
            self.written = max(self.written, min(length + most, engine.geometry.capacity))
            clock = perf_counter()
            try:
                out = program.method(function).call(self._tensors[function], clone_outputs=False)
            except RuntimeError as error:
                raise BundleError(explain(engine.source, function, error)) from error
            self.native_seconds += perf_counter() - clock
            # The next call of the program, by any engine, overwrites its outputs.
            return {
                name: tensor.numpy().copy()
                for name, tensor in zip(engine.names[function], out, strict=False)
            }

    def rows(self, start: int, end: int) -> Array:
        program = self.engine.program
        layers = self.engine.geometry.layers
        with program.lock:
            program.seat(self, PREFILL)
            states = [state[:, start:end].numpy() for state in program.states(PREFILL)]
            return rows_of_state(
                np.stack(states[:layers]), np.stack(states[layers:]), 0, end - start
            )


def specs_of(geometry: Geometry, names: Sequence[str]) -> dict[str, FunctionSpec]:
    """The specs of some of the contract's functions in the form that programs have."""
    every = contract.functions(geometry, CacheForm.INTERNAL, CACHE_DTYPE)
    return {name: every[name] for name in names}
