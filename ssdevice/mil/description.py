"""What ``ssdevice inspect`` shows of a Core ML package: operations, weights, memory and warnings about devices."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssdevice.mil.audit import Audit, Warning
    from ssdevice.mil.reader import Package


def describe_package(package: Package) -> dict[str, Any]:
    """A package as plain values; sizes in bytes."""
    from ssdevice.mil.audit import audit

    found = audit(package)
    return {**asdict(found), "warnings": _grouped(found)}


def _grouped(found: Audit) -> list[dict[str, Any]]:
    """Warnings grouped by code: the text of the first, the count, and the functions concerned."""
    groups: dict[str, list[Warning]] = {}
    for warning in found.warnings:
        groups.setdefault(warning.code, []).append(warning)
    return [
        {
            "code": code,
            "count": len(members),
            "functions": list(dict.fromkeys(warning.function for warning in members)),
            "first": f"{members[0].subject}: {members[0].message}",
            "source": members[0].source,
        }
        for code, members in groups.items()
    ]
