"""Core ML bundles: run by Core ML on a Mac, elsewhere operation by operation in NumPy.

Both keep the cache in the package's state, so a call moves only integers.
"""

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssdevice import contract
from ssdevice.bundle.folder import Bundle
from ssdevice.bundle.integrity import parse_strict
from ssdevice.contract import (
    KEYS,
    LOGITS,
    NEXT_DRAFTS,
    PREFILL,
    STATES,
    VALUES,
    CacheForm,
    FunctionSpec,
    Geometry,
)
from ssdevice.errors import BundleError, needs_extra
from ssdevice.mil.program import Program as Interpreter
from ssdevice.mil.reader import Package
from ssdevice.runtime.engine import (
    Cache,
    Engine,
    EngineOptions,
    Inputs,
    Outputs,
    check_cache,
    rows_of_state,
)
from ssdevice.runtime.notice import say_once

MODEL = "model"
SETTINGS = "settings"
SPECIFICATION = 9
"""First version of the model file that supports states: iOS 18 and macOS 15."""
SLOW = (
    "ssdevice: Core ML runs only on Apple's systems; here its operations run in NumPy one by one, "
    "slowly"
)


class AppleProgram:
    """A package in Core ML, with the part of the interpreter's interface that an engine uses.

    One MLModel per function, opened on its first call; ``compute_units``: a name that coremltools
    knows.
    """

    def __init__(self, package: Path, compute_units: str) -> None:
        with needs_extra("coreml"):
            self._coremltools = importlib.import_module("coremltools")
        self.path = package
        known = self._coremltools.ComputeUnit.__members__
        if compute_units.upper() not in known:
            raise BundleError(
                f"{package}: compute units {compute_units!r}, expected {', '.join(known).lower()}"
            )
        self._units = known[compute_units.upper()]
        self._models: dict[str, Any] = {}

    def make_state(self, function: str) -> Any:
        """A new zeroed cache.

        All functions declare the same one, but Core ML creates it from one of them.
        """
        return self._model(function).make_state()

    def run(self, function: str, inputs: Inputs, state: Any) -> Outputs:
        """Outputs of one call by name. Updates the state."""
        outputs: dict[str, NDArray[Any]] = self._model(function).predict(dict(inputs), state=state)
        for name, array in outputs.items():
            if name not in (LOGITS, STATES):  # a converter may widen integers
                outputs[name] = array.astype(np.int32)
        return outputs

    def _model(self, function: str) -> Any:
        if function not in self._models:
            model = self._coremltools.models.MLModel
            self._models[function] = model(
                str(self.path), function_name=function, compute_units=self._units
            )
        return self._models[function]


Program = Interpreter | AppleProgram


class CoreMLEngine(Engine):
    """A package opened for one app.

    ``names``: the contract's functions -> their names in the package.
    """

    def __init__(self, program: Program, geometry: Geometry, names: Mapping[str, str]) -> None:
        super().__init__(geometry, frozenset(names), program.path)
        self.names = dict(names)
        self.program: Program | None = program
        self.specs = contract.functions(geometry, CacheForm.INTERNAL, "")

    def new_cache(self, inputs: Inputs, beside: Cache | None = None) -> "CoreMLCache":
        return CoreMLCache(self, inputs)

    def release(self) -> None:
        self.program = None


class CoreMLCache(Cache):
    """One state of the package, created on first use."""

    def __init__(self, engine: CoreMLEngine, inputs: Inputs) -> None:
        super().__init__(inputs)
        self.engine = engine
        self._integers: dict[str, dict[str, NDArray[np.int32]]] = {}
        for name in engine.names:
            given = engine.specs[name].inputs
            self._integers[name] = {tensor.name: inputs[tensor.name] for tensor in given}
        self._state: Any = None

    @property
    def program(self) -> Program:
        # A conversation refuses calls once its engine is closed.
        assert self.engine.program is not None
        return self.engine.program

    @property
    def state(self) -> Any:
        if self._state is None:
            self._state = self.program.make_state(self.engine.names[PREFILL])
        return self._state

    def call(self, function: str, length: int) -> Outputs:
        clock = perf_counter()
        out = self.program.run(self.engine.names[function], self._integers[function], self.state)
        self.native_seconds += perf_counter() - clock
        return out

    def rows(self, start: int, end: int) -> NDArray[Any] | None:
        if isinstance(self.program, AppleProgram):
            return None
        return rows_of_state(self.state[KEYS], self.state[VALUES], start, end).astype(np.float32)


def open_engine(bundle: Bundle, app: str | None, options: EngineOptions) -> CoreMLEngine:
    """The engine of a Core ML bundle.

    Raises BundleError for another cache form or another package.
    """
    check_cache(bundle, CacheForm.INTERNAL)
    names = bundle.function_names(app)
    package = Package.open(bundle.file(MODEL))
    check_package(package, bundle.functions, names)
    if sys.platform != "darwin":
        say_once(SLOW)
        return CoreMLEngine(Interpreter(package), bundle.geometry, names)
    file = bundle.file(SETTINGS)
    units = str(parse_strict(file.read_bytes(), str(file)).get("compute_units", "all"))
    return CoreMLEngine(AppleProgram(package.path, units), bundle.geometry, names)


def check_package(
    package: Package, functions: Mapping[str, FunctionSpec], names: Mapping[str, str]
) -> None:
    """Raise BundleError unless a package supports states and has an app's functions with the
    contract's tensors.

    ``functions``: their specs in the manifest; ``names``: their names in the package.
    """
    if package.specification_version < SPECIFICATION:
        raise BundleError(
            f"{package.path}: its deployment target is too old: model files of version "
            f"{package.specification_version} have no states, {SPECIFICATION} (iOS 18) is needed; "
            "export again"
        )
    for name, function in names.items():
        expected = functions[name]
        found = package.spec(function)
        for kind in ("inputs", "outputs", "states"):
            wanted = set(getattr(expected, kind))
            given = set(getattr(found, kind))
            if kind == "outputs" and name == PREFILL:  # apps without streams have no drafts
                wanted -= {tensor for tensor in wanted - given if tensor.name == NEXT_DRAFTS}
            if wanted != given:
                odd = min(wanted ^ given, key=lambda tensor: (tensor.name, tensor in wanted))
                differs = "lacks" if odd in wanted else "has another"
                raise BundleError(
                    f"{package.path}: function {function!r} {differs} {kind[:-1]} {odd.name!r} "
                    f"({odd.dtype} {list(odd.shape)}); package and manifest do not belong together"
                )
