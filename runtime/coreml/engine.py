"""Core ML bundles: on a Mac through Core ML itself, elsewhere operation by operation in NumPy.

Both keep the cache in the package's own state, so a call moves integers alone.
"""

from __future__ import annotations

import importlib
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ssdevice.contract import (
    CHUNK,
    COUNT,
    DRAFTS,
    LENGTH,
    NEXT_DRAFTS,
    NEXT_ROOT,
    PLAIN,
    PREFILL,
    ROOT,
    STEP,
    TOKENS,
    VALID,
    CacheForm,
    FunctionSpec,
    Geometry,
)
from ssdevice.errors import BundleError, MissingExtraError
from ssdevice.mil.program import Program as Interpreter
from ssdevice.mil.program import State
from ssdevice.mil.reader import Package
from ssdevice.runtime.engine import Conversation, Engine, EngineOptions
from ssdevice.runtime.notice import say_once

if TYPE_CHECKING:
    from ssdevice.bundle.folder import Bundle

MODEL = "model"
SETTINGS = "settings"
SPECIFICATION = 9
"""Version of a package's model file from which it can have states: iOS 18 and macOS 15."""
INTERPRETER = "ssdevice.mil"
SLOW = "ssdevice: Core ML runs on Apple's systems alone; here its operations run in NumPy one by one, slowly"
Integers = Mapping[str, NDArray[np.int32]]


class Program(ABC):
    """A package ready to run."""

    @abstractmethod
    def make_state(self, function: str) -> Any:
        """A new cache, zero; all functions declare the same, but a target may want to know one."""

    @abstractmethod
    def run(self, function: str, inputs: Integers, state: Any) -> Mapping[str, NDArray[Any]]:
        """Outputs of one call, by name; the state is changed."""


class AppleProgram(Program):
    """One MLModel per function, opened when it is first called; ``compute_units`` as coremltools spells them."""

    def __init__(self, package: Path, compute_units: str) -> None:
        try:
            self._coremltools = importlib.import_module("coremltools")
        except ModuleNotFoundError as error:
            raise MissingExtraError("coreml", "coremltools") from error
        self._package = package
        self._units = self._coremltools.ComputeUnit[compute_units.upper()]
        self._models: dict[str, Any] = {}

    def make_state(self, function: str) -> Any:
        return self._model(function).make_state()

    def run(self, function: str, inputs: Integers, state: Any) -> Mapping[str, NDArray[Any]]:
        outputs: dict[str, NDArray[Any]] = self._model(function).predict(dict(inputs), state=state)
        return outputs

    def _model(self, function: str) -> Any:
        if function not in self._models:
            self._models[function] = self._coremltools.models.MLModel(
                str(self._package), function_name=function, compute_units=self._units
            )
        return self._models[function]


class NumPyProgram(Program):
    """The interpreter of saved programs."""

    def __init__(self, package: Package) -> None:
        self._program = Interpreter(package)

    def make_state(self, function: str) -> State:
        return self._program.make_state()

    def run(self, function: str, inputs: Integers, state: State) -> Mapping[str, NDArray[Any]]:
        return self._program.run(function, inputs, state)


class CoreMLEngine(Engine):
    """A package opened for one app. ``names``: what the package calls the app's functions of the contract."""

    def __init__(self, program: Program, geometry: Geometry, names: Mapping[str, str]) -> None:
        super().__init__(geometry, frozenset(names))
        self.names = dict(names)
        self.program: Program | None = program

    def new_conversation(self) -> CoreMLConversation:
        return CoreMLConversation(self)

    def close(self) -> None:
        self.program = None


class CoreMLConversation(Conversation):
    """One state of the package."""

    def __init__(self, engine: CoreMLEngine) -> None:
        super().__init__(engine.geometry)
        self.engine = engine
        self._state: Any = None

    def prefill(self, chunk: Sequence[int]) -> int:
        ids = np.zeros(self.geometry.chunk, np.int32)
        ids[: len(chunk)] = chunk
        out = self._run(PREFILL, {CHUNK: ids, VALID: _int(len(chunk))})
        if NEXT_DRAFTS in out:
            self.drafts[:] = out[NEXT_DRAFTS]
        return int(out[NEXT_ROOT].reshape(-1)[0])

    def step(self, root: int) -> list[int]:
        out = self._run(STEP, {ROOT: _int(root), DRAFTS: self.drafts.copy()})
        count = int(out[COUNT].reshape(-1)[0])
        self.drafts[:] = out[NEXT_DRAFTS]
        tokens: list[int] = out[TOKENS].reshape(-1)[:count].astype(int).tolist()
        return tokens

    def step_plain(self, root: int) -> int:
        return int(self._run(PLAIN, {ROOT: _int(root)})[TOKENS].reshape(-1)[0])

    def _run(self, function: str, integers: dict[str, NDArray[np.int32]]) -> Mapping[str, NDArray[Any]]:
        program = self.engine.program
        if program is None or function not in self.engine.functions:
            raise BundleError(f"the app has no {function}" if program else "the engine is closed")
        clock = perf_counter()
        if self._state is None:
            self._state = program.make_state(self.engine.names[PREFILL])
        out = program.run(self.engine.names[function], {**integers, LENGTH: _int(self.length)}, self._state)
        self.native_seconds += perf_counter() - clock
        return out


def open_engine(bundle: Bundle, app: str | None, options: EngineOptions) -> CoreMLEngine:
    """The engine of a Core ML bundle; raises BundleError for one of another cache form."""
    if bundle.manifest.cache is not CacheForm.STATE:
        raise BundleError(
            f"{bundle.folder}: cache form {bundle.manifest.cache}, Core ML bundles have {CacheForm.STATE}"
        )
    names = app_functions(bundle, app)
    package = bundle.file(MODEL)
    opened = Package.open(package)
    check_package(opened, bundle.functions, names)
    program: Program
    if sys.platform == "darwin":
        settings = json.loads(bundle.file(SETTINGS).read_text("utf-8"))
        program = AppleProgram(package, str(settings.get("compute_units", "all")))
    else:
        say_once(SLOW)
        program = NumPyProgram(opened)
    return CoreMLEngine(program, bundle.geometry, names)


def app_functions(bundle: Bundle, app: str | None) -> Mapping[str, str]:
    """The contract's functions that an app has (None: the default one), and what the package calls them."""
    return bundle.app(app).functions or {name: name for name in bundle.functions}


def check_package(package: Package, functions: Mapping[str, FunctionSpec], names: Mapping[str, str]) -> None:
    """Raise BundleError unless a package has an app's functions with the contract's tensors, and states at all.

    ``functions``: what the manifest says of them; ``names``: what the package calls them.
    """
    if package.specification_version < SPECIFICATION:
        raise BundleError(
            f"{package.path}: its deployment target is too old: model files of version "
            f"{package.specification_version} have no states, {SPECIFICATION} (iOS 18) is needed; export again"
        )
    for name, function in names.items():
        expected, found = functions[name], package.spec(function)
        for kind in ("inputs", "outputs", "states"):
            wanted, given = set(getattr(expected, kind)), set(getattr(found, kind))
            if kind == "outputs" and name == PREFILL:  # apps without streams draft nothing
                wanted -= {tensor for tensor in wanted - given if tensor.name == NEXT_DRAFTS}
            if wanted != given:
                odd = min(wanted ^ given, key=lambda tensor: (tensor.name, tensor in wanted))
                where = "lacks" if odd in wanted else "has another"
                raise BundleError(
                    f"{package.path}: function {function!r} {where} {kind[:-1]} {odd.name!r} "
                    f"({odd.dtype} {list(odd.shape)}); package and manifest do not belong together"
                )


def _int(value: int) -> NDArray[np.int32]:
    return np.array([value], np.int32)
