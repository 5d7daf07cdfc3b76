"""Prepares an exported torch graph for coremltools: folds constants and replaces operators that it
does not have.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, fx
from torch._export.verifier import Verifier
from torch.export import ExportedProgram, ExportGraphSignature
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec, TensorArgument

aten = torch.ops.aten

HALF_MIN = -65504.0
"""The smallest number of float16."""
MAX_FOLDED = 1 << 20
"""Most elements of a folded constant; larger ones are computed at run time."""


def functional(program: ExportedProgram) -> ExportedProgram:
    """A traced program whose writes of states, each the last use of its state, are outputs, as
    coremltools expects.

    ``run_decompositions({})`` gives the same by tracing all operators again, which takes longer
    than the first trace.
    """
    graph = program.graph_module.graph
    signature = program.graph_signature
    states = signature.inputs_to_buffers
    written = []
    outputs = []
    output = graph.output_node()
    for node in list(graph.nodes):
        if node.target is aten.copy_.default:
            state, value = node.args
            if node.users or state.name not in states:
                raise AssertionError(f"{node} writes something else than a state, or is read")
            outputs.append(
                OutputSpec(
                    OutputKind.BUFFER_MUTATION, TensorArgument(value.name), states[state.name]
                )
            )
            written.append(value)
            graph.erase_node(node)
        elif node.target is aten.to.dtype:
            source, dtype = node.args[:2]
            if source.meta["val"].dtype == dtype and output not in node.users:
                node.replace_all_uses_with(source)
                graph.erase_node(node)
            else:
                node.target = aten._to_copy.default
                node.args = (source,)
                node.kwargs = {"dtype": dtype}
        elif node.target in (aten.reshape.default, aten.flatten.using_ints):
            node.target, node.args = aten.view.default, (node.args[0], list(node.meta["val"].shape))
        elif node.target is aten.chunk.default:
            source = node.args[0]
            dim = node.args[2] if len(node.args) > 2 else 0
            sizes = [part.shape[dim] for part in node.meta["val"]]
            node.target = aten.split_with_sizes.default
            node.args = (source, sizes, dim)
        elif node.target is aten.clamp_.default:  # olmo's, on a linear's result, which has no views
            node.target = aten.clamp.default
            node.args[0].replace_all_uses_with(
                node, delete_user_cb=lambda user, node=node: user > node
            )
    output.args = ((*written, *output.args[0]),)
    signature = ExportGraphSignature(signature.input_specs, [*outputs, *signature.output_specs])
    return program._update(program.graph_module, signature, verifiers=[Verifier])


def simplify(program: ExportedProgram, states: Collection[str]) -> None:
    """Rewrite a decomposed program in place.

    ``states``: names of the buffers that the program itself changes.
    """
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and "_assert" in str(node.target):
            graph.erase_node(node)
    constants = _Constants(program, states)
    constants.fold()
    for node in list(graph.nodes):
        _replace(node, constants)
    graph.eliminate_dead_code()
    program.graph_module.recompile()


def name_inputs(program: ExportedProgram, names: Sequence[str]) -> None:
    """Name a program's inputs in order; coremltools keeps these names.

    What operators give has their names (``chunk`` is phi3's as well as ours); an underscore makes
    room for the contract's, of outputs and states too.
    """
    signature = program.graph_signature
    nodes = {node.name: node for node in program.graph.nodes}
    renamed = {name: f"{name}_" for name, node in nodes.items() if node.op == "call_function"}
    inputs = [spec.arg.name for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
    renamed |= dict(zip(inputs, names, strict=True))
    for name, new in renamed.items():
        nodes[name].name = new  # fx would number a name that was taken before
    for spec in (*signature.input_specs, *signature.output_specs):
        if isinstance(spec.arg, TensorArgument):
            spec.arg = TensorArgument(name=renamed.get(spec.arg.name, spec.arg.name))


class _Constants:
    """The known constants of a graph, and new ones added to it."""

    def __init__(self, program: ExportedProgram, states: Collection[str]) -> None:
        self.module = program.graph_module
        self.graph = program.graph_module.graph
        self.added = 0
        self.known: dict[fx.Node, Tensor] = {}
        placeholders = {node.name: node for node in self.graph.nodes if node.op == "placeholder"}
        for spec in program.graph_signature.input_specs:
            if spec.kind is InputKind.USER_INPUT or spec.target in states:
                continue
            assert spec.target is not None
            held = program.state_dict if spec.target in program.state_dict else program.constants
            value = held[spec.target]
            # Matrices stay parameters with their own names, so that functions can share them.
            if isinstance(value, Tensor) and not (
                spec.kind is InputKind.PARAMETER and value.dim() > 1
            ):
                self.known[placeholders[spec.arg.name]] = value.detach()

    def fold(self) -> None:
        """Replace every node that depends only on constants by its value."""
        for node in self.graph.nodes:
            if node.op != "call_function" or not all(
                source in self.known for source in node.all_input_nodes
            ):
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: self.known[source])
            if (
                isinstance(value := node.target(*args, **kwargs), Tensor)
                and value.numel() <= MAX_FOLDED
            ):
                self.known[node] = value
        for node in [n for n in self.graph.nodes if n.op == "call_function" and n in self.known]:
            if any(user not in self.known for user in node.users):
                constant = self.add(self.known[node], node)
                node.replace_all_uses_with(
                    constant, delete_user_cb=lambda user: user not in self.known
                )
        self.graph.eliminate_dead_code()

    def add(self, value: Tensor, before: fx.Node) -> fx.Node:
        name, self.added = f"constant_{self.added}", self.added + 1
        self.module.register_buffer(name, value.clone().contiguous())
        with self.graph.inserting_before(before):
            node: fx.Node = self.graph.get_attr(name)
        node.meta["val"] = value
        return node


def _replace(node: fx.Node, constants: _Constants) -> None:
    if node.op != "call_function":
        return
    if node.target is aten.__and__.Tensor:
        node.target = aten.logical_and.default
    elif node.target is aten.where.Scalar:
        _replace_choice(node)
    elif node.target is aten.where.ScalarSelf:
        # Nothing is lost, because every other value of float16 is larger.
        node.args = (node.args[0], max(_number(node.args[1]), HALF_MIN), node.args[2])
    elif node.target is aten.where.ScalarOther:
        condition, kept, other = node.args
        value = node.meta["val"]
        full = constants.add(torch.full(value.shape, _number(other), dtype=value.dtype), node)
        node.target = aten.where.self
        node.args = (condition, kept, full)


def _replace_choice(node: fx.Node) -> None:
    """``where(condition, a, b)`` of numbers as ``condition * (a - b) + b``, without constants of
    that shape.
    """
    condition, a, b = node.args
    graph = node.graph
    value = node.meta["val"]
    with graph.inserting_before(node):
        number = graph.call_function(aten._to_copy.default, (condition,), {"dtype": value.dtype})
        scaled = graph.call_function(aten.mul.Tensor, (number, _number(a) - _number(b)))
        for new in (number, scaled):
            new.meta["val"] = value
    node.target = aten.add.Tensor
    node.args = (scaled, _number(b))


def _number(argument: object) -> float:
    assert isinstance(argument, (int, float))
    return float(argument)
