"""A Core ML program that shows its logits, to tell near-ties from faults; the interpreter runs it
on any system.
"""

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from ssdevice.contract import LOGITS, PLAIN, STEP
from ssdevice.errors import BundleError
from ssdevice.mil.program import Observer, Program, State
from ssdevice.mil.reader import Package
from ssdevice.mil.schema import Function, Operation
from ssdevice.runtime.engine import Inputs

CHOICE = "reduce_argmax"


class ShownProgram(Program):
    """The interpreter, with the logits of the step functions among ``functions`` as the output
    LOGITS.
    """

    def __init__(self, package: Package, functions: Mapping[str, str]) -> None:
        super().__init__(package)
        steps = [function for name, function in functions.items() if name in (STEP, PLAIN)]
        self._watched = {function: logits_of(package.function(function)) for function in steps}

    def run(
        self,
        function: str,
        inputs: Inputs,
        state: State | None = None,
        observe: Observer | None = None,
    ) -> dict[str, NDArray[Any]]:
        if (watched := self._watched.get(function)) is None:
            return super().run(function, inputs, state, observe)
        shown: dict[str, NDArray[Any]] = {}

        def keep(operation: Operation, outputs: tuple[NDArray[Any], ...]) -> None:
            if operation.output == watched:
                shown[LOGITS] = outputs[0].copy()

        return {**super().run(function, inputs, state, keep), **shown}


def logits_of(function: Function) -> str:
    """The name of the main logits: every other choice of a step depends on the one that reads them.

    Raises BundleError for a function that chooses nothing.
    """
    if (
        choice := next(
            (operation for operation in function.operations if operation.kind == CHOICE), None
        )
    ) is None:
        raise BundleError(f"{function.name}: no operation {CHOICE} chooses its tokens")
    return str(choice.inputs["x"][0])
