"""Refuses to compare what belongs to different models or settings."""

from __future__ import annotations

from ssdevice.bundle.folder import Bundle
from ssdevice.errors import InputError


def check_same(what: str, reference: str, *facts: tuple[str, object, object]) -> None:
    """Raise InputError for the first of ``facts`` in which ``what`` differs from ``reference``.

    ``facts``: a name, and its value in each of the two.
    """
    for name, mine, expected in facts:
        if mine != expected:
            raise InputError(f"{what}: its {name} is {mine}, that of {reference} is {expected}")


def check_base(what: str, sha256: str, bundle: Bundle) -> None:
    """Raise InputError unless a model, whose weights have this ``sha256``, is the bundle's base."""
    base = bundle.manifest.model.sha256
    if sha256 != base:
        raise InputError(
            f"{what} is not the base of {bundle.folder}: its weights have sha256 {sha256[:12]}.., the bundle's base "
            f"{base[:12]}.."
        )
