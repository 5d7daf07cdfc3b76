"""Turns the modules of the step into one ExecuTorch program: trace, lower to XNNPACK, plan the
memory.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.exc import UserError
from torch.export import ExportedProgram

from ssdevice.bundle.manifest import SCHEMA_VERSION
from ssdevice.contract import FunctionSpec, Geometry
from ssdevice.errors import UnsupportedModelError
from ssdevice.export.executorch.graph import Products, delegation, tidy, worthwhile, write_last
from ssdevice.export.executorch.slots import untouch
from ssdevice.export.executorch.state import VisibleForm
from ssdevice.export.executorch.target import ExecutorchOptions
from ssdevice.export.parity.traced import Programs
from ssdevice.export.plan import ExportPlan
from ssdevice.export.state_form import example_inputs
from ssdevice.model.step import StreamModel
from ssdevice.runtime.executorch.program import SCHEMA, SET_ADAPTER

Report = Callable[[int, str], None]
"""Hears how many functions are done, and what is next."""


def trace(name: str, spec: FunctionSpec, model: StreamModel, plan: ExportPlan) -> ExportedProgram:
    """The exported program of one function, with one state tensor per layer.

    Raises UnsupportedModelError.
    """
    logits = plan.options.chosen(ExecutorchOptions).logits
    form = VisibleForm(name, model, plan.geometry, plan.schedule, logits=logits).eval()
    try:
        with torch.no_grad(), Products():
            return tidy(torch.export.export(form, example_inputs(spec), strict=False))
    except UserError as error:
        reason = str(error).splitlines()[0]
        family = plan.identity.model_type
        raise UnsupportedModelError(
            f"{family}: the {name} graph cannot be traced ({reason})"
        ) from error


def traced(
    specs: Mapping[str, FunctionSpec],
    trace: Callable[[str, FunctionSpec], ExportedProgram],
    report: Report,
) -> dict[str, ExportedProgram]:
    programs = {}
    for number, (name, spec) in enumerate(specs.items()):
        report(number, f"trace {name}")
        programs[name] = trace(name, spec)
    return programs


def to_edge(programs: Programs, partitioner: Any, constants: dict[str, Any]) -> Any:
    """The programs in ExecuTorch's dialect, lowered by the partitioner."""
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    return to_edge_transform_and_lower(
        dict(programs),
        partitioner=[partitioner],
        constant_methods=constants,
        # The dialect's checks refuse torchao's operators, which the partitioner takes later.
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )


def lower(
    programs: Programs,
    parts: Any,
    constants: dict[str, Any],
    file: Path,
    report: Report,
    slots: Collection[str] = (),
) -> tuple[str, ...]:
    """Write what was traced as one program, which changes it, with ``constants`` as methods without
    inputs.

    ``parts``: the partitioner. Functions share the cache by name, and write it in place at their
    end. ``slots``: the states that ``set_adapter`` fills. Returns notes on what each function
    delegates.
    """
    from executorch.exir import ExecutorchBackendConfig
    from executorch.exir.backend import utils
    from executorch.exir.passes import MemoryPlanningPass

    names = [name for name in programs if name != SET_ADAPTER]
    report(len(names), "lower to delegates")
    edge = to_edge(programs, parts, constants)
    # ExecuTorch remembers all pairs of nodes that it compared, and with them graphs
    utils.is_same_node.cache_clear()
    for name in names:
        write_last(edge.exported_program(name))
        untouch(edge.exported_program(name), slots)
    notes = tuple(delegation(name, edge.exported_program(name)) for name in names)
    report(len(names) + 1, "lay out the memory")
    program = edge.to_executorch(
        ExecutorchBackendConfig(
            emit_mutable_buffer_names=True,
            run_reinplace_pass=True,
            do_quant_fusion_and_const_prop=True,
            memory_planning_pass=MemoryPlanningPass(share_mutable_buffers=True),
        )
    )
    with file.open("wb") as out:
        program.write_to_file(out)  # from where its parts are, without a copy of the whole
    return notes


def partitioner() -> Any:
    """The partitioner for XNNPACK, without delegates that cost more than they save, or compute
    something else.
    """
    from executorch.backends.xnnpack.partition.config import ALL_PARTITIONER_CONFIGS
    from executorch.backends.xnnpack.partition.config.generic_node_configs import GeluConfig
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    class ExactGelu(GeluConfig):  # type: ignore[misc]
        """Leaves out the GELU by tanh, for which ExecuTorch 1.4 writes XNNPACK's exact one."""

        def check_constraints(self, node: Any, ep: Any) -> bool:
            return node.kwargs.get("approximate", "none") == "none" and bool(
                super().check_constraints(node, ep)
            )

    class Worthwhile(XnnpackPartitioner):  # type: ignore[misc]
        """Leaves out delegates whose call costs more than their operators."""

        def generate_partitions(self, ep: Any) -> list[Any]:
            return [part for part in super().generate_partitions(ep) if worthwhile(part.nodes)]

    return Worthwhile(
        [ExactGelu if config is GeluConfig else config for config in ALL_PARTITIONER_CONFIGS]
    )


def constants_of(geometry: Geometry, stop_ids: Sequence[int]) -> dict[str, Any]:
    """What a host must know, as constant methods of the program: see docs/executorch_host.md."""
    tree = {"parents": geometry.tree.parents, "slots": geometry.tree.draft_indices(geometry.k)}
    return {
        SCHEMA: SCHEMA_VERSION,
        "gamma": geometry.gamma,
        "k": geometry.k,
        "tree_size": geometry.tree.size,
        "emitted": geometry.tree.emitted,
        "context": geometry.context,
        "capacity": geometry.capacity,
        "chunk": geometry.chunk,
        "vocab": geometry.vocab,
        "layers": geometry.layers,
        "stop_tokens": torch.tensor(list(stop_ids), dtype=torch.int32),
        "hidden": geometry.hidden,
        **{
            name: torch.tensor(table, dtype=torch.int32)
            for name, table in tree.items()
            if geometry.hidden
        },
    }
