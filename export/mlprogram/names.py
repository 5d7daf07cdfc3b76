"""Names of parameters after conversion and in a compact program."""

from __future__ import annotations

from hashlib import sha256

PREFIX = "p_module_model_"
"""The prefix that torch.export and coremltools add to a parameter's name."""
HALF = "_to_fp16"
"""The suffix that coremltools' half-precision pass adds; compression adds more after it."""
CONST = "const"


def weight_key(operation: str, output: str) -> str | None:
    """The converted name of the parameter whose value an operation returns; None for other operations."""
    key, _, rest = output.lower().removeprefix(PREFIX).partition(HALF)
    given = operation.startswith("constexpr_") or (operation == CONST and not rest)
    return key if given else None


def short_name(key: str) -> str:
    """The name of a parameter's value in a compact program."""
    return f"w{sha256(key.encode()).hexdigest()[:8]}"
