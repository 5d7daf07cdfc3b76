"""A Core ML package behind a pipe, for the Swift tests' stand-in for Core ML: a line of JSON in, a
line out.

``python -m tests.swift.interpreter PACKAGE``. Questions: ``{"ask": "function", "function": NAME}``
(is there one?), ``{"ask": "state"}`` (a new one, by number), ``{"ask": "run", "function": NAME,
"state": NUMBER, "inputs": {NAME: {"shape": .., "values": ..}}}``. What goes wrong is answered with
``{"error": TEXT}``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ssdevice.errors import SSDeviceError
from ssdevice.mil.program import Program, State
from ssdevice.mil.reader import Package


def answer(program: Program, states: list[State], question: dict[str, Any]) -> dict[str, Any]:
    """The answer to a question."""
    match question["ask"]:
        case "function":
            program.package.spec(question["function"])
            return {}
        case "state":
            states.append(program.make_state())
            return {"state": len(states) - 1}
        case _:
            types = {
                tensor.name: tensor.dtype
                for tensor in program.package.spec(question["function"]).inputs
            }
            inputs = {
                name: np.array(given["values"], types[name]).reshape(given["shape"])
                for name, given in question["inputs"].items()
            }
            out = program.run(question["function"], inputs, states[question["state"]])
            return {"outputs": {name: value.ravel().tolist() for name, value in out.items()}}


def main(package: Path) -> None:
    """Answer until the other side closes the pipe."""
    program = Program(Package.open(package))
    states = list[State]()
    for line in sys.stdin:
        try:
            found = answer(program, states, json.loads(line))
        except SSDeviceError as error:
            found = {"error": str(error)}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
