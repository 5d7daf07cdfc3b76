"""``ssdevice kernels``: compile the kernels that make steps over few rows cheap, for this machine."""

from __future__ import annotations

import argparse
import json

from ssdevice.runtime.onnx import kernels


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes no arguments of its own."""
    del parser


def run(args: argparse.Namespace) -> int:
    """Compile and say where the library is."""
    del args
    print(json.dumps({"library": str(kernels.build())}))
    return 0
