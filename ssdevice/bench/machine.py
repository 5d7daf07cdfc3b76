"""The load of the machine during a measurement: numbers from a loaded machine do not count."""

import os
import platform
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

from ssdevice.errors import needs_extra

LOADED = 0.10
"""Share of all cores that other processes may use before a measurement does not count."""


INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm")
"""Instructions that decide which kernels products of integers take, as Linux calls them."""


def instructions() -> list[str]:
    """Which of INSTRUCTIONS the CPU has; empty where Linux does not tell."""
    known = _cpuinfo()
    flags = known.get("flags", known.get("Features", "")).split()
    return [name for name in INSTRUCTIONS if name in flags]


def cpu_name() -> str:
    """The name of the CPU."""
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those packages that are here."""
    found = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _cpuinfo() -> dict[str, str]:
    """What Linux says of its last processor, by name; nothing elsewhere."""
    found = dict[str, str]()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            name, _, value = line.partition(":")
            found[name.strip()] = value.strip()
    return found


@dataclass(frozen=True)
class Load:
    """The load of the machine during a measurement.

    ``others``: share of all cores that other processes used, 0..1. ``before``, ``after``: load
    averages.
    """

    others: float
    before: tuple[float, float, float]
    after: tuple[float, float, float]

    @property
    def valid(self) -> bool:
        """Whether the machine was quiet enough for times to count."""
        return self.others <= LOADED

    def as_json(self) -> dict[str, Any]:
        """Plain values, with a description of the machine."""
        return {
            "cpu": cpu_name(),
            "instructions": instructions(),
            "cores": os.cpu_count(),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
            "others_cpu_share": round(self.others, 4),
            "loadavg_before": self.before,
            "loadavg_after": self.after,
        }


class LoadWatch:
    """Measures the load by other processes from now until ``load`` is called.

    ``workers``: ids of processes that belong to the measurement and run until then.
    """

    def __init__(self, workers: Sequence[int] = ()) -> None:
        with needs_extra("bench"):
            import psutil
        self._psutil = psutil
        self._workers = workers
        self._clock = perf_counter()
        self._busy = self._busy_seconds()
        self._own = self._own_seconds()
        self._before = psutil.getloadavg()

    def load(self) -> Load:
        """The load since this object was made."""
        wall = max(perf_counter() - self._clock, 1e-9)
        others = (self._busy_seconds() - self._busy) - (self._own_seconds() - self._own)
        share = others / wall / (os.cpu_count() or 1)
        return Load(min(max(share, 0.0), 1.0), self._before, self._psutil.getloadavg())

    def _busy_seconds(self) -> float:
        """CPU seconds of all processes since the system began."""
        times = self._psutil.cpu_times()
        # User time already includes guests; waiting for a disk keeps no core busy.
        idle = (getattr(times, name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice"))
        return float(sum(times) - sum(idle))

    def _own_seconds(self) -> float:
        """CPU seconds of this process, its children and the workers."""
        own = os.times()
        seconds = own.user + own.system + own.children_user + own.children_system
        for pid in self._workers:
            times = self._psutil.Process(pid).cpu_times()
            seconds += float(times.user + times.system)
        return seconds
