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

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssdevice.contract import COUNT, NEXT_DRAFTS, ROWS, TOKENS
from ssdevice.errors import MissingExtraError

if TYPE_CHECKING:
    import onnx

CHOICE = "TopK"
"""The operator that makes tokens of logits, of the model's own and of the streams'."""
NORM = "Normalization"
PARTS = ("layers", "head", "verification", "streams", "stream head", "rows")


def parts_of(file: Path) -> dict[str, str]:
    """The part of every node of a ``step`` graph by node name; empty for a graph that is not built as expected.

    Raises MissingExtraError without the onnx package.
    """
    try:
        import onnx
    except ModuleNotFoundError as error:
        raise MissingExtraError("export", "onnx") from error
    graph = onnx.load(str(file), load_external_data=False).graph
    maker = {output: node for node in graph.node for output in node.output}

    def behind(outputs: Iterable[str], stop: Callable[[Any], bool] = lambda _: False) -> dict[str, onnx.NodeProto]:
        """Nodes that values depend on, by name; not beyond nodes where ``stop``."""
        found: dict[str, onnx.NodeProto] = {}
        waiting = list(outputs)
        while waiting:
            node = maker.get(waiting.pop())
            if node is not None and node.name not in found:
                found[node.name] = node
                waiting += () if stop(node) else node.input
        return found

    def head(choice: onnx.NodeProto) -> dict[str, onnx.NodeProto]:
        return behind(choice.output, stop=lambda node: NORM in node.op_type)

    accepted, drafted = behind([TOKENS, COUNT]), behind([NEXT_DRAFTS])
    own = [node for node in accepted.values() if node.op_type == CHOICE]
    streams = [node for name, node in drafted.items() if node.op_type == CHOICE and name not in accepted]
    if len(own) != 1 or len(streams) != 1:
        return {}
    claims = {
        "head": head(own[0]),
        "layers": behind(own[0].output),
        "verification": accepted,
        "stream head": head(streams[0]),
        "streams": drafted,
        "rows": behind([ROWS]),
    }
    parts: dict[str, str] = {}
    for part, nodes in claims.items():
        for name in nodes:
            parts.setdefault(name, part)
    return parts
