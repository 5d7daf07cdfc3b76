"""What the lowering skips changes nothing: a pass sees the results that it would have computed."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.utils.fuser_utils import validate_partition

pytest.importorskip("executorch")

from ssdevice.export.executorch.speed import Dependencies, quick


class Sums(nn.Module):
    """``[4, 6] -> [4, 1]``, with a product to decompose."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x)).sum(-1, keepdim=True)


def found(module: GraphModule, name: str) -> Node:
    return next(
        node
        for node in module.graph.nodes
        if node.op == "call_function" and name in str(node.target)
    )


def test_a_program_is_decomposed_once() -> None:
    table = torch.export.default_decompositions()
    with quick():
        program = torch.export.export(Sums().eval(), (torch.ones(4, 6),), strict=False)
        assert program.run_decompositions({}) is program
        once = program.run_decompositions(table)
        assert once is not program and once.run_decompositions(table) is once


def test_results_are_kept_until_an_input_changes() -> None:
    from executorch.exir.pass_base import ExportPass

    program = torch.export.export(
        Sums().eval(), (torch.ones(4, 6),), strict=False
    ).run_decompositions()
    with quick():
        first = ExportPass()(program.graph_module).graph_module
        again = ExportPass()(first).graph_module
        assert found(again, "relu").meta["val"] is found(first, "relu").meta["val"]
        total = found(again, "sum")
        total.args = (total.args[0], [0], True)
        changed = ExportPass()(again).graph_module
    assert tuple(found(changed, "sum").meta["val"].shape) == (1, 6)
    assert found(changed, "relu").meta["val"] is found(first, "relu").meta["val"]


def test_partitions_merge_where_a_walk_through_the_graph_says_so() -> None:
    chance = random.Random(5)
    answers = set()
    for _ in range(20):
        graph = Graph()
        nodes = [graph.placeholder("x")]
        for _ in range(24):
            nodes.append(graph.call_function(torch.add, tuple(chance.choices(nodes[-6:], k=2))))
        graph.output(nodes[-1])
        dependencies = Dependencies(GraphModule(nn.Module(), graph))
        one = [nodes[1]]
        for node in chance.sample(nodes[2:], 12):
            merged = dependencies.closed([*one, node])
            assert merged == validate_partition([*one, node])
            if merged:
                one.append(node)
            answers.add(merged)
    assert answers == {True, False}
