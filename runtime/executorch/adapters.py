"""Where an ExecuTorch bundle keeps an app apart, and which functions such an app has."""

from __future__ import annotations

from ssdevice.contract import FUNCTIONS, PLAIN, PREFILL

ADAPTERS = "adapters"
ADAPTER_FILE = "adapter.safetensors"
"""An app's tensors by slot: what a host gives ``set_adapter``."""


def functions_of(streams: bool) -> dict[str, str]:
    """The contract's functions of an app, which the program has under the same names."""
    return {name: name for name in (FUNCTIONS if streams else (PREFILL, PLAIN))}
