"""Hostile graphs for the kernels, under AddressSanitizer and UBSan: ``python -m
tests.fuzz.operators --count 10000``.

A process tries one graph after the other (operator_graphs.py, sanitized.py). Each must be refused,
by ONNX Runtime or by the kernel, or give outputs. What is counted is how often each kernel was
reached: it ran, or refused by itself.
"""

from __future__ import annotations

import sys

import numpy as np

from tests.fuzz import sanitized
from tests.fuzz.operator_graphs import Node, hostile

MODULE = "tests.fuzz.operators"
UNWRITTEN = "unwritten"
"""Outcome: onnx refuses to write the graph."""
BEFORE = "refused-before"
"""Outcome: the graph or the node was refused before a kernel saw it."""


def ran(kind: str) -> str:
    """Outcome: a graph with this operator gave outputs."""
    return f"{kind}:ran"


def refused(kind: str) -> str:
    """Outcome: the kernel of this operator refused its node or inputs."""
    return f"{kind}:refused"


def outcome(library: str, node: Node) -> str:
    """What comes of a graph, in one line."""
    import onnxruntime as ort

    try:
        model = node.model()
    except Exception as error:
        return f"{UNWRITTEN} {error}".split("\n")[0]
    try:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.register_custom_ops_library(library)
        session = ort.InferenceSession(model, options)
        feeds = node.feeds()
        for fill in (None, np.nan, np.inf):
            for name, array in feeds.items():
                if fill is not None and array.dtype.kind == "f":
                    feeds[name] = np.full_like(array, fill)
            for output in session.run(None, feeds):
                np.asarray(output).tobytes()
    except Exception as error:  # the bindings derive their errors from Exception itself
        said = str(error).split("\n")[0]
        # A kernel's messages begin with its name; those of schemas do not.
        return f"{refused(node.kind) if f'{node.kind}: ' in said else BEFORE} {said}"
    return ran(node.kind)


def answer(library: str, seed: int, first: int, end: int) -> None:
    """Try cases and print a line for each."""
    import onnxruntime as ort

    ort.set_default_logger_severity(4)
    for index in range(first, end):
        print(outcome(library, hostile(seed, index)), flush=True)


if __name__ == "__main__":
    sys.exit(sanitized.main(MODULE, "operators", answer))
