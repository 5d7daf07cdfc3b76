"""Traced programs run in torch, which show every product to the parity gate.

A target that hands its programs to delegates cannot show what those compute. What it hands over can
be followed: the program that was traced and rewritten, right before its lowering. Between products
it has everything that an export makes of a model: norms, rotary embedding, masks, attention, the
cache and the verification.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from ssdevice.contract import KEYS, ROWS, VALUES, FunctionSpec, Geometry
from ssdevice.export.exporter import ExportJob
from ssdevice.export.parity.difference import Array
from ssdevice.export.parity.follow import follow
from ssdevice.export.parity.products import Bounds, Call, Product, Shown
from ssdevice.memory import free_memory

MODEL = "module.model."
"""What the forms of the functions put before a parameter's name."""
STORED = re.compile(r"\.parametrizations\.(\w+)\.original\d*$")
"""Ends the name of a parameter that is computed from others."""
aten = torch.ops.aten
PRODUCTS = {aten.linear.default: 0, aten.mm.default: 0, aten.addmm.default: 1}
"""Operators that multiply rows with a matrix -> which argument the rows are; the matrix is the next
one.
"""
Programs = Mapping[str, ExportedProgram]
"""The contract's functions -> what was traced for them."""


def follow_traced(
    job: ExportJob,
    specs: Mapping[str, FunctionSpec],
    programs: Programs,
    bounds: Bounds,
    report: Callable[[str], None],
) -> dict[str, float]:
    """``follow`` for programs that were traced from the job's model, which is the reference.

    ``specs``: of all functions. ``report`` hears what is going on. Raises ParityError.
    """
    reference = replace(job, report=lambda _, __, ___, detail: report(f"check {detail}"))
    return follow(reference, TracedShown(programs, specs, job.plan.geometry), bounds)


class TracedShown(Shown):
    """Traced programs with the state of ``InternalCacheForm``, stacked or one tensor per layer."""

    def __init__(
        self, programs: Programs, specs: Mapping[str, FunctionSpec], geometry: Geometry
    ) -> None:
        self.geometry = geometry
        self.specs = specs
        self.programs = {name: Recorder(programs[name]) for name in specs}

    def call(self, function: str, inputs: Mapping[str, Array], length: int, past: Array) -> Call:
        g = self.geometry
        spec = self.specs[function]
        rows = torch.zeros(2, g.layers, g.kv_heads, g.capacity, g.head_dim)
        held = torch.from_numpy(past).reshape(g.layers, 2, length, g.kv_heads, g.head_dim)
        rows[..., :length, :] = held.permute(1, 0, 3, 2, 4)
        state = {KEYS: rows[0], VALUES: rows[1]}
        state |= {
            f"{name}.{layer}": state[name][layer]
            for name in (KEYS, VALUES)
            for layer in range(g.layers)
        }
        out, products = self.programs[function].call(
            [torch.from_numpy(inputs[one.name]) for one in spec.inputs], state
        )
        names = [one.name for one in spec.outputs if 0 not in one.shape]  # logits may follow them
        outputs = {name: value.numpy() for name, value in zip(names, out, strict=False)}
        new = rows[..., length : length + max(g.chunk, g.tree.emitted), :]
        outputs[ROWS] = new.permute(1, 0, 3, 2, 4).reshape(2 * g.layers, -1, g.row_width).numpy()
        return Call(outputs, products)

    def close(self) -> None:
        self.programs.clear()
        free_memory()


class Recorder(fx.Interpreter):
    """Runs a traced program and keeps the rows and the result of every product with a matrix of the
    model.
    """

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__(program.graph_module)
        self.program = program
        names = names_of(program)
        self.linears: list[tuple[str, fx.Node, fx.Node]] = []
        for node in program.graph.nodes:
            if (at := PRODUCTS.get(node.target)) is not None and node.args[at + 1] in names:
                self.linears.append((names[node.args[at + 1]], rows_of(node.args[at]), node))
        self.wanted = {node for _, rows, result in self.linears for node in (rows, result)}
        self.seen: dict[fx.Node, Array] = {}

    @property
    def weights(self) -> list[str]:
        """The weights that the program multiplies with, each as often as it does."""
        return [weight for weight, _, _ in self.linears]

    def call(
        self, integers: list[Tensor], state: Mapping[str, Tensor]
    ) -> tuple[list[Tensor], list[Product]]:
        """The program's outputs, and its products in order.

        Writes the tensors of ``state``, by their names.
        """
        signature = self.program.graph_signature
        program = self.program
        given = iter(integers)
        inputs = []
        for spec in signature.input_specs:
            if spec.kind is InputKind.USER_INPUT:
                inputs.append(next(given))
            else:
                held = program.constants if spec.target in program.constants else program.state_dict
                value = held[spec.target]
                own = (
                    value.clone() if spec.kind is InputKind.BUFFER else value
                )  # programs may write buffers
                inputs.append(state.get(str(spec.target), own))
        with torch.no_grad():
            results = self.run(*inputs, enable_io_processing=False)
        out = []
        for spec, value in zip(signature.output_specs, results, strict=True):
            if spec.kind is OutputKind.USER_OUTPUT:
                out.append(value)
            elif spec.kind is OutputKind.BUFFER_MUTATION:
                state[str(spec.target)].copy_(value)
        products = [
            Product(name, self.seen[rows], self.seen[result]) for name, rows, result in self.linears
        ]
        self.seen = {}
        return out, products

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node, which is kept if a product reads it or makes it."""
        value = super().run_node(n)
        if n in self.wanted:
            self.seen[n] = (
                value.reshape(-1, value.shape[-1]).numpy().copy()
            )  # some models clamp it in place
        return value


def rows_of(node: Any) -> fx.Node:
    """The float rows that a product reads: those before they are quantized."""
    while "quantize" in str(node.target):
        node = node.args[0]
    found: fx.Node = node
    return found


def names_of(program: ExportedProgram) -> dict[fx.Node, str]:
    """The values that are computed only from parameters and buffers -> the model's name of the
    first of these.
    """
    targets = {
        spec.arg.name: str(spec.target)
        for spec in program.graph_signature.input_specs
        if spec.target
    }
    names: dict[fx.Node, str] = {}
    for node in program.graph.nodes:
        read = node.all_input_nodes
        if node.op == "placeholder" and node.name in targets:
            names[node] = STORED.sub(r".\1", targets[node.name].removeprefix(MODEL))
        elif node.op == "call_function" and read and all(one in names for one in read):
            names[node] = names[read[0]]
    return names
