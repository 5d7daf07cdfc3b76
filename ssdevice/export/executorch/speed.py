"""Faster lowering: skips work that ExecuTorch 1.4 does for other kinds of models.

The resulting program has the same operators. A lowering is a long row of passes over a graph of
thousands of operators. Most of them trace the graph anew, at about a millisecond for each operator,
whether or not they change anything.

Each part says how much more CPU time lowering takes without it (four layers of SmolLM2, INT8,
ExecuTorch 1.4.1), or its share in a profile of 30 layers without it. A part goes with the first
release of ExecuTorch that exports SmolLM2 in INT8 within 4 minutes on two cores without it.
"""

import copy
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import reduce
from operator import or_
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch.fx.traceback
from torch._C import DispatchKey
from torch._subclasses import FakeTensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_flatten

from ssdevice.export.quiet import quiet

# Passes of the XNNPACK backend for operators that a step never has: convolutions, batch norms,
# PReLU, resized images, fused attention and operators with several results. Lowering takes 41 %
# more CPU time with them.
NEEDLESS = (
    "ConvertToUpsampleBilinear2d",
    "ConvertToSDPAPass",
    "ConstPropPass",
    "FuseBatchNormPass",
    "DecomposeBatchNorm",
    "RemoveGetItemPass",
    "InsertPadQDQPass",
    "Conv1dUnsqueezePass",
    "PReLUReshapePass",
    "ChannelsLastTaggedReshapePass",
)
RESULT_OF = "ssdevice_result_of"
"""Metadata of a node: the operator and the inputs of which its value is the result."""


class Origin(torch.fx.traceback.NodeSource):
    """The origin of a node without its history, which every pass copies and nests more deeply (11 %
    of 30 layers).
    """

    def __init__(self, node: Node | None, pass_name: str = "", action: Any = None) -> None:
        super().__init__(None, pass_name, action)
        if node is not None:
            self.node_info = self.NodeInfo(node.name, str(node.target), id(node.graph))


class Dependencies:
    """Which nodes of a graph depend on which, as integers with a bit for each node: sets that are
    quickly united.

    ExecuTorch holds them as sets of nodes, and walks through the graph for each pair of partitions:
    11 % of 30 layers, and about 0.6 GB (three such sets, in a chain of 3000 nodes).
    """

    def __init__(self, module: GraphModule) -> None:
        self.bit = {node: 1 << number for number, node in enumerate(module.graph.nodes)}
        self.upstream: dict[Node, int] = {}
        for node in module.graph.nodes:
            self.upstream[node] = _united(
                self.bit[one] | self.upstream[one] for one in node.all_input_nodes
            )

    def closed(self, nodes: Collection[Node]) -> bool:
        """Whether no other node is used by these and uses them, directly or not, so that they may
        be one delegate.
        """
        inside = _united(self.bit[node] for node in nodes)
        used_by = _united(self.bit[user] for node in nodes for user in node.users)
        return not used_by & ~inside & _united(self.upstream[node] for node in nodes)


def _united(masks: Iterable[int]) -> int:
    return reduce(or_, masks, 0)


@contextmanager
def quick() -> Iterator[None]:
    """In this context graphs are traced and lowered without messages, and without the work
    described above.
    """
    from executorch.backends.xnnpack import xnnpack_preprocess
    from executorch.backends.xnnpack.partition.config import xnnpack_config
    from executorch.exir.backend.canonical_partitioners import group_partitioner
    from torch.fx.passes.infra import partitioner

    manager: Any = xnnpack_preprocess.XNNPACKPassManager

    def needed(program: Any, passes: Any = None) -> Any:
        made = manager(program, passes=passes)
        made.passes = [one for one in made.passes if one.__name__ not in NEEDLESS]
        return made

    def mergeable(self: Any, one: int, other: int, partitions: Any) -> bool:
        dependencies: Dependencies = self.dependency_viewer
        return dependencies.closed([*partitions[one].nodes, *partitions[other].nodes])

    with (
        quiet("executorch", "torch.export", "torchao", "root"),
        # XNNPACK refuses run-time sizes, because it does not support empty tensors. Here the only
        # such size is that of the visible cache, which has at least one row.
        patch.object(xnnpack_config, "has_free_unbacked_symbols", lambda _: False),
        patch.object(xnnpack_preprocess, "XNNPACKPassManager", needed),
        patch.object(
            partitioner, "_DependencyViewer", lambda _: None
        ),  # of the base class, which is not asked
        patch.object(group_partitioner, "_DependencyViewer", Dependencies),
        patch.object(group_partitioner.GroupBasedPartitioner, "_can_merge_partitions", mergeable),
        patch.object(torch.fx.traceback, "NodeSource", Origin),
        _decomposed_once(),
        _results_kept(),
        _weights_shared(),
    ):
        yield


def _decomposed_once() -> AbstractContextManager[Any]:
    """A program is traced anew only if it has operators to decompose (56 % more CPU time without).

    The lowering asks three times: for no operator, to make a program functional; for those that the
    partitioner does not take, which does that as well; and for all others.
    """
    decompose = ExportedProgram.run_decompositions

    def needed(self: ExportedProgram, table: Any = None, **options: Any) -> ExportedProgram:
        found = {node.target for node in self.graph.nodes if node.op == "call_function"}
        if table is None or (
            table and any(target in table or _composite(target) for target in found)
        ):
            traced: ExportedProgram = decompose(self, table, **options)
            return traced
        return self

    return patch.object(ExportedProgram, "run_decompositions", needed)


def _composite(target: Any) -> bool:
    """Whether tracing replaces an operator by others even if no table names it: one that mutates,
    or torchao's.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target._schema.is_mutable or target.has_kernel_for_dispatch_key(
        DispatchKey.CompositeImplicitAutograd
    )


@contextmanager
def _results_kept() -> Iterator[None]:
    """A pass takes the result of an operator from the last pass, if the inputs are the same (88 %
    more without).
    """
    from executorch.exir.delegate import executorch_call_delegate
    from executorch.exir.dialects.edge._ops import EdgeOpOverload
    from executorch.exir.pass_base import _ExportPassBase

    fx = _ExportPassBase._fx
    call = Interpreter.call_function

    def call_function(self: Any, target: Any, args: Any, kwargs: Any) -> Any:
        if (meta := getattr(self, "meta", None)) is None:  # another interpreter than that of a pass
            return call(self, target, args, kwargs)
        operator = target._op if isinstance(target, EdgeOpOverload) else target
        self.inputs = inputs = (operator, *tree_flatten((args, kwargs))[0])
        known = meta.get(RESULT_OF, ())
        value = meta.get("val")
        # A delegate would be interpreted, operator by operator.
        if operator is executorch_call_delegate or (
            len(known) == len(inputs) and all(map(_same, known, inputs))
        ):
            return value
        result = call(self, target, args, kwargs)
        return (
            value if _alike(result, value) else result
        )  # then what reads it has the same inputs as before

    def keep(self: Any, kind: str, target: Any, args: Any, kwargs: Any, meta: Any) -> Any:
        self.interpreter.meta = meta.data
        made = fx(self, kind, target, args, kwargs, meta)
        if kind == "call_function":
            made.node.meta[RESULT_OF] = self.interpreter.inputs
        return made

    with (
        patch.object(_ExportPassBase, "_fx", keep),
        patch.object(Interpreter, "call_function", call_function),
    ):
        yield


def _same(one: Any, other: Any) -> bool:
    plain = (int, float, str, torch.device)
    return one is other or (type(one) is type(other) and isinstance(one, plain) and one == other)


def _alike(one: Any, other: Any) -> bool:
    """Whether two fake tensors say the same: static shapes, and no values."""
    if not all(isinstance(each, FakeTensor) and each.constant is None for each in (one, other)):
        return False
    static = all(isinstance(size, int) for size in (*one.shape, *other.shape))
    return (
        static
        and len({(each.dtype, each.device, each.shape, each.stride()) for each in (one, other)})
        == 1
    )


@contextmanager
def _weights_shared() -> Iterator[None]:
    """A delegate's program is lowered with the weights themselves, not with a copy, and functions
    share their bytes.
    """
    from executorch.exir._serialize._named_data_store import NamedDataStore
    from executorch.exir.backend import backend_api

    def copied(what: Any, memo: Any = None) -> Any:
        if isinstance(what, ExportedProgram):
            memo = {
                id(tensor): tensor
                for tensor in (*what.state_dict.values(), *what.constants.values())
            }
        return copy.deepcopy(what, memo)

    add = NamedDataStore.add_named_data
    held: dict[str, bytes] = {}

    def shared(self: Any, key: str, data: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(data, bytes):
            data = held.setdefault(key, data)  # XNNPACK's keys are hashes of the data
        add(self, key, data, *args, **kwargs)

    with (
        patch.object(backend_api, "copy", SimpleNamespace(deepcopy=copied, copy=copy.copy)),
        patch.object(NamedDataStore, "add_named_data", shared),
    ):
        yield
