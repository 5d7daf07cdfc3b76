"""A Core ML engine that shows its logits, to tell near-ties from faults; it runs in the interpreter on any system."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from ssdevice.bundle.folder import Bundle
from ssdevice.contract import LOGITS, PLAIN, STEP, TOKENS
from ssdevice.errors import BundleError
from ssdevice.export.logits import ShowsLogits
from ssdevice.mil.program import Observer, Program, State
from ssdevice.mil.reader import Package
from ssdevice.mil.schema import Function, Operation
from ssdevice.runtime.coreml.engine import MODEL, CoreMLEngine
from ssdevice.runtime.engine import Inputs

CHOICE = "reduce_argmax"


class ShownProgram(Program):
    """The interpreter, with the logits of the step functions among ``functions`` as the output LOGITS."""

    def __init__(self, package: Package, functions: Mapping[str, str]) -> None:
        super().__init__(package)
        self._watched = {
            function: logits_of(package.function(function))
            for name, function in functions.items()
            if name in (STEP, PLAIN)
        }

    def run(
        self, function: str, inputs: Inputs, state: State | None = None, observe: Observer | None = None
    ) -> dict[str, NDArray[Any]]:
        watched = self._watched.get(function)
        if watched is None:
            return super().run(function, inputs, state, observe)
        shown: dict[str, NDArray[Any]] = {}

        def keep(operation: Operation, outputs: tuple[NDArray[Any], ...]) -> None:
            if operation.output == watched:
                shown[LOGITS] = outputs[0].copy()

        return {**super().run(function, inputs, state, keep), **shown}


class LogitsEngine(ShowsLogits, CoreMLEngine):
    """A CoreMLEngine that shows logits."""

    def __init__(self, bundle: Bundle, app: str | None) -> None:
        names = bundle.function_names(app)
        super().__init__(ShownProgram(Package.open(bundle.file(MODEL)), names), bundle.geometry, names)


def logits_of(function: Function) -> str:
    """The name of the logits from which TOKENS are chosen. Raises BundleError if they are not found."""
    makers = {name: operation for operation in function.operations for name, _ in operation.outputs}
    choices = [operation for operation in _ancestors(makers, TOKENS) if operation.kind == CHOICE]
    # If there are several, the one that does not depend on another reads the main logits.
    first = [one for one in choices if not any(o.kind == CHOICE for o in _ancestors(makers, str(one.inputs["x"][0])))]
    if len(first) != 1:
        raise BundleError(f"{function.name}: {len(first)} operations {CHOICE} decide the tokens, expected one")
    return str(first[0].inputs["x"][0])


def _ancestors(makers: Mapping[str, Operation], value: str) -> list[Operation]:
    """The operations from which a value is computed."""
    found: dict[str, Operation] = {}
    waiting = [value]
    while waiting:
        operation = makers.get(waiting.pop())
        if operation is not None and operation.output not in found:
            found[operation.output] = operation
            waiting.extend(operation.names())
    return list(found.values())
