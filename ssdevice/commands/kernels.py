"""``ssdevice kernels``: compile the kernels that make steps over few rows cheap, for this
machine.
"""

import argparse
import json

from ssdevice.errors import InputError
from ssdevice.runtime.target import runtime_target
from ssdevice.targets import DEFAULT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", default=DEFAULT, metavar="NAME", help=f"whose kernels (default {DEFAULT})"
    )


def run(args: argparse.Namespace) -> int:
    """Compile, then print the library's path."""
    library = runtime_target(args.target).build_kernels()
    if library is None:
        raise InputError(f"--target {args.target}: there is nothing to compile for it")
    print(json.dumps({"target": args.target, "library": str(library)}))
    return 0
