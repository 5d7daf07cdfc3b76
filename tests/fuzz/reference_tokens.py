"""What an adapter decodes on its base in torch, as the export's reference does."""

from __future__ import annotations

from pathlib import Path

CONTEXT = 96
PROMPT = (5, 17, 33, 8)
COUNT = 6


def tokens(base: Path, adapter: Path) -> list[int]:
    """Greedy tokens after PROMPT with the streams' drafts verified, and the last drafts; raises
    SSDeviceError.
    """
    from ssdevice.config import Schedule
    from ssdevice.model.loading import load
    from ssdevice.tree import Tree
    from tests.model.reference import Reference

    model = load(base, adapter, CONTEXT).model
    tree = Tree.of([[0], [1]]) if model.gamma else Tree.root_only()
    decoder = Reference(model, tree, 2, Schedule.DEFERRED, CONTEXT, chunk=8)
    cache = decoder.new_cache()
    _, drafts = decoder.start(PROMPT, cache)
    return [*decoder.plain(PROMPT, COUNT).tokens, *(int(draft) for draft in drafts.flatten())]
