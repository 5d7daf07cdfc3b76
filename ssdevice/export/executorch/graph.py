"""Rewrites of exported programs so that one XNNPACK delegate takes as much of a step as possible.

In the context of ``Products``, ``torch.export`` records other operators for norms; ``tidy``
rewrites its result, ``write_last`` the lowered program. All compute the same up to the order of a
sum. ``delegation`` says what remains outside delegates.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten
VIEWS = {
    aten.view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.flatten.using_ints,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten._unsafe_view.default,
}
"""Operators that keep the row-major order of elements."""


class Products(TorchFunctionMode):
    """In this context means of rows and layer norms are products with a column of 1/D: the delegate
    has neither.
    """

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if function is nn.functional.layer_norm:
            return _layer_norm(*args, **named)
        if (
            function in (Tensor.mean, torch.mean)
            and named == {"keepdim": True}
            and args[1:] in ((-1,), ([-1],))
        ):
            return _mean(args[0])
        return function(*args, **named)


def _mean(x: Tensor) -> Tensor:
    """The mean of each row, ``[.., D] -> [.., 1]``."""
    width = x.shape[-1]
    return torch.bmm(x.reshape(1, -1, width), torch.full([1, width, 1], 1.0 / width)).reshape(
        *x.shape[:-1], 1
    )


def _layer_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    if len(shape) != 1:
        return nn.functional.layer_norm(x, list(shape), weight, bias, eps)
    centred = x - _mean(x)
    normed = centred * torch.rsqrt(_mean(centred * centred) + eps)
    scaled = normed if weight is None else normed * weight
    return scaled if bias is None else scaled + bias


def tidy(program: ExportedProgram) -> ExportedProgram:
    """Rewrite in place: equal operators once, chains of views as one, embeddings as the lowering
    wants them.
    """
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.target is aten.embedding.default:
            _plain_embedding(graph, node)
    _collapse_views(graph)
    _merge_equal(graph)
    _collapse_views(graph)
    graph.eliminate_dead_code(
        lambda node: (node.op == "call_function" and _mutates(node)) or node.is_impure()
    )
    program.graph_module.recompile()
    return program


def write_last(program: ExportedProgram) -> None:
    """Move the writes of the cache after everything that reads it, so that they can happen in
    place.
    """
    graph = program.graph_module.graph
    output = graph.output_node()
    for node in list(graph.nodes):
        if node.op == "call_function" and "index_put" in str(node.target):
            if set(node.users) != {output}:
                raise AssertionError(f"{node} is read in the graph that writes it")
            output.prepend(node)
    program.graph_module.recompile()


FREE = ("getitem", "view_copy", "unsqueeze_copy")
"""Operators that are elided outside delegates and cost next to nothing inside."""
MIN_DELEGATE = 5
"""A delegate with fewer operators is not worth its call, unless one of them is a matrix product."""
PRODUCTS = ("linear", "bmm", "mm", "addmm")
SHOWN = 6


def worthwhile(nodes: Iterable[fx.Node]) -> bool:
    """Whether a delegate of these nodes saves more than its call costs."""
    names = [
        _name(node) for node in nodes if node.op == "call_function" and _name(node) not in FREE
    ]
    return len(names) >= MIN_DELEGATE or any(name in PRODUCTS for name in names)


def delegation(name: str, program: ExportedProgram) -> str:
    """A sentence on what a lowered function delegates, as ExecuTorch's devtools count it."""
    from executorch.devtools.backend_debug import get_delegation_info

    found = get_delegation_info(program.graph_module)
    outside = Counter[str]()
    for one in found.delegation_by_operator.values():
        if one.non_delegated and not any(free in one.op_type for free in FREE):
            outside[one.op_type] = one.non_delegated
    most = ", ".join(f"{operator} {count}" for operator, count in outside.most_common(SHOWN))
    inside = f"{found.num_delegated_nodes} operators in {found.num_delegated_subgraphs} delegates"
    return f"{name}: {inside}, {outside.total()} outside (most: {most})"


def _name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    name = (
        getattr(node.target, "__name__", node.target)
        if schema is None
        else schema.name.split("::")[-1]
    )
    return str(name)


def _call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """A new call with the metadata that later passes need."""
    node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.map_arg(args, lambda source: source.meta["val"]))
    return node


def _shape(node: fx.Node) -> list[int]:
    return [int(size) for size in node.meta["val"].shape]


def _fixed(node: object) -> bool:
    """Whether a node is a tensor with static sizes."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape)


def _plain_embedding(graph: fx.Graph, node: fx.Node) -> None:
    """Reduce an embedding to two arguments, with int64 indices.

    A padding index matters only for gradients, and hides a quantized table from the pass that looks
    for one. The operator for quantized tables aborts the process for 32-bit indices.
    """
    table, indices = cast(tuple[fx.Node, fx.Node], node.args[:2])
    if indices.meta["val"].dtype is not torch.int64:
        with graph.inserting_before(node):
            indices = _call(graph, aten.to.dtype, indices, torch.int64)
    node.args = (table, indices)


def _collapse_views(graph: fx.Graph) -> None:
    """Replace a view of a view by one view of the source, or by the source if the shapes are equal.

    A view between operators outside delegates is free; the operators that it replaces would copy.
    """
    for node in list(graph.nodes):
        if not _is_view(node):
            continue
        source = node
        while _is_view(source):
            source = cast(fx.Node, source.args[0])
        if _shape(source) == _shape(node):
            node.replace_all_uses_with(source)
        elif source is not node.args[0] or node.target is not aten.reshape.default:
            with graph.inserting_before(node):
                node.replace_all_uses_with(_call(graph, aten.reshape.default, source, _shape(node)))


def _is_view(node: fx.Node) -> bool:
    if node.op != "call_function" or not _fixed(node) or not _fixed(node.args[0]):
        return False
    # In a dimension of size 1 every valid index selects the only row.
    if node.target in (aten.select.int, aten.index_select.default):
        x = cast(fx.Node, node.args[0])
        dim = cast(int, node.args[1])
        return _shape(x)[dim] == 1 and node.meta["val"].numel() == x.meta["val"].numel()
    return node.target in VIEWS


def _merge_equal(graph: fx.Graph) -> None:
    """Of calls of a pure operator with the same arguments, keep only the first.

    Quantization is left alone: a weight that two delegates share would join them into one delegate
    around the verification.
    """
    first: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if (
            node.op != "call_function"
            or _mutates(node)
            or not isinstance(node.meta.get("val"), torch.Tensor)
        ):
            continue
        if str(node.target).startswith("aten."):
            known = first.setdefault(
                repr((str(node.target), node.args, sorted(node.kwargs.items()))), node
            )
            if known is not node:
                node.replace_all_uses_with(known)
                graph.erase_node(node)


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is None or schema.is_mutable
