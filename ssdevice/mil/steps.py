"""What a compiled function consists of, and how long its values live."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ssdevice.mil.dtypes import Array
from ssdevice.mil.finish import Run
from ssdevice.mil.schema import Function, Operation, TensorType

Slot = tuple[int, TensorType]


@dataclass(frozen=True, eq=False)
class Step:
    """One call: ``run`` on the registers ``reads`` fills ``writes``; ``frees`` are dropped afterwards."""

    run: Run
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    frees: tuple[int, ...]
    operation: Operation


@dataclass(frozen=True, eq=False)
class Plan:
    """A compiled function.

    ``registers`` hold the constants and say how many there are; the slots say which hold inputs, states and outputs.
    ``constants``: every constant and materialized weight by name, floats as float32.
    """

    function: Function
    steps: tuple[Step, ...]
    registers: tuple[Any, ...]
    inputs: dict[str, Slot]
    states: dict[str, Slot]
    outputs: dict[str, Slot]
    constants: dict[str, Array]


def uses(function: Function) -> tuple[dict[str, float], dict[str, list[tuple[int, str]]]]:
    """Where each name is read last (a returned one: infinitely late), and each state's reads and writes in order."""
    last: dict[str, float] = {}
    events: dict[str, list[tuple[int, str]]] = {name: [] for name, kind in function.inputs if kind.state}
    for position, operation in enumerate(function.operations):
        for name in operation.names():
            last[name] = position
            if name in events:
                events[name].append((position, operation.kind))
    last.update((name, math.inf) for name in function.outputs)
    return last, events


def with_frees(steps: list[Step], kept: set[int]) -> tuple[Step, ...]:
    """The steps, each with the registers that nothing after it reads."""
    seen = set(kept)
    finished = []
    for step in reversed(steps):
        frees = tuple({register for register in (*step.reads, *step.writes) if register not in seen})
        seen.update(frees)
        finished.append(Step(step.run, step.reads, step.writes, frees, step.operation))
    return tuple(reversed(finished))
