"""What a traced graph needs before it is rewritten: constants folded, repetitions shared, norms as one node."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import optimizer
from onnxscript.rewriter import onnx_fusions


def fold(model: ir.Model) -> None:
    """Fold constants and fuse norms, in place.

    The exporter's own optimizer also tries dozens of general rewrites at every node. They change nothing that the
    rules of ``graph`` do not change as well, and take up to half the time of an export.
    """
    common.InlinePass()(model)
    optimizer.fold_constants(model, onnx_shape_inference=True)
    tidy = ir.passes.Sequential(
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
        common.RemoveUnusedOpsetsPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    )
    tidy(model)
    onnx_fusions.fuse(model)
