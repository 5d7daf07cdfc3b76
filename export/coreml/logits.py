"""The Core ML engine with its logits shown, for telling near-ties from faults: in the interpreter, on any system."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssdevice.bundle.folder import Bundle
from ssdevice.contract import PLAIN, STEP, TOKENS
from ssdevice.errors import BundleError
from ssdevice.mil.program import Program, State
from ssdevice.mil.reader import Package
from ssdevice.mil.schema import Function, Operation
from ssdevice.runtime.coreml import engine as coreml
from ssdevice.runtime.coreml.engine import MODEL, CoreMLConversation, CoreMLEngine
from ssdevice.runtime.generation import emitted_nodes

CHOICE = "reduce_argmax"


class ShownProgram(coreml.Program):
    """The interpreter, which keeps what each of ``functions`` chose its tokens from, as ``logits [rows, vocab]``."""

    def __init__(self, package: Package, functions: Mapping[str, str]) -> None:
        self._program = Program(package)
        self._watched = {
            function: logits_of(package.function(function))
            for name, function in functions.items()
            if name in (STEP, PLAIN)
        }
        self.logits: NDArray[np.float32] = np.zeros((0, 0), np.float32)

    def make_state(self, function: str) -> State:
        return self._program.make_state()

    def run(self, function: str, inputs: coreml.Integers, state: State) -> Mapping[str, NDArray[Any]]:
        watched = self._watched.get(function)

        def keep(operation: Operation, outputs: tuple[NDArray[Any], ...]) -> None:
            if operation.output == watched:
                self.logits = outputs[0].reshape(-1, outputs[0].shape[-1]).copy()

        return self._program.run(function, inputs, state, keep if watched is not None else None)


class LogitsEngine(CoreMLEngine):
    """A CoreMLEngine whose conversations keep the logits of what the last step emitted."""

    def __init__(self, bundle: Bundle, app: str | None) -> None:
        names = coreml.app_functions(bundle, app)
        self.shown = ShownProgram(Package.open(bundle.file(MODEL)), names)
        super().__init__(self.shown, bundle.geometry, names)

    def new_conversation(self) -> LogitsConversation:
        return LogitsConversation(self)


class LogitsConversation(CoreMLConversation):
    """``logits [emitted, vocab]``: what the last ``step`` or ``step_plain`` chose its tokens from."""

    def __init__(self, engine: LogitsEngine) -> None:
        super().__init__(engine)
        self.shown = engine.shown
        self.logits: NDArray[np.float32] = np.zeros((0, engine.geometry.vocab), np.float32)

    def step(self, root: int) -> list[int]:
        drafts = self.drafts.tolist()
        tokens = super().step(root)
        self.logits = self.shown.logits[emitted_nodes(self.geometry.tree, drafts, tokens)]
        return tokens

    def step_plain(self, root: int) -> int:
        token = super().step_plain(root)
        self.logits = self.shown.logits
        return token


def logits_of(function: Function) -> str:
    """The value that decides TOKENS; raises BundleError for a function in which it is not found."""
    makers = {name: operation for operation in function.operations for name, _ in operation.outputs}
    choices = [operation for operation in _ancestors(makers, TOKENS) if operation.kind == CHOICE]
    # Of several, the one that depends on no other is made on the main logits.
    first = [one for one in choices if not any(o.kind == CHOICE for o in _ancestors(makers, str(one.inputs["x"][0])))]
    if len(first) != 1:
        raise BundleError(f"{function.name}: {len(first)} operations {CHOICE} decide the tokens, expected one")
    return str(first[0].inputs["x"][0])


def _ancestors(makers: Mapping[str, Operation], value: str) -> list[Operation]:
    """Operations that a value is computed from."""
    found: dict[str, Operation] = {}
    waiting = [value]
    while waiting:
        operation = makers.get(waiting.pop())
        if operation is not None and operation.output not in found:
            found[operation.output] = operation
            waiting.extend(operation.names())
    return list(found.values())
