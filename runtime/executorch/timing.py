"""What each instruction of an ExecuTorch program takes, measured with a runtime that traces no events.

A method runs as many of its instructions as a number in its file says. The runtime maps the file and reads that number
in every call, so in a copy of the file it may be changed between two calls: the time of a method cut after n
instructions, less its time cut after n - 1, is what instruction n takes, with its real shapes. These differences and
the time of a call cut to nothing add up to the time of a whole call. As no instruction takes less than nothing, the
times are fitted by the nearest ones that never fall from cut to cut, which averages noise where kernels are short.
"""

from __future__ import annotations

import mmap
import shutil
import struct
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import get_clock_info, perf_counter, thread_time
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ssdevice.contract import CHUNK, DRAFTS, FUNCTIONS, LENGTH, ROOT, VALID
from ssdevice.errors import BundleError, InputError
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.executorch.engine import PROGRAM, ExecutorchCache, ExecutorchEngine
from ssdevice.runtime.executorch.file import JUMP, DelegateCalls, MethodCalls, read_calls
from ssdevice.runtime.executorch.program import explain

if TYPE_CHECKING:
    from ssdevice.bundle.folder import Bundle

MIN_ROUNDS, MAX_ROUNDS = 4, 100
SECONDS = 18.0
"""What the rounds of one method may take, unless its fewest rounds take longer."""
PATIENCE = 4.0
"""Its fewest rounds may take this many times that; of a slower method kernels in a row are timed as one."""
RESOLUTION = 1e-6
TOGETHER = "kernels in a row"
TOKEN = 1
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Part:
    """Instructions timed as one, in seconds.

    ``apart``: its time in one half of the rounds less that in the other; half of it is about one standard error.
    """

    name: str
    calls: int
    seconds: float
    apart: float


@dataclass(frozen=True)
class MethodTimes:
    """A method's time: ``whole`` = ``outside`` + all ``parts``, in seconds; ``outside``: a call of no instructions."""

    whole: float
    outside: float
    parts: tuple[Part, ...]
    rounds: int


def time_methods(
    bundle: Bundle, options: EngineOptions, committed: int, report: Report, seconds: float = SECONDS
) -> dict[str, MethodTimes]:
    """The times of the contract's functions that an ExecuTorch bundle has, with ``committed`` rows in the cache.

    Leaves the bundle's file alone. ``report``: function, per cent done, 100. Raises InputError for more rows than
    the context has, BundleError for a program that cannot be run or cut.
    """
    if not 0 <= committed <= bundle.geometry.context:
        raise InputError(f"{committed} committed tokens, the bundle's context holds 0 to {bundle.geometry.context}")
    file = bundle.file(PROGRAM)
    calls = read_calls(file)
    with tempfile.TemporaryDirectory(prefix="ssdevice-") as folder:
        copy = Path(folder) / file.name
        try:
            shutil.copyfile(file, copy)
        except OSError as error:
            raise InputError(f"{folder}: cannot hold a copy of the program ({error.strerror})") from error
        with (
            closing(ExecutorchEngine.of(bundle, None, options, copy)) as engine,
            copy.open("r+b") as opened,
            closing(mmap.mmap(opened.fileno(), 0)) as window,
            engine.program.lock,
        ):
            conversation = _filled(engine, committed)
            names = [name for name in FUNCTIONS if name in engine.functions]
            methods = {name: _Method(engine, conversation, window, name, calls[name]) for name in names}
            return {name: _time(method, calls[name], seconds, report) for name, method in methods.items()}


def _filled(engine: ExecutorchEngine, committed: int) -> Conversation:
    """A conversation of that many tokens; which ones has no part in the time."""
    conversation, chunk = engine.new_conversation(), engine.geometry.chunk
    assert isinstance(conversation.cache, ExecutorchCache)
    engine.program.seat(conversation.cache, next(iter(engine.specs)))
    while conversation.length < committed:
        tokens = [TOKEN] * min(chunk, committed - conversation.length)
        conversation.prefill(tokens)
        conversation.length += len(tokens)
    return conversation


class _Method:
    """A function of the copy whose calls stop after some instructions; raises BundleError if they do not."""

    def __init__(
        self, engine: ExecutorchEngine, conversation: Conversation, window: mmap.mmap, name: str, calls: MethodCalls
    ) -> None:
        at = conversation.length
        self.name, self.file, self.window = name, engine.file, window
        if len(calls.counts_at) != 1 or JUMP in calls.instructions:
            raise BundleError(f"{self.file.name}: {name} branches, so its instructions cannot be timed one by one")
        self.size, (self.count_at,) = len(calls.instructions), calls.counts_at
        given: dict[str, Any] = {CHUNK: TOKEN, VALID: engine.geometry.chunk, ROOT: TOKEN, LENGTH: at}
        given[DRAFTS] = conversation.drafts
        shapes = {tensor.name: [int(size) for size in tensor.shape] for tensor in engine.specs[name].inputs}
        arrays = [np.array(np.broadcast_to(given[key], shape), np.int32) for key, shape in shapes.items()]
        self.inputs = [engine.program.tensor(array) for array in arrays]
        self.method: Any = engine.program.method(name)
        # The only thread is the caller's, and its own clock stands still while other processes have their turn.
        alone = engine.program.options.threads == 1 and get_clock_info("thread_time").resolution < RESOLUTION
        self.clock = thread_time if alone else perf_counter
        keys = engine.program.states(name)[0][:, at]
        keys.zero_()
        self.run(0)
        if bool(keys.any()):
            raise BundleError(
                f"{self.file.name}: on this system ExecuTorch reads a program once, so its instructions cannot be timed"
            )
        self.run(self.size)

    def run(self, instructions: int) -> float:
        """Seconds of a call of the first so many instructions."""
        struct.pack_into("<I", self.window, self.count_at, instructions)
        began = self.clock()
        try:
            self.method.call(self.inputs, clone_outputs=False)
        except RuntimeError as error:
            raise BundleError(explain(self.file, self.name, error)) from error
        return self.clock() - began


def _time(method: _Method, calls: MethodCalls, seconds: float, report: Report) -> MethodTimes:
    """Rounds over all cuts; before each cut call a whole one, so that it finds the caches as calls in a row do."""
    whole = min(method.run(method.size) for _ in range(MIN_ROUNDS))
    cuts = list(range(method.size + 1))
    if len(cuts) * 2 * whole * MIN_ROUNDS > PATIENCE * seconds:
        delegates = [i for i, one in enumerate(calls.instructions) if isinstance(one, DelegateCalls)]
        cuts = sorted({0, method.size, *delegates, *(i + 1 for i in delegates)})
    rows: list[list[float]] = []
    began, part = perf_counter(), 0.0
    while len(rows) < MIN_ROUNDS or (len(rows) < MAX_ROUNDS and part < 1) or len(rows) % 2:
        rows.append([0.0] * len(cuts))
        order = range(len(cuts)) if len(rows) % 4 < 2 else reversed(range(len(cuts)))  # each half goes both ways
        for i in order:
            method.run(method.size)
            rows[-1][i] = method.run(cuts[i])
        part = max(len(rows) / MAX_ROUNDS, (perf_counter() - began) / seconds if seconds else 1.0)
        report(method.name, round(100 * min(1.0, part)), 100)
    method.run(method.size)
    times = np.array(rows)
    typical = _typical(times)
    steps, apart = np.diff(typical), np.diff(_typical(times[::2]) - _typical(times[1::2]))
    names = _names(calls.instructions)
    parts = tuple(
        Part(names[start] if end - start == 1 else TOGETHER, end - start, float(step), float(gap))
        for start, end, step, gap in zip(cuts, cuts[1:], steps, apart, strict=False)
    )
    return MethodTimes(float(typical[-1]), float(typical[0]), parts, len(rows))


def _typical(times: NDArray[np.float64]) -> NDArray[np.float64]:
    """By cut, the mean of the faster half of the rounds, as disturbed calls are slow ones; then ``rising``."""
    return rising(np.sort(times, axis=0)[: len(times) // 2].mean(axis=0))


def rising(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The values that never fall nearest to these in squares; where these fall, means stand for all that cross."""
    blocks: list[tuple[float, int]] = []
    for value in values.tolist():
        mean, size = value, 1
        while blocks and blocks[-1][0] > mean:
            before, others = blocks.pop()
            mean, size = (mean * size + before * others) / (size + others), size + others
        blocks.append((mean, size))
    return np.repeat([mean for mean, _ in blocks], [size for _, size in blocks])


def _names(instructions: Sequence[str | DelegateCalls]) -> list[str]:
    numbers = count(1)

    def delegate(one: DelegateCalls) -> str:
        return f"delegate {next(numbers)}" + ("" if one.nodes is None else f" ({one.nodes} operators)")

    return [one if isinstance(one, str) else delegate(one) for one in instructions]
