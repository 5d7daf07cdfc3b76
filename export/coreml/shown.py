"""A Core ML package in the interpreter, which shows every product to the parity gate."""

import re
from collections.abc import Mapping

import numpy as np

from ssdevice.contract import KEYS, LENGTH, PREFILL, ROWS, VALUES
from ssdevice.export.mlprogram.stored import key_of
from ssdevice.export.mlprogram.weights import short_name, weight_key
from ssdevice.export.parity.difference import Array
from ssdevice.export.parity.products import Call, Product
from ssdevice.export.plan import ExportPlan
from ssdevice.mil.program import Program
from ssdevice.mil.schema import Operation

SHORT = re.compile(r"w[0-9a-f]{8}")


class CoreMLShown:
    """See ``parity.products.Shown``. ``names``: the package's names of the contract's functions."""

    dtype: type[np.generic] = np.float16
    slotted = False

    def __init__(self, program: Program, plan: ExportPlan, names: Mapping[str, str]) -> None:
        self.program, self.plan, self.names = program, plan, names
        self.state = program.make_state(names[PREFILL])

    def spell(self, parameter: str) -> str:
        """See Shown."""
        return short_name(key_of(parameter))

    def call(self, function: str, integers: Mapping[str, Array], length: int, past: Array) -> Call:
        """See Shown."""
        g, name = self.plan.geometry, self.names[function]
        held = past.reshape(g.layers, 2, length, g.kv_heads, g.head_dim).swapaxes(2, 3)
        for at, key in enumerate((KEYS, VALUES)):
            state = np.zeros_like(self.state[key])
            state[:, :, :length] = held[:, at]
            self.state[key] = state
        marks = self._products(name)
        wanted = {value for _, source, result in marks for value in (source, result)}
        seen: dict[str, Array] = {}

        def observe(operation: Operation, values: tuple[Array, ...]) -> None:
            for (output, _), value in zip(operation.outputs, values, strict=True):
                if output in wanted:
                    seen[output] = value.reshape(-1, value.shape[-1])

        inputs = {**integers, LENGTH: np.array([length], np.int32)}
        out = dict(self.program.run(name, inputs, self.state, observe))
        new = np.stack([self.state[key][:, :, length : length + g.chunk] for key in (KEYS, VALUES)], axis=1)
        out[ROWS] = new.swapaxes(2, 3).reshape(2 * g.layers, -1, g.row_width)
        return Call(out, [Product(weight, seen[source], seen[result]) for weight, source, result in marks])

    def close(self) -> None:
        """See Shown."""
        self.state.clear()

    def _products(self, function: str) -> list[tuple[str, str, str]]:
        """(weight, rows, result) of every linear, in order."""
        found = self.program.package.function(function)
        keys = {name: key for name, kind in found.makers.items() if (key := weight_key(kind, name)) is not None}
        weights = {name: key if SHORT.fullmatch(key) else short_name(key) for name, key in keys.items()}
        linears = [operation for operation in found.operations if operation.kind == "linear"]
        pairs = [(operation.inputs["x"][0], operation.inputs["weight"][0], operation.output) for operation in linears]
        return [(weights[weight], source, result) for source, weight, result in pairs if weight in weights]
