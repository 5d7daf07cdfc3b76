"""What a package holds, without running it: operations, weights, states, and known problems.

Warnings are about devices this machine does not have, and each names its source. A report may
concern another chip or system than yours, so a warning says what to measure there; it is not a
verdict.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from ssdevice.mil.reader import Package
from ssdevice.mil.schema import BlobRef, Function, Operation, TensorType

MAX_QUERY_ROWS = 16
STATE_MULTIPLE = 32
BLOCKWISE = "constexpr_blockwise_shift_scale"
PALETTE = "constexpr_lut_to_dense"
DATA = {BLOCKWISE: "data", PALETTE: "indices"}
"""Operations that decompress weights, and their parameter with the data."""

REPORTS = (
    "reports by users of the Neural Engine (coremltools 9, macOS 15 and 26); CPU and GPU were fine"
)
STATES = "github.com/apple/coremltools/issues/2631 (macOS 15, M4); CPU and GPU were fine"
OFFSETS = (
    "github.com/apple/coreai-torch/issues/6; "
    "coremltools' slice_update is compiled by the same compiler"
)
SHARED = "github.com/apple/coremltools/issues/2351"
MIL = "the operation's definition in coremltools 9"
GUIDE = "coremltools guide, typed execution: the Neural Engine computes in float16"


class Warnings(dict[str, dict[str, Any]]):
    """Known problems by a short ``code``.

    Of each the ``first`` in words, their ``count``, and the ``functions`` concerned.
    """

    def add(self, code: str, function: str, subject: str, message: str, source: str) -> None:
        """Enter a problem. ``subject``: the value or weight concerned."""
        first = {
            "code": code,
            "count": 0,
            "functions": [],
            "first": f"{subject}: {message}",
            "source": source,
        }
        group = self.setdefault(code, first)
        group["count"] += 1
        if function not in group["functions"]:
            group["functions"].append(function)


def audit(package: Package) -> dict[str, Any]:
    """A package as plain values. Raises BundleError if a weight cannot be found.

    - ``functions``: by name the number of ``operations``, ``kinds`` with their counts, query
      ``rows`` of the largest attention (for a step its tree and streams), and bytes of the
      ``weights`` that it reads, which it takes if functions are loaded without sharing.
    - ``weights``: by ``form``, such as "float16" or "int4, blocks of 32", the number of ``tensors``
      and ``bytes`` on disk.
    - ``memory``: bytes of all weights, each counted once, of all states, and both together.
    - ``warnings``: see ``Warnings``.
    """
    functions = dict[str, Any]()
    warnings = Warnings()
    states: dict[str, TensorType] = {}
    for name, function in package.functions.items():
        kinds = Counter(operation.kind for operation in function.operations)
        states.update((state, kind) for state, kind in function.inputs if kind.state)
        functions[name] = {
            "operations": kinds.total(),
            "kinds": dict(kinds.most_common()),
            "rows": max((_query_rows(operation) for operation in function.operations), default=0),
            "weights": sum(package.places(function).values()),
        }
        _warn(function, warnings)
    weights = _weights(package)
    stored = sum(group["bytes"] for group in weights)
    state = sum(kind.dtype.bytes(kind.count) for kind in states.values() if kind.dtype is not None)
    if len(functions) > 1:
        most = sum(held["weights"] for held in functions.values())
        text = (
            f"{len(functions)} functions share {stored} bytes of weights on disk; loaded together "
            f"they may take up to {most}: memory has been seen to grow with every function"
        )
        warnings.add("functions-memory", "all functions", "weights", text, SHARED)
    return {
        "specification_version": package.specification_version,
        "functions": functions,
        "weights": weights,
        "memory": {"weights": stored, "state": state, "estimate": stored + state},
        "warnings": list(warnings.values()),
    }


def _weights(package: Package) -> list[dict[str, Any]]:
    """Every place in the weight files once, under the format of the weight it belongs to."""
    forms: dict[BlobRef, str] = {}
    main: set[BlobRef] = set()  # without the scales, offsets and tables of compressed weights
    for function in package.functions.values():
        for operation in function.operations:
            for name, place in _stored_parts(function, operation):
                forms[place] = _form(function, operation)
                if name == DATA[operation.kind]:
                    main.add(place)
    # What no operation decompresses is stored as it is.
    for function in package.functions.values():
        for value in function.constants.values():
            if isinstance(value.data, BlobRef) and value.data not in forms:
                assert value.type.dtype is not None  # a string is never stored, see Package.places
                forms[value.data] = value.type.dtype.name
                main.add(value.data)
    sizes = dict[BlobRef, int]()
    for function in package.functions.values():
        sizes |= package.places(function)
    tensors = Counter(forms[place] for place in main)
    stored = Counter[str]()
    for place, form in forms.items():
        stored[form] += sizes[place]
    return [
        {"form": form, "tensors": tensors[form], "bytes": stored[form]} for form in sorted(stored)
    ]


def _stored_parts(function: Function, operation: Operation) -> Iterator[tuple[str, BlobRef]]:
    """The parameters of a decompression that are in the weight files, and their places."""
    if operation.kind not in DATA:
        return
    for name in operation.inputs:
        value = function.constant(operation, name)
        if value is not None and isinstance(value.data, BlobRef):
            yield name, value.data


def _form(function: Function, operation: Operation) -> str:
    """The format of a compressed weight, in words."""
    data = function.constant(operation, DATA[operation.kind])
    dtype = data.type.dtype.name if data is not None and data.type.dtype is not None else "values"
    if operation.kind == PALETTE:
        return f"palette of {dtype} indices"
    block = _block(function, operation)
    return f"{dtype}, per channel" if block is None else f"{dtype}, blocks of {block}"


def _block(function: Function, operation: Operation) -> int | None:
    """Block size along the input axis, None if a channel has a single scale."""
    data = function.constant(operation, "data")
    scale = function.constant(operation, "scale")
    if data is None or scale is None:
        return None
    sizes = list[int]()
    for size, scales in zip(data.type.shape, scale.type.shape, strict=False):
        if scales not in (0, 1, size):
            sizes.append(size // scales)
    return min(sizes, default=None)


def _warn(function: Function, found: Warnings) -> None:
    """Enter the known problems of a function."""
    for state, value in function.inputs:
        last = value.shape[-2:]
        if value.state and any(size % STATE_MULTIPLE for size in last):
            text = (
                f"its last sizes {list(last)} are not multiples of {STATE_MULTIPLE}; "
                "such a state fails to load"
            )
            found.add("state-size", function.name, state, text, STATES)
    blocks = Counter[str]()
    wide = 0
    for operation in function.operations:
        _warn_of(operation, function, found)
        if operation.kind == BLOCKWISE and _block(function, operation) is not None:
            blocks[_form(function, operation)] += 1
        if operation.kind != "cast" and operation.kind not in DATA:
            for _, kind in operation.outputs:
                if kind.dtype is not None and kind.dtype.name == "float32":
                    wide += 1
    for form, count in blocks.items():
        text = (
            f"{count} weights are {form}, which suits the GPU; "
            "the Neural Engine wants one scale per channel"
        )
        found.add("block-scales", function.name, form, text, REPORTS)
    if wide:
        text = f"{wide} operations return float32, which runs only on the CPU or GPU"
        found.add("wide-type", function.name, "float32", text, GUIDE)


def _warn_of(operation: Operation, function: Function, found: Warnings) -> None:
    """Enter the known problems of one operation."""
    if operation.kind == "slice_update":
        begin = function.constant(operation, "begin")
        end = function.constant(operation, "end")
        if begin is None or end is None:
            text = (
                "slice_update at a run-time offset: loading can crash "
                "(write by mask or scatter instead)"
            )
            found.add("runtime-offset", function.name, operation.output, text, OFFSETS)
    rows = _query_rows(operation)
    if rows > MAX_QUERY_ROWS:
        text = (
            f"attention over {rows} query rows: above {MAX_QUERY_ROWS}, "
            "results differed from run to run"
        )
        found.add("query-rows", function.name, operation.output, text, REPORTS)
    if operation.kind == "reduce_argmax":
        text = "the index that wins a tie is not specified; here it is the lowest"
        found.add("argmax-ties", function.name, operation.output, text, MIL)


def _query_rows(operation: Operation) -> int:
    """Query rows of attention; 0 for other operations.

    Attention is told by a softmax over the last of three or more axes.
    """
    if operation.kind != "softmax" or not operation.outputs:
        return 0
    _, kind = operation.outputs[0]
    if len(kind.shape) < 3:
        return 0
    return kind.shape[-2]
