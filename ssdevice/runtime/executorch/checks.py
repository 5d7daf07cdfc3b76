"""What ExecuTorch takes on trust in a program: for a wrong index or kind of value it ends the
process.

Its own verifier checks that every offset of the flatbuffer stays in the file, not what the numbers
mean.
"""

import importlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from ssdevice.runtime.executorch import file as program
from ssdevice.runtime.executorch.file import DELEGATE, KERNEL, Data, Table, read_program, segment

NULL = 1
INT = 2
BOOL = 3
DOUBLE = 4
TENSOR = 5
STRING = 6
INTS = 7
DOUBLES = 8
BOOLS = 9
TENSORS = 10
OPTIONAL_TENSORS = 11
"""Members of the union KernelTypes, see ``schema/program.fbs``."""
ITEM_BYTES = {0: 1, 1: 1, 2: 2, 3: 4, 4: 8, 5: 2, 6: 4, 7: 8, 11: 1, 15: 2}
"""ExecuTorch's ScalarType -> bytes of an element, for the types that its kernels take."""
MAX_BYTES = 1 << 40
PADDING = 1 << 16
"""Bytes that a method's memory may have beyond its tensors: ExecuTorch's planner aligns it and adds
a little.
"""
MAX_DIMENSIONS = 6
"""XNNPACK's limit."""
GRAPH_FLOATS = {1: 6, 2: 5}
"""XNNPACK's datatypes that are no quantized ones -> ExecuTorch's ScalarType."""
KINDS = {
    "TensorType": {TENSOR},
    "IntType": {INT},
    "BoolType": {BOOL},
    "FloatType": {DOUBLE},
    "NumberType": {INT, BOOL, DOUBLE},
    "StringType": {STRING},
}
LISTS = {
    "IntType": {INTS},
    "BoolType": {BOOLS},
    "FloatType": {DOUBLES},
    "TensorType": {TENSORS},
    "OptionalType": {OPTIONAL_TENSORS, TENSORS},
}


def check_program(file: Path) -> None:
    """Raise BundleError for a program with numbers that contradict each other."""

    def check(data: Data, root: Table) -> None:
        plans = [_Plan(data, root, plan) for plan in root.tables(1)]
        for plan in plans:
            plan.check()
        _check_memory(plans)

    read_program(file, check)


@dataclass(frozen=True)
class _Plan:
    """A method of a program. What it finds wrong is a ValueError."""

    data: Data
    root: Table
    plan: Table

    def check(self) -> None:
        values = list(self.plan.tables(2))
        kinds = [entry.byte(0) for entry in values]
        for place, entry in enumerate(values):
            self._value(place, entry, kinds)
        for number in (3, 4):  # inputs, outputs
            _within(f"{self.plan.text(0)}: a value", self.plan.integers(number), len(kinds))
        operators = [(entry.text(0), entry.text(1)) for entry in self.plan.tables(6)]
        outer = [self._delegate(entry) for entry in self.plan.tables(7)]
        for instruction in program.instructions(self.plan):
            kind = instruction.byte(0)
            call = instruction.table(1)
            if kind not in (KERNEL, DELEGATE):
                raise ValueError(
                    f"{self.plan.text(0)}: an instruction of kind {kind}, "
                    "which programs of ssdevice lack"
                )
            arguments = call.integers(1)
            _within(f"{self.plan.text(0)}: an argument", arguments, len(kinds))
            if kind == DELEGATE:
                _within(f"{self.plan.text(0)}: a delegate", [call.integer(0)], len(outer))
                self._delegated(outer[call.integer(0)], [values[place] for place in arguments])
                continue
            _within(f"{self.plan.text(0)}: an operator", [call.integer(0)], len(operators))
            _check_call(operators[call.integer(0)], [kinds[place] for place in arguments])
            _check_ranks(operators[call.integer(0)][0], [values[place] for place in arguments])

    def _delegate(self, entry: Table) -> list[Table]:
        """The tensors that a graph of XNNPACK takes and gives; none for another delegate.

        Checks where the graph finds its constants. What its nodes say is left to XNNPACK.
        """
        if entry.text(0) == program.COREML:
            return []
        graph = program.Graph(entry, self.data, self.root)
        for number in range(1, len(graph.constants)):  # the first stands for no constant
            graph.place(number)
        tensors = {name: tensor for name, (tensor, _) in graph.values.items()}
        places = [tensor.integer(3) for tensor in tensors.values()]
        _within("a constant of XNNPACK", places, max(len(graph.constants), 1))
        names = [*graph.root.integers(4, "I"), *graph.root.integers(5, "I")]
        missing = set(names) - set(tensors)
        if missing:
            raise ValueError(
                f"a graph of XNNPACK takes or gives the value {min(missing)}, "
                "which it does not have"
            )
        return [tensors[name] for name in names]

    def _delegated(self, outer: Sequence[Table], arguments: Sequence[Table]) -> None:
        """Raise ValueError for a call of a graph of XNNPACK with other tensors than it declares.

        XNNPACK writes its results before ExecuTorch compares their sizes.
        """
        what = f"{self.plan.text(0)}: a call of XNNPACK"
        for inner in outer:
            _within(what, [inner.integer(4)], len(arguments))
            value = arguments[inner.integer(4)]
            sizes = inner.integers(2, "I")
            if value.byte(0) != TENSOR:
                raise ValueError(f"{what} has a value of kind {value.byte(0)} for a tensor")
            if len(sizes) != inner.integer(1) or len(sizes) > MAX_DIMENSIONS:
                raise ValueError(
                    f"{what} takes a tensor of {inner.integer(1)} dimensions, it has {len(sizes)}"
                )
            given = value.table(1)
            found = prod(given.integers(2)), given.byte(0)
            expected = prod(sizes), GRAPH_FLOATS.get(inner.byte(0), given.byte(0))
            if found != expected:
                raise ValueError(
                    f"{what} has a tensor of (elements, type) {found}, expected {expected}"
                )

    def _value(self, place: int, entry: Table, kinds: Sequence[int]) -> None:
        kind = kinds[place]
        what = f"{self.plan.text(0)}: value {place}"
        if kind not in range(NULL, OPTIONAL_TENSORS + 1):
            raise ValueError(f"{what} is of kind {kind}")
        value = entry.table(1)
        if kind == TENSOR:
            self._tensor(what, value)
        elif kind == INTS:
            _within(what, value.integers(0, "q"), len(kinds))
            if any(kinds[item] != INT for item in value.integers(0, "q")):
                raise ValueError(f"{what} lists a value that is no number")
        elif kind in (TENSORS, OPTIONAL_TENSORS):
            items = [item for item in value.integers(0) if item != -1 or kind == TENSORS]
            possible = (TENSOR,) if kind == TENSORS else (TENSOR, NULL)
            _within(what, items, len(kinds))
            if any(kinds[item] not in possible for item in items):
                raise ValueError(f"{what} lists a value that is no tensor")

    def _tensor(self, what: str, tensor: Table) -> None:
        sizes = tensor.integers(2)
        order = list(tensor.octets(3))
        if any(size < 0 for size in sizes) or sorted(order) != list(range(len(sizes))):
            raise ValueError(f"{what} has sizes {str(sizes)[:60]} in order {str(order)[:60]}")
        if tensor.byte(0) not in ITEM_BYTES:
            raise ValueError(f"{what} has elements of type {tensor.byte(0)}")
        size = prod(sizes) * ITEM_BYTES[tensor.byte(0)]
        if size > MAX_BYTES:
            raise ValueError(f"{what} has {size} bytes")
        room = self._room(tensor)
        if room is not None and size > room:
            raise ValueError(f"{what} has {size} bytes, in its place are {max(room, 0)}")

    def _room(self, tensor: Table) -> int | None:
        """Bytes from a tensor's first to the end of its buffer or segment.

        None for a tensor without a place.
        """
        buffer = tensor.integer(5)
        if tensor.has(6):
            where = tensor.table(6)
            sizes = self.plan.integers(8, "q")
            _within("a tensor's buffer", [where.integer(0)], len(sizes))
            return sizes[where.integer(0)] - _offset(where)
        if not buffer or not self.root.has(5):
            return None
        constants = self.root.table(5)
        segments = list(self.root.tables(4))
        offsets = constants.integers(1, "Q")
        _within("a constant", [buffer], len(offsets))
        _within("the segment of constants", [constants.integer(0)], len(segments))
        return segment(self.data, segments[constants.integer(0)])[1] - offsets[buffer]


def _check_memory(plans: Sequence[_Plan]) -> None:
    """Raise ValueError for a method with more memory than tensors take.

    ExecuTorch allocates what is asked for. Methods that share a cache all have memory for the whole
    of it, so the tensors of all methods count.
    """
    ends = Counter[int]()
    for plan in plans:
        for entry in plan.plan.tables(2):
            if entry.byte(0) == TENSOR and entry.table(1).has(6):
                tensor = entry.table(1)
                where = tensor.table(6)
                end = _offset(where) + prod(tensor.integers(2)) * ITEM_BYTES[tensor.byte(0)]
                ends[where.integer(0)] = max(ends[where.integer(0)], end)
    taken = sum(ends.values())
    for plan in plans:
        sizes = plan.plan.integers(8, "q")
        if min(sizes, default=0) < 0 or sum(sizes) > taken + PADDING:
            raise ValueError(
                f"{plan.plan.text(0)}: memory of {str(sizes)[:60]} bytes, its tensors take {taken}"
            )


def _offset(where: Table) -> int:
    """Where a tensor begins in its buffer, from its AllocationDetails."""
    return where.integer(1) | where.integer(2) << 32


def _within(what: str, numbers: Sequence[int], count: int) -> None:
    for number in numbers:
        if not 0 <= number < count:
            raise ValueError(f"{what} has the index {number} of {count}")


def _check_call(operator: tuple[str, str], kinds: Sequence[int]) -> None:
    """Raise ValueError for a call of a kernel with values that its operator does not take."""
    expected = _arguments(*operator)
    if expected is None:
        return
    if len(kinds) != len(expected):
        raise ValueError(f"{operator[0]} takes {len(expected)} values, a call has {len(kinds)}")
    for kind, possible in zip(kinds, expected, strict=True):
        if possible and kind not in possible:
            raise ValueError(
                f"{operator[0]} is called with a value of kind {kind}, expected {sorted(possible)}"
            )


def _check_ranks(operator: str, arguments: Sequence[Table]) -> None:
    """Raise ValueError for rows with other dimensions than the cache that they are written to.

    The kernel would abort.
    """
    if operator == "aten::index_put_":
        cache = len(arguments[0].table(1).integers(2))
        rows = len(arguments[2].table(1).integers(2))
        if rows != cache:
            raise ValueError(f"{operator} writes a tensor of {rows} dimensions into one of {cache}")


@cache
def _arguments(name: str, overload: str) -> list[set[int]] | None:
    """The kinds that arguments and results of an operator may have.

    None for an operator that torch does not know.
    """
    torch: Any = importlib.import_module("torch")
    try:
        known = torch._C._jit_get_schemas_for_operator(name)
    except RuntimeError as error:
        raise ValueError(f"an operator called {name[:60]!r}") from error
    for schema in known:
        if schema.overload_name == overload:
            # An operator that fills a list returns nothing; ExecuTorch lists the list once more.
            results = schema.returns or [value for value in schema.arguments if value.is_out]
            return [set(_kinds(value.type)) for value in (*schema.arguments, *results)]
    return None


def _kinds(kind: Any) -> Iterator[int]:
    """The kinds of values for a type of TorchScript; none for an unknown type."""
    if kind.kind() == "OptionalType":
        yield NULL
        yield from _kinds(kind.getElementType())
    elif kind.kind() == "ListType":
        yield from LISTS.get(kind.getElementType().kind(), ())
    else:
        yield from KINDS.get(kind.kind(), ())
