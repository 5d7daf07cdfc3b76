"""Graphs of ONNX Runtime that engines of a process share: their checks, profiles and memory."""

import ctypes
import json
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from statistics import median
from threading import Lock
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import onnxruntime as ort

from ssdevice.bundle.folder import Bundle
from ssdevice.contract import TensorSpec
from ssdevice.errors import BundleError
from ssdevice.memory import trim_heaps
from ssdevice.runtime.engine import EngineOptions, Kernel
from ssdevice.runtime.onnx.adapter import AdapterTensors, fits

TYPES = {"int32": "tensor(int32)", "float32": "tensor(float)", "float16": "tensor(float16)"}
KERNEL = "_kernel_time"
NODE = "node_"
"""What the names of a graph's nodes begin with. ONNX Runtime puts more before those of a region."""


class SharedBase:
    """What the engines of one bundle share in a process: its graphs with their weights, and its
    adapters.

    Engines hold it strongly and the process-wide table weakly. So another engine of the same bundle
    with the same options finds it, and it is freed with the last engine. Bundles are identified by
    the hashes of their files, not only by their folder: ``add-app`` replaces a folder by a new one.
    """

    _all: ClassVar["WeakValueDictionary[Hashable, SharedBase]"] = WeakValueDictionary()
    _lock: ClassVar[Lock] = Lock()

    def __init__(self) -> None:
        self._sessions: dict[Path, ort.InferenceSession] = {}
        self._adapters: WeakValueDictionary[str, AdapterTensors] = WeakValueDictionary()

    @classmethod
    def of(cls, bundle: Bundle, options: EngineOptions) -> "SharedBase":
        files = bundle.manifest.files
        adapters = {path for app in bundle.manifest.apps for path in app.files}
        content = frozenset(
            (path, entry.sha256) for path, entry in files.items() if path not in adapters
        )
        with cls._lock:
            return cls._all.setdefault((bundle.folder.resolve(), content, options), cls())

    def open(self, file: Path, opening: Callable[[], ort.InferenceSession]) -> ort.InferenceSession:
        """The session of a graph, opened by the first engine that needs it."""
        with self._lock:
            if file not in self._sessions:
                self._sessions[file] = opening()
            return self._sessions[file]

    def adapter(self, file: Path, content: str, base_sha256: str) -> AdapterTensors:
        """The tensors of an adapter file, loaded by the first engine that needs them.

        ``content``: the file's sha256.
        """
        with self._lock:
            found = self._adapters.get(content)
            if found is None:
                found = self._adapters[content] = AdapterTensors(file, base_sha256)
            return found


def check_tensors(where: str, given: Sequence[Any], expected: Sequence[TensorSpec]) -> None:
    """Raise BundleError unless a graph has the tensors that will be bound, with types and sizes."""
    found = {tensor.name: tensor for tensor in given}
    for spec in expected:
        if spec.name not in found:
            raise BundleError(f"{where} has no tensor {spec.name!r}; export the bundle again")
        tensor = found[spec.name]
        if tensor.type != TYPES.get(spec.dtype, spec.dtype) or not fits(spec.shape, tensor.shape):
            sizes = [size if isinstance(size, int) else None for size in tensor.shape]
            raise BundleError(
                f"{where} has {spec.name!r} as {tensor.type} {sizes}, "
                f"the manifest says {spec.dtype} {list(spec.shape)}"
            )


def kernel_times(file: Path) -> list[Kernel]:
    """The kernels of one call, from a profile file of ONNX Runtime, which is deleted.

    Each node's time is the median over calls, so that interruptions on a busy machine do not count
    as work.
    """
    nodes: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in json.loads(file.read_text("utf-8")):
        if event.get("cat") == "Node" and event["name"].endswith(KERNEL):
            name = event["name"].removesuffix(KERNEL)
            name = name[max(name.rfind(NODE), 0) :]
            nodes[name, event["args"]["op_name"]].append(event["dur"])
    file.unlink()
    return [
        Kernel(name, operator, median(durations)) for (name, operator), durations in nodes.items()
    ]


SMAPS = Path("/proc/self/smaps")
MAPPING = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+ +(/.*)\n(?:[A-Z].*\n)*?Anonymous: +0 kB$",
    re.MULTILINE,
)
"""A mapping of a file without changed pages: start, end and path."""
DONTNEED = 4  # MADV_DONTNEED of Linux: what is read again is read from the file


def give_back(folder: Path) -> None:
    """Give the system back freed memory, and the unchanged pages mapped from files in ``folder``.

    Does nothing on systems other than Linux. ONNX Runtime maps a bundle's weights once for every
    graph, and its kernels read them while a graph is opened, to pack them. Afterwards the mapped
    pages only count: three graphs would have three times the bundle resident.
    """
    try:
        libc = ctypes.CDLL(None)
        mappings = list(_unchanged(folder))
    except (OSError, TypeError):  # no Linux
        return
    for start, size in mappings:
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), DONTNEED)
    trim_heaps()


def _unchanged(folder: Path) -> Iterator[tuple[int, int]]:
    """Start and size of every unchanged mapping of a file in a folder."""
    where = folder.resolve()
    for start, end, path in MAPPING.findall(SMAPS.read_text("utf-8", "surrogateescape")):
        if Path(path).parent == where:
            yield int(start, 16), int(end, 16) - int(start, 16)
