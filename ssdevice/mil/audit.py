"""What a package holds, without running it: operations, weights by format, states, and known
problems.

Warnings are about devices this machine does not have, and each names its source. A report may
concern another chip or system than yours, so a warning says what to measure there; it is not a
verdict.
"""

from collections import Counter
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
OFFSETS = "github.com/apple/coreai-torch/issues/6; coremltools' slice_update is compiled by the same compiler"
SHARED = "github.com/apple/coremltools/issues/2351"
MIL = "the operation's definition in coremltools 9"
GUIDE = "coremltools guide, typed execution: the Neural Engine computes in float16"


class Warnings(dict[str, dict[str, Any]]):
    """Known problems by a short ``code``: the ``first`` in words, their ``count``, the
    ``functions`` concerned.
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
        group["functions"] += [function] if function not in group["functions"] else []


def audit(package: Package) -> dict[str, Any]:
    """A package as plain values. Raises BundleError if a weight cannot be found.

    ``functions``: by name the number of ``operations``, ``kinds`` with their counts, query ``rows``
    of the largest attention (for a step its tree and streams), and bytes of the ``weights`` that it
    reads, which it takes if functions are loaded without sharing. ``weights``: by ``form``, such as
    "float16" or "int4, blocks of 32", the number of ``tensors`` and ``bytes`` on disk. ``memory``:
    bytes of all weights, each counted once, of all states, and both together. ``warnings``: see
    ``Warnings``.
    """
    functions = dict[str, Any]()
    warnings = Warnings()
    states: dict[str, TensorType] = {}
    for name, function in package.functions.items():
        kinds = Counter(operation.kind for operation in function.operations)
        states.update((state, kind) for state, kind in function.inputs if kind.state)
        rows = max((_query_rows(operation) for operation in function.operations), default=0)
        counts = {"operations": kinds.total(), "kinds": dict(kinds.most_common())}
        functions[name] = {
            **counts,
            "rows": rows,
            "weights": sum(package.places(function).values()),
        }
        _warn(function, warnings)
    weights = _weights(package)
    stored = sum(group["bytes"] for group in weights)
    state = sum(kind.dtype.bytes(kind.count) for kind in states.values() if kind.dtype is not None)
    if len(functions) > 1:
        most = sum(held["weights"] for held in functions.values())
        together = f"loaded together they may take up to {most}: memory has been seen to grow with every function"
        text = f"{len(functions)} functions share {stored} bytes of weights on disk; {together}"
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
            for name in operation.inputs if operation.kind in DATA else ():
                if (value := function.constant(operation, name)) is not None and isinstance(
                    value.data, BlobRef
                ):
                    forms[value.data] = _form(function, operation)
                    main |= {value.data} if name == DATA[operation.kind] else set()
    for function in package.functions.values():
        for value in function.constants.values():
            if (
                isinstance(value.data, BlobRef)
                and value.type.dtype is not None
                and value.data not in forms
            ):
                forms[value.data] = value.type.dtype.name
                main.add(value.data)
    sizes = {
        place: size
        for function in package.functions.values()
        for place, size in package.places(function).items()
    }
    tensors = Counter(forms[place] for place in main)
    stored = Counter[str]()
    for place, form in forms.items():
        stored[form] += sizes[place]
    return [
        {"form": form, "tensors": tensors[form], "bytes": stored[form]} for form in sorted(stored)
    ]


def _form(function: Function, operation: Operation) -> str:
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
    pairs = zip(data.type.shape, scale.type.shape, strict=False)
    return min(
        (size // scales for size, scales in pairs if scales not in (0, 1, size)), default=None
    )


def _warn(function: Function, found: Warnings) -> None:
    """Enter the known problems of a function."""
    name = function.name
    wide = Counter[str]()
    blocks = Counter[str]()
    for kind, dims in ((key, value.shape[-2:]) for key, value in function.inputs if value.state):
        if any(size % STATE_MULTIPLE for size in dims):
            text = f"its last sizes {list(dims)} are not multiples of {STATE_MULTIPLE}; such a state fails to load"
            found.add("state-size", name, kind, text, STATES)
    for operation in function.operations:
        if operation.kind == BLOCKWISE and _block(function, operation) is not None:
            blocks[_form(function, operation)] += 1
        offsets = [function.constant(operation, side) for side in ("begin", "end")]
        if operation.kind == "slice_update" and None in offsets:
            text = "slice_update at a run-time offset: loading can crash (write by mask or scatter instead)"
            found.add("runtime-offset", name, operation.output, text, OFFSETS)
        if (rows := _query_rows(operation)) > MAX_QUERY_ROWS:
            text = f"attention over {rows} query rows: above {MAX_QUERY_ROWS}, results differed from run to run"
            found.add("query-rows", name, operation.output, text, REPORTS)
        if operation.kind == "reduce_argmax":
            text = "the index that wins a tie is not specified; here it is the lowest"
            found.add("argmax-ties", name, operation.output, text, MIL)
        if operation.kind not in ("cast", *DATA):
            wide.update(
                kind.dtype.name
                for _, kind in operation.outputs
                if kind.dtype and kind.dtype.name == "float32"
            )
    for form, count in blocks.items():
        text = f"{count} weights are {form}, which suits the GPU; the Neural Engine wants one scale per channel"
        found.add("block-scales", name, form, text, REPORTS)
    for dtype, count in wide.items():
        text = f"{count} operations return {dtype}, which runs only on the CPU or GPU"
        found.add("wide-type", name, dtype, text, GUIDE)


def _query_rows(operation: Operation) -> int:
    """Query rows of attention, which are those of a softmax over the last of three or more axes; 0
    for others.
    """
    shape = (
        operation.outputs[0][1].shape if operation.kind == "softmax" and operation.outputs else ()
    )
    return shape[-2] if len(shape) >= 3 else 0
