"""An ONNX graph while it is written and rewritten, and what is known of its values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from ssdevice.export.weights import Role, Stored

CONTRIB = "com.microsoft"
OPSET = 23
STORED = "ssdevice.stored"
"""Metadata of a graph's weights while it is rewritten: their rows of the model's table."""
Shape = tuple[int | None, ...]


@dataclass
class Marked:
    """A product: the parameters of its columns with their numbers, its rows and what comes out."""

    weights: tuple[tuple[str, int], ...]
    source: ir.Value
    output: ir.Value


class Editor:
    """One graph being rewritten: constants, new nodes, replacements."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.graph = model.graph
        self.products: list[Marked] = []
        self._constants: dict[tuple[bytes, str, tuple[int, ...]], ir.Value] = {}
        self._made = 0

    def constant(self, array: np.ndarray[Any, Any], name: str | None = None) -> ir.Value:
        """An initializer with this content; small equal ones without a name are shared."""
        key = (array.tobytes() if name is None else b"", str(array.dtype), array.shape)
        value = self._constants.get(key) if name is None else None
        if value is None:
            chosen = name or self._name("const")
            value = ir.val(chosen, const_value=ir.Tensor(array, name=chosen))
            if name is None:
                self._constants[key] = value
        elif value.name in self.graph.initializers:
            return value
        self.graph.register_initializer(
            value
        )  # a known one was removed when nothing used it any more
        return value

    def named(self, name: str, content: Callable[[], np.ndarray[Any, Any]]) -> ir.Value:
        """The initializer of this name, which is made for the first node that reads it."""
        known = self.graph.initializers.get(name)
        return known if known is not None else self.constant(content(), name)

    def ints(self, *values: int) -> ir.Value:
        return self.constant(np.array(values, np.int64))

    def insert(
        self,
        before: ir.Node | None,
        kind: str,
        inputs: Sequence[ir.Value | None],
        shape: Sequence[int | None] | None = None,
        dtype: ir.DataType | None = None,
        attributes: dict[str, Any] | None = None,
        domain: str = "",
    ) -> ir.Value:
        """A new node before another (None: at the end); its output, with shape and element type if
        given.
        """
        return self.insert_several(before, kind, inputs, [(shape, dtype)], attributes, domain)[0]

    def insert_several(
        self,
        before: ir.Node | None,
        kind: str,
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[tuple[Sequence[int | None] | None, ir.DataType | None]],
        attributes: dict[str, Any] | None = None,
        domain: str = "",
    ) -> Sequence[ir.Value]:
        """A new node with several outputs; see ``insert``."""
        made = [ir.val(self._name(kind.lower()), dtype, shape) for shape, dtype in outputs]
        node = ir.node(kind, list(inputs), attributes, domain=domain, outputs=made)
        if before is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(before, node)
        return made

    def reshape(self, before: ir.Node | None, value: ir.Value, shape: Shape) -> ir.Value:
        """``value`` with another shape, at most one size unknown; a view of a view is one view."""
        inner = producer(value, "Reshape")
        source = value if inner is None else source_of(inner)
        if shape_of(source) == shape:
            return source
        target = self.ints(*(-1 if size is None else size for size in shape))
        return self.insert(before, "Reshape", [source, target], shape, value.dtype)

    def transpose(self, before: ir.Node | None, value: ir.Value, perm: Sequence[int]) -> ir.Value:
        """``value``, of known rank, with its dimensions in another order: a reshape if that moves
        no data.

        The transpose of a transpose is one, or none.
        """
        if (inner := producer(value, "Transpose")) is not None:
            first = inner.attributes["perm"].as_ints()
            value = source_of(inner)
            perm = [first[d] for d in perm]
        old = shape_of(value)
        assert old is not None
        if list(perm) == list(range(len(old))):
            return value
        shape = tuple(old[d] for d in perm)
        if shape.count(None) < 2 and [d for d in perm if old[d] != 1] == [
            d for d in range(len(old)) if old[d] != 1
        ]:
            return self.reshape(before, value, shape)
        return self.insert(before, "Transpose", [value], shape, value.dtype, {"perm": list(perm)})

    def split(
        self,
        before: ir.Node | None,
        value: ir.Value,
        widths: ir.Value,
        shapes: Sequence[Shape | None],
        axis: int,
    ) -> Sequence[ir.Value]:
        """Pieces of ``value`` along ``axis``, of ``widths``, which may be an input of the graph;
        ``shapes``: theirs.
        """
        outputs = [(shape, value.dtype) for shape in shapes]
        return self.insert_several(before, "Split", [value, widths], outputs, {"axis": axis})

    def replace(self, node: ir.Node, new: ir.Value) -> None:
        """Use ``new`` wherever the only output of ``node`` was used, and remove the node."""
        self.replace_value(node.outputs[0], new)
        self.graph.remove(node, safe=True)

    def replace_value(self, old: ir.Value, new: ir.Value) -> None:
        if None in (shape_of(new) or (None,)):
            new.shape = old.shape
        if new.type is None:
            new.type = old.type
        if old.is_graph_output():
            name = old.name
            old.name = self._name("replaced")
            if new.is_graph_output() or new.producer() is None:
                producer = old.producer()
                assert producer is not None
                new = self.insert(producer, "Identity", [new], None, new.dtype)
                new.shape = old.shape
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
            new.name = name
        else:
            ir.convenience.replace_all_uses_with(old, new)
        for product in self.products:
            product.source = new if product.source is old else product.source
            product.output = new if product.output is old else product.output

    def clean(self) -> None:
        """Remove unused nodes and initializers."""
        passes.RemoveUnusedNodesPass()(self.model)

    def _name(self, stem: str) -> str:
        self._made += 1
        return f"{stem}~{self._made}"


def shape_of(value: ir.Value | None) -> Shape | None:
    """Sizes of a value, None for those unknown until run time; None if the rank is unknown too."""
    if value is None or value.shape is None:
        return None
    return tuple(size if isinstance(size, int) else None for size in value.shape)


def sizes_of(value: ir.Value | None) -> tuple[int, ...] | None:
    """Sizes of a value; None if any is unknown until run time."""
    shape = value.shape if value is not None else None
    return shape.numpy() if shape is not None and shape.is_static() else None


def constant_of(value: ir.Value | None) -> np.ndarray[Any, Any] | None:
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None else tensor.numpy()


def tag(model: ir.Model, table: Mapping[str, Stored]) -> None:
    """Note on the weights of a traced graph, by their names in it, what they are."""
    for name, value in model.graph.initializers.items():
        if name in table:
            value.meta[STORED] = table[name]


def stored_of(value: ir.Value | None) -> Stored | None:
    """The row of a weight in the model's table; None for what no module of the model holds."""
    found: Stored | None = value.meta.get(STORED) if value is not None else None
    return found


def role_of(value: ir.Value | None) -> Role | None:
    """What a weight is; None for what no module of the model holds."""
    found = stored_of(value)
    return found.role if found is not None else None


def source_of(node: ir.Node, index: int = 0) -> ir.Value:
    """An input that a node of its kind always has."""
    value = node.inputs[index]
    assert value is not None
    return value


def producer(value: ir.Value | None, kind: str) -> ir.Node | None:
    """The node that makes a value, if it is of this kind."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == kind else None


def only_user(value: ir.Value, kind: str) -> ir.Node | None:
    """The node that reads a value, if it is the only one and of this kind."""
    users = [use.node for use in value.uses()]
    return users[0] if len(users) == 1 and users[0].op_type == kind else None
