"""What conversion calls the values of parameters, and what they are called in a compact program."""

from __future__ import annotations

from hashlib import sha256

PREFIX = "p_module_model_"
"""What torch.export and coremltools put before a parameter's name."""
HALF = "_to_fp16"
"""What its half-precision pass puts behind it; compression adds more."""
CONST = "const"


def weight_key(operation: str, output: str) -> str | None:
    """The parameter, as conversion spells it, whose value an operation gives; None if it gives no parameter's."""
    key, _, rest = output.lower().removeprefix(PREFIX).partition(HALF)
    given = operation.startswith("constexpr_") or (operation == CONST and not rest)
    return key if given else None


def short_name(key: str) -> str:
    """The name of a parameter's value in a compact program."""
    return f"w{sha256(key.encode()).hexdigest()[:8]}"
