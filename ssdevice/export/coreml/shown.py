"""A Core ML package in the interpreter, which shows every product to the parity gate."""

import re
from collections.abc import Mapping

import numpy as np

from ssdevice.contract import KEYS, ROWS, VALUES, Geometry
from ssdevice.export.mlprogram.weights import key_of, short_name, weight_key
from ssdevice.export.parity.difference import Array
from ssdevice.export.parity.products import Call, Product, Shown
from ssdevice.mil.program import Program
from ssdevice.mil.schema import Operation
from ssdevice.runtime.engine import rows_of_state

SHORT = re.compile(r"w[0-9a-f]{8}")


class CoreMLShown(Shown):
    """``names``: the package's names of the contract's functions."""

    dtype = np.float16

    def __init__(self, program: Program, geometry: Geometry, names: Mapping[str, str]) -> None:
        self.program = program
        self.geometry = geometry
        self.names = names

    def spell(self, parameter: str) -> str:
        return short_name(key_of(parameter))

    def call(self, function: str, inputs: Mapping[str, Array], length: int, past: Array) -> Call:
        g = self.geometry
        name = self.names[function]
        held = past.reshape(g.layers, 2, length, g.kv_heads, g.head_dim).swapaxes(2, 3)
        state = self.program.make_state(name)
        for at, key in enumerate((KEYS, VALUES)):
            state[key][:, :, :length] = held[:, at]
        marks = self._products(name)
        wanted = {value for _, source, result in marks for value in (source, result)}
        seen: dict[str, Array] = {}

        def observe(operation: Operation, values: tuple[Array, ...]) -> None:
            for (output, _), value in zip(operation.outputs, values, strict=True):
                if output in wanted:
                    seen[output] = value.reshape(-1, value.shape[-1])

        out = self.program.run(name, inputs, state, observe)
        out[ROWS] = rows_of_state(state[KEYS], state[VALUES], length, length + g.chunk)
        return Call(
            out, [Product(weight, seen[source], seen[result]) for weight, source, result in marks]
        )

    def _products(self, function: str) -> list[tuple[str, str, str]]:
        """(weight, rows, result) of every linear, in order."""
        found = self.program.package.function(function)
        weights = {}
        for name, kind in found.makers.items():
            key = weight_key(kind, name)
            if key is not None:
                weights[name] = key if SHORT.fullmatch(key) else short_name(key)
        linears = [operation for operation in found.operations if operation.kind == "linear"]
        pairs = [
            (operation.inputs["x"][0], operation.inputs["weight"][0], operation.output)
            for operation in linears
        ]
        return [
            (weights[weight], source, result)
            for source, weight, result in pairs
            if weight in weights
        ]
