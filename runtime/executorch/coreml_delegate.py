"""Runs programs that are lowered to Core ML on machines without Core ML, with the MIL interpreter.

So the same file that a phone gets can be run here: instruction by instruction from its flatbuffer, delegates by
``ssdevice.mil``. This is slow. It verifies integers and rows, but not a device's arithmetic.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssdevice.mil.program import Program as Interpreter
from ssdevice.runtime.executorch.delegates import Delegate, Method, open_delegates
from ssdevice.runtime.notice import say_once

SLOW = "ssdevice: Core ML delegates run only on Apple's systems; here their operations run in NumPy one by one, slowly"
Array = NDArray[Any]


class InterpretedProgram:
    """A program with Core ML delegates; it has the part of ``executorch.runtime.Program`` that LoadedProgram uses.

    ``program``: ExecuTorch's own object for the same file, which knows shapes and runs methods without delegates.
    Raises BundleError for a file that calls anything but such delegates and writes of the cache.
    """

    def __init__(self, file: Path, program: Any) -> None:
        say_once(SLOW)
        self._program = program
        self.method_names: set[str] = program.method_names
        self._methods, self.interpreter = open_delegates(file)
        self.states = {
            value.name: np.zeros(value.shape, value.dtype)
            for method in self._methods.values()
            for value in method.values.values()
            if value.name
        }

    def load_method(self, name: str) -> Any:
        """A method, with the attribute ``_method`` of ExecuTorch's class."""
        if name not in self._methods:
            return self._program.load_method(name)
        return InterpretedMethod(self._methods[name], self.interpreter, self.states, self._program.metadata(name))


class InterpretedMethod:
    """One method; its inputs and outputs are torch tensors, as in ExecuTorch's binding."""

    def __init__(self, method: Method, interpreter: Interpreter, states: Mapping[str, Array], metadata: Any) -> None:
        self._from_numpy: Callable[[Array], Any] = importlib.import_module("torch").from_numpy
        self._called, self._interpreter, self._states, self._metadata = method, interpreter, states, metadata

    @property
    def _method(self) -> InterpretedMethod:
        return self

    def method_meta(self) -> Any:
        """Shapes of its tensors."""
        return self._metadata

    def get_attribute(self, name: str) -> Any:
        """A live tensor of the program's state. Raises RuntimeError, as ExecuTorch does."""
        if name not in self._states:
            raise RuntimeError(f"no tensor {name}")
        return self._from_numpy(self._states[name])

    def call(self, tensors: Sequence[Any], clone_outputs: bool = True) -> list[Any]:
        """Run every instruction in order. Outputs are always new. Raises RuntimeError, as ExecuTorch does."""
        method = self._called
        held: dict[int, Array] = {
            place: self._states[value.name] for place, value in method.values.items() if value.name
        }
        held |= {place: tensor.numpy() for place, tensor in zip(method.inputs, tensors, strict=True)}
        for instruction in method.instructions:
            if isinstance(instruction, Delegate):
                inputs = {name: held[place] for name, place in instruction.inputs}
                out = self._interpreter.run(instruction.function, inputs)
                for name, place in instruction.outputs:
                    held[place] = out[name]
            else:
                state, at = held[instruction.state], held[instruction.at]
                if at.min() < 0 or at.max() >= state.shape[1]:
                    raise RuntimeError(f"rows {at.tolist()} in a cache of {state.shape[1]}")
                state[:, at] = held[instruction.rows]
        return [self._from_numpy(held[place]) for place in method.outputs]
