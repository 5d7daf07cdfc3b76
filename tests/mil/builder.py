"""MIL programs for tests: single operations put into one package, and their values by coremltools
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Arrays = Sequence[np.ndarray]
Build = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One operation: ``build(mb, *values)`` makes it, ``inputs`` are its operands.

    ``expected``: what it gives, from the inputs; None lets coremltools compute it. ``exact``: bits
    must agree.
    """

    name: str
    build: Build
    inputs: Arrays
    expected: Callable[..., Any] | None = None
    exact: bool = False


def coremltools() -> Any:
    """The module, with its chatter about versions and progress kept out of the test log."""
    import logging

    import coremltools as ct

    logging.getLogger("coremltools").setLevel(logging.ERROR)
    return ct


def convert(program: Any, path: Path) -> None:
    """Save a MIL program for iOS 18 as it is, without optimizing it."""
    ct = coremltools()
    model = ct.convert(
        program,
        convert_to="mlprogram",
        compute_precision=ct.precision.FLOAT32,
        skip_model_load=True,
        pass_pipeline=ct.PassPipeline.EMPTY,
        minimum_deployment_target=ct.target.iOS18,
    )
    model.save(str(path))


def package(cases: Sequence[Case], path: Path) -> None:
    """One package with every case: inputs ``in_<case>_<n>``, outputs ``<case>`` or
    ``<case>_out<n>``.

    Bool inputs do not exist at a model's border: they are passed as int32 and cast.
    """
    ct = coremltools()
    from coremltools.converters.mil.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    element = {
        "float32": types.fp32,
        "float16": types.fp16,
        "int32": types.int32,
        "bool": types.int32,
    }
    specs = {}
    wanted = {}
    for case in cases:
        for index, array in enumerate(case.inputs):
            name = f"in_{case.name}_{index}"
            specs[name] = mb.TensorSpec(shape=array.shape, dtype=element[array.dtype.name])
            wanted[name] = array.dtype.name

    def body(values: Mapping[str, Any]) -> tuple[Any, ...]:
        outputs = []
        for case in cases:
            names = [f"in_{case.name}_{index}" for index in range(len(case.inputs))]
            given = [
                mb.cast(x=values[n], dtype="bool") if wanted[n] == "bool" else values[n]
                for n in names
            ]
            made = case.build(mb, *given)
            many = isinstance(made, tuple | list)
            for index, output in enumerate(made if many else [made]):
                name = f"{case.name}_out{index}" if many else case.name
                if output.dtype == types.bool:
                    output = mb.cast(x=output, dtype="int32")
                outputs.append(mb.identity(x=output, name=name))
        return tuple(outputs)

    # mb.program wants a function with one named parameter an input.
    scope: dict[str, Any] = {"body": body}
    parameters = ", ".join(specs)
    pairs = ", ".join(f"{name}={name}" for name in specs)
    exec(f"def program({parameters}):\n    return body(dict({pairs}))\n", scope)
    decorate = mb.program(input_specs=list(specs.values()), opset_version=ct.target.iOS18)
    convert(decorate(scope["program"]), path)


def value_by_coremltools(case: Case) -> Any:
    """What coremltools' own evaluation of constant operations gives for a case."""
    ct = coremltools()
    from coremltools.converters.mil.mil import Builder as mb
    from coremltools.converters.mil.mil import Function

    with Function({}, opset_version=ct.target.iOS18):
        made = case.build(mb, *case.inputs)
        return [one.val for one in made] if isinstance(made, tuple | list) else made.val
