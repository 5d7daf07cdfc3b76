"""The files and functions of an app in an ExecuTorch bundle with slots."""

from __future__ import annotations

from ssdevice.contract import FUNCTIONS, PLAIN, PREFILL

ADAPTERS = "adapters"
ADAPTER_FILE = "adapter.safetensors"
"""An app's tensors by slot, which a host passes to ``set_adapter``."""


def functions_of(streams: bool) -> dict[str, str]:
    """The contract's functions of an app -> their names in the program, which are the same."""
    return {name: name for name in (FUNCTIONS if streams else (PREFILL, PLAIN))}
