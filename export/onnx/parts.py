"""Which part of the method a node of an exported step works for, told from what depends on what.

=============  =================================================================================================
part           its nodes
=============  =================================================================================================
layers         embedding and layers of the rows to verify; in the fused schedule with all that streams share
head           from the last norm to the model's own tokens
verification   what the accepted tokens and their count need beyond that
streams        layers of the streams; deferred: all of them, fused: what is not shared
stream head    from the streams' last norm to the next draft
rows           what only the cache's new rows need
=============  =================================================================================================
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import NodeProto

from ssdevice.contract import COUNT, NEXT_DRAFTS, ROWS, TOKENS
from ssdevice.export.onnx.nodes import ancestors, makers, show_regions
from ssdevice.runtime.onnx.kernels import INT8_ARGMAX

CHOICES = ("TopK", INT8_ARGMAX)
"""The operators that choose tokens, of the model's own logits and of the streams'."""
NORM = "Norm"
"""In the names of operators that normalize: ``RMSNormalization``, ``LayerNormalization``, our ``AddNorm``."""


def parts_of(file: Path) -> dict[str, str]:
    """The part of every node of a ``step`` graph by node name; empty for a graph that is not built as expected."""
    model = onnx.load(str(file), load_external_data=False)
    show_regions(model)
    maker = makers(model.graph)

    def head(choices: list[NodeProto]) -> list[NodeProto]:
        made = [name for choice in choices for name in choice.output]
        return ancestors(maker, made, stop=lambda node: NORM in node.op_type)

    accepted, drafted = ancestors(maker, [TOKENS, COUNT]), ancestors(maker, [NEXT_DRAFTS])
    known = {node.name for node in accepted}
    own = [node for node in accepted if node.op_type in CHOICES]
    streams = [node for node in drafted if node.op_type in CHOICES and node.name not in known]
    if len(own) != 1 or not streams:
        return {}
    claims = {
        "head": head(own),
        "layers": ancestors(maker, own[0].output),
        "verification": accepted,
        "stream head": head(streams),
        "streams": drafted,
        "rows": ancestors(maker, [ROWS]),
    }
    parts: dict[str, str] = {}
    for part, nodes in claims.items():
        for node in nodes:
            parts.setdefault(node.name, part)
    return parts
