"""Faster partitions of a lowering: what ExecuTorch 1.4 does in a time that grows with the square of a graph's length.

The partitions, and so the delegates, are the same.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import reduce
from operator import or_
from typing import Any
from unittest.mock import patch

from torch.fx import GraphModule, Node


class Dependencies:
    """Which nodes of a graph depend on which, as integers with a bit for each node: sets that are quickly united.

    Two partitions may become one if no node outside both is used by them and uses them, directly or not; otherwise
    the delegate would need its own results.
    """

    def __init__(self, module: GraphModule) -> None:
        self.bit = {node: 1 << number for number, node in enumerate(module.graph.nodes)}
        self.upstream: dict[Node, int] = {}
        for node in module.graph.nodes:
            self.upstream[node] = self._united(self.bit[one] | self.upstream[one] for one in node.all_input_nodes)
        self._known: dict[Any, tuple[int, int, int, int]] = {}

    def mergeable(self, one: Any, other: Any) -> bool:
        """Whether two partitions may become one. If so they are taken to be merged into the first."""
        both, used_by, upstream = (a | b for a, b in zip(self._masks(one), self._masks(other), strict=True))
        if used_by & ~both & upstream:
            return False
        self._known[one.id] = (len(one.nodes) + len(other.nodes), both, used_by, upstream)
        return True

    def _masks(self, partition: Any) -> tuple[int, int, int]:
        """The nodes of a partition, those that use them, and those that they depend on."""
        size, *masks = self._known.get(partition.id, (0, 0, 0, 0))
        if size != len(partition.nodes):
            masks = [
                self._united(self.bit[node] for node in partition.nodes),
                self._united(self.bit[user] for node in partition.nodes for user in node.users),
                self._united(self.upstream[node] for node in partition.nodes),
            ]
            self._known[partition.id] = (len(partition.nodes), masks[0], masks[1], masks[2])
        return masks[0], masks[1], masks[2]

    @staticmethod
    def _united(masks: Iterable[int]) -> int:
        return reduce(or_, masks, 0)


@contextmanager
def partitions_merged_by_masks() -> Iterator[None]:
    """Each pair of partitions is compared by a few operations on integers instead of a walk through the graph."""
    from executorch.exir.backend.canonical_partitioners import group_partitioner
    from torch.fx.passes.infra import partitioner

    def mergeable(self: Any, one: int, other: int, partitions: Any) -> bool:
        dependencies: Dependencies = self.dependency_viewer
        return dependencies.mergeable(partitions[one], partitions[other])

    with (
        patch.object(partitioner, "_DependencyViewer", lambda _: None),  # of the base class, which is not asked
        patch.object(group_partitioner, "_DependencyViewer", Dependencies),
        patch.object(group_partitioner.GroupBasedPartitioner, "_can_merge_partitions", mergeable),
    ):
        yield
