"""Prepares an exported torch graph for coremltools: makes it functional, replaces operators that it does not have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch._export.verifier import Verifier
from torch.export import ExportedProgram, ExportGraphSignature
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec, TensorArgument

aten = torch.ops.aten

HALF_MIN = -65504.0
"""The smallest number of float16."""


def functional(program: ExportedProgram) -> ExportedProgram:
    """A traced program whose writes of states, each the last use of its state, are outputs, as coremltools expects.

    ``run_decompositions({})`` gives the same by tracing all operators again, which takes longer than the first trace.
    """
    graph, signature = program.graph_module.graph, program.graph_signature
    states, written, outputs, output = signature.inputs_to_buffers, [], [], graph.output_node()
    for node in list(graph.nodes):
        if node.target is aten.copy_.default:
            state, value = node.args
            if node.users or state.name not in states:
                raise AssertionError(f"{node} writes something else than a state, or is read")
            outputs.append(OutputSpec(OutputKind.BUFFER_MUTATION, TensorArgument(value.name), states[state.name]))
            written.append(value)
            graph.erase_node(node)
        elif node.target is aten.to.dtype:
            source, dtype = node.args[:2]
            if source.meta["val"].dtype == dtype and output not in node.users:
                node.replace_all_uses_with(source)
                graph.erase_node(node)
            else:
                node.target, node.args, node.kwargs = aten._to_copy.default, (source,), {"dtype": dtype}
        elif node.target in (aten.reshape.default, aten.flatten.using_ints):
            node.target, node.args = aten.view.default, (node.args[0], list(node.meta["val"].shape))
        elif node.target is aten.chunk.default:
            source, dim = node.args[0], node.args[2] if len(node.args) > 2 else 0
            sizes = [part.shape[dim] for part in node.meta["val"]]
            node.target, node.args = aten.split_with_sizes.default, (source, sizes, dim)
        elif node.target is aten.clamp_.default:  # olmo's, on a linear's result, which has no views
            node.target = aten.clamp.default
            node.args[0].replace_all_uses_with(node, delete_user_cb=lambda user, node=node: user > node)
    output.args = ((*written, *output.args[0]),)
    signature = ExportGraphSignature(signature.input_specs, [*outputs, *signature.output_specs])
    return ExportedProgram(
        program.graph_module,
        graph,
        signature,
        program.state_dict,
        program.range_constraints,
        program.module_call_graph,
        constants=program.constants,
        verifiers=[Verifier],
    )


def simplify(program: ExportedProgram) -> None:
    """Replace operators of a decomposed program that coremltools does not have, in place."""
    graph = program.graph_module.graph
    for node in [node for node in graph.nodes if node.op == "call_function"]:
        if "_assert" in str(node.target):
            graph.erase_node(node)
        else:
            _replace(node)
    graph.eliminate_dead_code()
    program.graph_module.recompile()


def name_inputs(program: ExportedProgram, names: Sequence[str]) -> None:
    """Name a program's inputs in order; coremltools keeps these names.

    What operators give has their names (``chunk`` is phi3's as well as ours); an underscore makes room for the
    contract's, of outputs and states too.
    """
    signature, nodes = program.graph_signature, {node.name: node for node in program.graph.nodes}
    renamed = {name: f"{name}_" for name, node in nodes.items() if node.op == "call_function"}
    inputs = [spec.arg.name for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
    renamed |= dict(zip(inputs, names, strict=True))
    for name, new in renamed.items():
        nodes[name].name = new  # fx would number a name that was taken before
    for spec in (*signature.input_specs, *signature.output_specs):
        if isinstance(spec.arg, TensorArgument):
            spec.arg = TensorArgument(name=renamed.get(spec.arg.name, spec.arg.name))


def _replace(node: fx.Node) -> None:
    """Replace a node by operators that coremltools has."""
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
        with node.graph.inserting_before(node):
            given = (list(value.shape), _number(other))
            full = node.graph.call_function(aten.full.default, given, {"dtype": value.dtype})
        full.meta["val"] = value
        node.target, node.args = aten.where.self, (condition, kept, full)


def _replace_choice(node: fx.Node) -> None:
    """``where(condition, a, b)`` of numbers as ``condition * (a - b) + b``, without constants of that shape."""
    condition, a, b = node.args
    graph, value = node.graph, node.meta["val"]
    with graph.inserting_before(node):
        number = graph.call_function(aten._to_copy.default, (condition,), {"dtype": value.dtype})
        scaled = graph.call_function(aten.mul.Tensor, (number, _number(a) - _number(b)))
        for new in (number, scaled):
            new.meta["val"] = value
    node.target, node.args = aten.add.Tensor, (scaled, _number(b))


def _number(argument: object) -> float:
    assert isinstance(argument, (int, float))
    return float(argument)
