"""The ONNX graph of a torch module, operator by operator.

The module runs once on tensors without data, and every operator it calls becomes the nodes that
``translations`` or ``forms`` has for it. Operators on weights and tables only are computed
right away. Weights keep their names and are not copied. One size may be dynamic.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes import common as passes
from onnx_ir.tensor_adapters import from_torch_dtype
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ssdevice.contract import TensorSpec
from ssdevice.errors import UnsupportedModelError
from ssdevice.export import forms
from ssdevice.export.onnx.editor import OPSET, Editor, Shape, constant_of, shape_of, source_of
from ssdevice.export.onnx.files import IR_VERSION
from ssdevice.export.onnx.functions import attention_form
from ssdevice.export.onnx.linears import LINEAR, LINEAR_DOMAIN
from ssdevice.export.onnx.translations import TRANSLATIONS, Out, Translation, cast, largest
from ssdevice.runtime.onnx.kernels import (
    CAPPED_ATTENTION,
    DOMAIN,
    HALF_TREE_ATTENTION,
    TREE_ATTENTION,
)

Values = Sequence[ir.Value]


def linear(
    edit: Editor, out: Out, x: ir.Value, weight: ir.Value, bias: ir.Value | None = None
) -> ir.Value:
    """``[.., inputs] -> [.., outputs]``: a placeholder that keeps each weight whole; ``linears``
    lowers it.
    """
    terms = [x, weight] if bias is None else [x, weight, bias]
    return edit.insert(None, LINEAR, terms, out.shape, out.dtype, domain=LINEAR_DOMAIN)


def heads(edit: Editor, out: Out, rows: ir.Value, kv_heads: int) -> ir.Value:
    """``[P, KV * hd] -> [1, KV, P, hd]``."""
    _, _, count, dim = out.shape
    return edit.transpose(None, edit.reshape(None, rows, (1, count, kv_heads, dim)), [0, 2, 1, 3])


def attend(
    edit: Editor,
    out: Out,
    query: ir.Value,
    keys: Values,
    values: Values,
    mask: ir.Value,
    scale: float,
    softcap: float,
) -> ir.Value:
    """Grouped attention over the runs of the cache and of new rows, which stay as the cache holds
    them.
    """
    _, rows, all_heads, dim = out.shape
    kv_heads = (shape_of(keys[0]) or ())[1]
    assert rows is not None and all_heads and dim and kv_heads
    width = kv_heads * dim
    empty = edit.constant(np.zeros((0, width), np.float32))
    terms = [_by_row(edit, query, (1, rows, all_heads * dim))]
    for past, new, *more in (keys, values):
        terms.append(_by_row(edit, past, (None, width)))
        terms += [_by_row(edit, run, (1, (shape_of(run) or ())[2], width)) for run in (new, *more)]
        terms += [] if more else [empty]
    terms.append(mask)
    form = attention_form(rows, kv_heads, all_heads // kv_heads, dim, scale)
    kind = HALF_TREE_ATTENTION if keys[0].dtype is ir.DataType.FLOAT16 else TREE_ATTENTION
    if softcap:
        kind, form = CAPPED_ATTENTION, form | {"softcap": softcap}
    return edit.reshape(
        None, edit.insert(None, kind, terms, shape_of(terms[0]), out.dtype, form, DOMAIN), out.shape
    )


def _by_row(edit: Editor, heads: ir.Value, shape: Shape) -> ir.Value:
    """``[1, H, R, hd]`` as rows of ``H * hd``."""
    return edit.reshape(None, edit.transpose(None, heads, [0, 2, 1, 3]), shape)


def rotary(
    edit: Editor, out: Out, x: ir.Value, cos: ir.Value, sin: ir.Value, interleaved: bool
) -> ir.Value:
    """Opset 23's RotaryEmbedding on ``[1, R, heads * hd]``; it takes each angle once."""
    _, all_heads, rows, dim = out.shape
    assert all_heads and rows is not None and dim
    flat = edit.reshape(None, edit.transpose(None, x, [0, 2, 1, 3]), (1, rows, all_heads * dim))
    tables = [
        _half(edit, table, slice(0, None, 2) if interleaved else slice(dim // 2))
        for table in (cos, sin)
    ]
    attributes = {"interleaved": int(interleaved), "num_heads": all_heads}
    turned = edit.insert(
        None, "RotaryEmbedding", [flat, *tables], shape_of(flat), out.dtype, attributes
    )
    return edit.transpose(None, edit.reshape(None, turned, (1, rows, all_heads, dim)), [0, 2, 1, 3])


def _half(edit: Editor, angles: ir.Value, columns: slice) -> ir.Value:
    """Rows of a table of angles, with those columns that hold each angle once."""
    gather = angles.producer()
    table = source_of(gather) if gather is not None else None
    content = constant_of(table)
    assert gather is not None and table is not None and content is not None
    half = edit.named(f"{table.name}.half", lambda: np.ascontiguousarray(content[:, columns]))
    shape = (*(shape_of(angles) or ())[:-1], content.shape[1] // 2)
    return edit.insert(None, "Gather", [half, gather.inputs[1]], shape, half.dtype)


def top_k(edit: Editor, out: Out, scores: ir.Value, k: int) -> ir.Value:
    """``[R, V] -> [R, k]``, best first."""
    return edit.reshape(None, cast(edit, out, largest(edit, scores, k)), out.shape)


assert callable(forms.exportable)  # registering the operators is the effect of the import
KNOWN: dict[Callable[..., Any], Translation] = TRANSLATIONS | {
    torch.ops.aten.linear.default: linear,
    torch.ops.ssdevice.heads.default: heads,
    torch.ops.ssdevice.attend.default: attend,
    torch.ops.ssdevice.rotary.default: rotary,
    torch.ops.ssdevice.top_k.default: top_k,
}
"""Operators and their translations."""
EXAMPLE_SIZE = 7
"""Of the dynamic size while tracing; torch treats 0 and 1 as special."""


def trace(form: nn.Module, inputs: Sequence[TensorSpec], outputs: Sequence[str]) -> Editor:
    """The graph of ``form``, a function of these inputs; a string in a shape is the dynamic size.

    Raises UnsupportedModelError for an operator without a translation.
    """
    values = [
        ir.val(one.name, from_torch_dtype(getattr(torch, one.dtype)), _known(one.shape))
        for one in inputs
    ]
    made = ir.Graph(values, [], nodes=[], opset_imports={"": OPSET})
    writer = _Writer(Editor(ir.Model(made, ir_version=IR_VERSION)), form, _record(form, inputs))
    writer.write(values, outputs)
    passes.CommonSubexpressionEliminationPass()(writer.edit.model)
    return writer.edit


def _known(shape: Iterable[Any]) -> Shape:
    return tuple(size if isinstance(size, int) else None for size in shape)


def _record(form: nn.Module, inputs: Sequence[TensorSpec]) -> fx.GraphModule:
    """The operators of one run on fake tensors, in which the dynamic size is a symbol."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    arguments = []
    for spec in inputs:
        example = torch.ones(
            [size if isinstance(size, int) else EXAMPLE_SIZE for size in spec.shape]
        )
        dynamic = [
            DimDynamic.STATIC if isinstance(size, int) else DimDynamic.DUCK for size in spec.shape
        ]
        context: Any = StatelessSymbolicContext(dynamic_sizes=dynamic)
        arguments.append(
            mode.from_tensor(example.to(getattr(torch, spec.dtype)), symbolic_context=context)
        )
    with torch.no_grad(), mode:
        return make_fx(form, pre_dispatch=True, _allow_non_fake_inputs=True)(*arguments)


class _Writer:
    """Walks over recorded operators.

    What an operator gave is a graph value, or a tensor if it is known already.
    """

    def __init__(self, edit: Editor, form: nn.Module, recorded: fx.GraphModule) -> None:
        self.edit = edit
        self.recorded = recorded
        self.names = {
            id(tensor): name
            for name, tensor in chain(form.named_parameters(), form.named_buffers())
        }
        self.known: dict[fx.Node, Any] = {}
        self.constants: dict[int, ir.Value] = {}

    def write(self, inputs: Sequence[ir.Value], outputs: Sequence[str]) -> None:
        waiting = iter(inputs)
        recorded = self.recorded.graph
        for node in recorded.nodes:
            if node.op == "placeholder":
                self.known[node] = next(waiting)
            elif node.op == "get_attr":
                self.known[node] = getattr(self.recorded, node.target)
            elif node.op == "call_function":
                self.known[node] = self._call(node)
        results: Any = recorded.output_node().args[0]
        graph = self.edit.graph
        for name, node in zip(outputs, results, strict=True):
            value = self._value(self.known[node])
            if value.producer() is None or value in graph.outputs:
                value = self.edit.insert(
                    None, "Identity", [value], list(value.shape or ()), value.dtype
                )
            value.name = name
            graph.outputs.append(value)

    def _call(self, node: fx.Node) -> Any:
        given: Any = fx.node.map_arg((node.args, dict(node.kwargs)), lambda used: self.known[used])
        if node.target is operator.getitem:
            return given[0][0][given[0][1]]
        values: list[Any] = []
        fx.node.map_aggregate(
            given, lambda item: values.append(item) if isinstance(item, ir.Value) else None
        )
        if not values:
            with torch.no_grad():
                return node.target(*given[0], **given[1])  # type: ignore[operator]
        if (translation := KNOWN.get(node.target)) is None:  # type: ignore[arg-type]
            raise UnsupportedModelError(
                f"the model's layers call {node.target}, for which there is no ONNX form"
            )
        positional, named = fx.node.map_aggregate(given, self._value)
        made = translation(self.edit, _out(node), *positional, **named)
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            self._refuse_aliases(node)
            self.known[node.args[0]] = made  # type: ignore[index]
        return made

    def _value(self, item: Any) -> Any:
        """Tensors as constants of the graph; weights and tables under their names."""
        if not isinstance(item, Tensor):
            return item
        if id(item) not in self.constants:
            self.constants[id(item)] = self.edit.constant(
                item.detach().numpy(), self.names.get(id(item))
            )
        return self.constants[id(item)]

    def _refuse_aliases(self, node: fx.Node) -> None:
        """An operator in place changes every view of its tensor; only those without any are known
        here.
        """
        changed = node.args[0]
        assert isinstance(changed, fx.Node)
        schema = getattr(changed.target, "_schema", None)
        view = schema is None or any(made.alias_info is not None for made in schema.returns)
        if view or next(iter(changed.users)) is not node:
            raise UnsupportedModelError(
                f"the model's layers call {node.target} on a tensor that has views"
            )


def _out(node: fx.Node) -> Out:
    made = node.meta["val"]
    first = made[0] if isinstance(made, (list, tuple)) else made
    if not isinstance(first, Tensor):  # the dynamic size
        return Out((), ir.DataType.INT64)
    return Out(_known(first.shape), from_torch_dtype(first.dtype))
